"""The table of docs/sampling.md against the options, and the command line's flags against both."""

import re
from dataclasses import fields

from project import ROOT

from localllm.cli import registry as commands
from localllm.generation.sampling.options import DEFAULTS, LETTERS, SamplingOptions, steps_lettered

ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| .* \|$", (ROOT / "docs/sampling.md").read_text(), re.MULTILINE)
KEYS = dict(re.findall(r"^\| `(\w+)` \|(?:[^|]*\|){4} (?:`(\w+)`)? ?\|", (ROOT / "docs/sampling.md").read_text(), re.M))


def flags(command: str) -> dict[str, set[str]]:
    """By field of SamplingOptions, what the command line calls it."""
    params = {param.name: set(param.opts) for param in commands.params_of(command)}
    params["samplers"] |= params.pop("letters")
    return params


def test_the_table_has_every_option_and_its_default():
    assert [name for name, _, _ in ROWS] == [each.name for each in fields(SamplingOptions)]
    numbers = {name: default for name, default in DEFAULTS.items() if type(default) in (int, float)}
    assert {name: float(default) for name, _, default in ROWS if name in numbers} == numbers
    breakers = next(default for name, _, default in ROWS if name == "dry_sequence_breakers")
    assert tuple(eval(text) for text in re.findall("`(.*?)`", breakers)) == DEFAULTS["dry_sequence_breakers"]


def test_the_table_has_the_keys_of_files():
    assert {name: key for name, key in KEYS.items() if key} == {
        each.name: each.metadata["key"] for each in fields(SamplingOptions) if each.metadata["key"]
    }


def test_the_table_has_the_flags():
    known = flags("run")
    for name, named, _ in ROWS:
        assert set(re.findall("`(.*?)`", named)) <= known[name], name


def test_every_command_that_answers_has_them():
    wanted = {each.name: flags("run")[each.name] for each in fields(SamplingOptions)}
    for command in ("chat", "map"):
        assert {name: flags(command)[name] for name in wanted} == wanted


def test_letters():
    assert steps_lettered("".join(LETTERS.values())) == (*DEFAULTS["samplers"], "infill")  # only where it is named


def test_the_command_line(cli, tmp_path):
    """What is written there arrives, and mistakes name the flag or the option."""
    from tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "tiny.gguf")
    hello = "run", model, "--raw", "-p", "hello", "-n", "6", "-t", "1", "-s", "1", "--temperature", "3"

    def said(*options: object, complaint: str = "") -> str:
        code, out, err = cli(*hello, *options)
        assert (code, err) == (0, complaint)
        return out

    plain = said()
    assert said("--samplers", "top_k;top_p;min_p;temp") == said("--sampling-seq", "kpmt") == plain
    no_effect = "localllm: no effect: --temperature (not among the samplers)\n"
    assert said("--samplers", "top_k", "--top-k", "1", complaint=no_effect) == said("--temp", "0") != plain
    assert said("--mirostat", "2", "--mirostat-ent", "0.1") != plain
    assert said("--mirostat", "0", "--top-n-sigma", "0", "--xtc-probability", "0") == plain
    assert said("-l", "75+100", "--temp", "0") == "H" * 6 + "\n"
    assert said("-l", "75+100", "-l", "75-inf", "--temp", "0") == said("--temp", "0")
    for wrong, reason in {
        ("--samplers", "top_k;best"): "unknown sampler 'best'",
        ("--samplers", "top_k", "--sampling-seq", "k"): "not both",
        ("-l", "75"): "'75' is not a token id",
        ("-l", "75+x"): "'75+x' is not a token id",
        ("-l", "75+nan"): "'75+nan' is not a token id",
        ("-l", "75+inf"): "-l should be a number",
        ("-l", "100000+1"): "token 100000 does not exist",
        ("--mirostat", "3"): "--mirostat should be 0, 1 or 2",
    }.items():
        code, out, err = cli(*hello, *wrong)
        assert (code, out) == (2, "")
        assert reason in err
    code, out, err = cli("map", model, "--raw", "-l", "100000+1", "-t", "1", stdin=b"hello\n")
    assert (code, out) == (2, "")
    assert "token 100000 does not exist" in err
