"""Test the page about sampling and the command line's flags against the declared options."""

import sys

from project import ROOT

from localllm.cli import registry as commands
from localllm.generation.sampling.options import DEFAULTS, LETTERS, OPTIONS, parse_sampler_letters

sys.path.insert(0, str(ROOT / "scripts"))
from write_help import SAMPLING, sampling


def flags(command: str) -> dict[str, set[str]]:
    """Return the command line's flags by field of SamplingOptions."""
    params = {param.name: set(param.opts) for param in commands.list_params(command)}
    params["samplers"] |= params.pop("letters")
    return params


def test_the_page_about_sampling_is_current():
    page = SAMPLING.read_text(encoding="utf-8")
    assert sampling(page) == page, "python scripts/write_help.py writes it"
    assert all(f"| `{name}` |" in page for name in OPTIONS)


def test_every_command_that_generates_has_all_sampling_flags():
    wanted = {name: {*option.flags.split()} for name, option in OPTIONS.items()}
    wanted["samplers"] |= {"--sampling-seq", "--sampler-seq"}
    for command in ("run", "chat", "map"):
        assert {name: flags(command)[name] for name in wanted} == wanted


def test_all_letters_give_the_default_samplers_and_infill():
    assert parse_sampler_letters("".join(LETTERS.values())) == (
        *DEFAULTS["samplers"],
        "infill",
    )  # only where it is named


def test_run_applies_sampling_options_and_names_mistakes(cli, tmp_path):
    from tiny_model import write_tiny_model

    model = write_tiny_model(tmp_path / "tiny.gguf")
    hello = "run", model, "--raw", "-p", "hello", "-n", "6", "-t", "1", "-s", "1", "--temperature", "3"

    def run(*options: object, complaint: str = "") -> str:
        code, out, err = cli(*hello, *options)
        assert (code, err) == (0, complaint)
        return out

    plain = run()
    assert run("--samplers", "top_k;top_p;min_p;temp") == run("--sampling-seq", "kpmt") == plain
    no_effect = "localllm: ignored (no effect): --temperature (not in --samplers)\n"
    assert run("--samplers", "top_k", "--top-k", "1", complaint=no_effect) == run("--temp", "0") != plain
    assert run("--mirostat", "2", "--mirostat-ent", "0.1") != plain
    assert run("--mirostat", "0", "--top-n-sigma", "0", "--xtc-probability", "0") == plain
    assert run("-l", "75+100", "--temp", "0") == "H" * 6 + "\n"
    assert run("-l", "75+100", "-l", "75-inf", "--temp", "0") == run("--temp", "0")
    for wrong, reason in {
        ("--samplers", "top_k;best"): "unknown sampler 'best'",
        ("--samplers", "top_k", "--sampling-seq", "k"): "not both",
        ("-l", "75"): "such as 15043+1.5 or 15043-inf, not '75'",
        ("-l", "75+x"): "such as 15043+1.5 or 15043-inf, not '75+x'",
        ("-l", "75+nan"): "such as 15043+1.5 or 15043-inf, not '75+nan'",
        ("-l", "75+inf"): "-l must be a number",
        ("-l", "100000+1"): "token 100000 does not exist",
        ("--mirostat", "3"): "--mirostat must be 0, 1 or 2",
    }.items():
        code, out, err = cli(*hello, *wrong)
        assert (code, out) == (2, "")
        assert reason in err
    code, out, err = cli("map", model, "--raw", "-l", "100000+1", "-t", "1", stdin=b"hello\n")
    assert (code, out) == (2, "")
    assert "token 100000 does not exist" in err
