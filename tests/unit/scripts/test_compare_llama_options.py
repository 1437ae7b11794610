"""Test that commands accept or explain every option of llama.cpp's package 0.3.36 for Python."""

import sys

import pytest
from project import ROOT

from localllm.cli.argv import parse_words
from localllm.cli.registry import list_params
from localllm.errors import UsageError

sys.path.insert(0, str(ROOT / "scripts" / "record"))
from compare_llama_options import COMMANDS, compare, outcome, read_declarations, read_record, write_record

RECORD = (ROOT / "tests" / "goldens" / "llama_options.txt").read_text(encoding="utf-8")


def test_every_spelling_of_an_option_has_an_outcome():
    options = read_record(RECORD)
    counts, unknown = compare(options)
    assert unknown == [] and counts.total() == sum(len(names) for names, _ in options) > 500
    assert set(counts) == {"taken", "translated", "left out", "refused"}
    assert write_record(options) == RECORD


@pytest.mark.parametrize("command", sorted({each for commands in COMMANDS.values() for each in commands}))
def test_every_refused_option_has_a_reason(command: str):
    """Compare with what the command line prints."""
    params = list_params(command)
    for names, programs in read_record(RECORD):
        if command not in {each for program in programs for each in COMMANDS.get(program, ())}:
            continue
        for name in names:
            values = ["1", "2"] if name == "--control-vector-layer-range" else ["1"]
            try:
                parse_words([name, *values], params, command)
                is_refused = False
            except UsageError as error:
                assert str(error).startswith(f"{name}: ") or "argument too many" in str(error), error
                is_refused = str(error).startswith(f"{name}: ")
            assert is_refused == (outcome(name, command) == "refused"), name


def test_a_new_option_is_reported():
    source = """
    add_opt(common_arg(
        {"-m", "--model"}, "FNAME", "model path",
    ).set_examples({LLAMA_EXAMPLE_COMMON}));
    add_opt(common_arg(
        {"--teleport"}, {"--no-teleport"},
        string_format("whether to (default: %s)", "no"),
    ).set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI}));
    """
    options = read_declarations(source)
    assert options == [(("-m", "--model"), ("COMMON",)), (("--teleport", "--no-teleport"), ("SERVER", "CLI"))]
    _, unknown = compare(options)
    assert unknown == [f"{name} in localllm {each}" for name in options[1][0] for each in ("serve", "chat")]


def test_a_full_command_line_of_llama_server_is_parsed(cli, tiny: str):
    """Reach the check of the host after all equal and ignored options."""
    line = ("-m", tiny, "-c", "4096", "-ngl", "99", "--jinja", "-fa", "on", "-np", "2", "--metrics", "--no-webui")
    code, _, err = cli("serve", *line)
    assert (code, err.splitlines()[-1]) == (
        2, "localllm: error: --no-webui: the web page at / is always served, without settings",
    )  # fmt: skip
    code, _, err = cli("serve", *line[:-1], "--cont-batching", "--no-cache-prompt", "--host", "0.0.0.0")
    assert code == 2 and "--host lets other computers connect" in err and "--metrics" in err, err
    code, _, err = cli("serve", tiny, "--temp", "0.7")
    assert "--temp: set it in each request" in err
