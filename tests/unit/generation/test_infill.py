"""Test infill (fill in the middle): which tokens are used, the prompt, and what a model generates."""

import json
from pathlib import Path
from typing import Any

import pytest
from invalid_models import Wrong

import localllm
from localllm.errors import UsageError
from localllm.generation.infill import Infill
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import InfillTokens
from tests.unit.text.test_tokenizer import NORMAL, byte_level

QWEN = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|repo_name|>", "<|file_sep|>"]
PRE, MID, SUF, REPO, FILE = range(256, 261)  # in a vocabulary of 256 bytes


def tokenizer_with(*texts: str, **metadata: Any) -> Tokenizer:
    return Tokenizer.from_metadata(byte_level(special=[(text, NORMAL) for text in texts], **metadata))


def write_fim_model(folder: Path) -> Path:
    """Write the tiny model with infill tokens in place of its last merges."""
    wrong = Wrong(folder)
    pieces = localllm.Tokenizer.from_file(wrong.valid).pieces
    return wrong.write(
        {"tokenizer.ggml.tokens": [*pieces[: -len(QWEN)], *QWEN], "tokenizer.ggml.merges": ["h e", "l l"]}
    )


@pytest.fixture(scope="module")
def fim_path(tmp_path_factory) -> Path:
    return write_fim_model(tmp_path_factory.mktemp("fim"))


# ---- tokens


def test_infill_tokens_are_found_by_their_texts():
    assert tokenizer_with(*QWEN).infill_tokens == InfillTokens(PRE, SUF, MID, REPO, FILE)
    assert tokenizer_with("<PRE>", "<MID>", "<SUF>").infill_tokens == (PRE, SUF, MID, None, None)
    assert tokenizer_with("<｜fim▁begin｜>", "<｜fim▁end｜>", "<｜fim▁hole｜>").infill_tokens == (
        PRE,
        SUF,
        MID,
        None,
        None,
    )


def test_infill_ids_of_the_metadata_come_first():
    ids = {"fim_pre_token_id": 1, "fim_suf_token_id": 2, "fim_mid_token_id": 3, "fim_rep_token_id": 4}
    assert tokenizer_with(*QWEN, **ids).infill_tokens == (1, 2, 3, 4, FILE)
    assert tokenizer_with(fim_sep_token_id=5, **ids).infill_tokens == (1, 2, 3, 4, 5)
    older = {"prefix_token_id": 7, "suffix_token_id": 8, "middle_token_id": 9}
    assert tokenizer_with(*QWEN, **older).infill_tokens == (7, 8, 9, REPO, FILE)
    assert tokenizer_with(**older, **ids).infill_tokens == (1, 2, 3, 4, None)
    denied = tokenizer_with(*QWEN, fim_pre_token_id=-1, fim_suf_token_id=9999)
    assert denied.infill_tokens == (PRE, SUF, MID, REPO, FILE)


@pytest.mark.parametrize("missing", range(3))
def test_a_model_without_all_infill_tokens_has_none(missing: int):
    tokenizer = tokenizer_with(*(text for place, text in enumerate(QWEN) if place != missing))
    assert tokenizer.infill_tokens is None
    with pytest.raises(UsageError, match="this model cannot fill in the middle of a text: its vocabulary has no"):
        Infill("a", "b").encode(tokenizer)


# ---- prompts


def encode(*texts: str | int) -> list[int]:
    """Return the ids of strings, one token per byte, and of given tokens."""
    tokenizer = tokenizer_with(*QWEN)
    return [token for text in texts for token in ([text] if isinstance(text, int) else tokenizer.encode(text))]


def test_the_infill_prompt_joins_prefix_and_suffix():
    tokenizer = tokenizer_with(*QWEN)
    assert Infill("ab", "cd").encode(tokenizer) == encode(PRE, "ab", SUF, "cd", MID)
    assert Infill("", "").encode(tokenizer) == [PRE, SUF, MID]
    assert Infill("ab", "cd", typed="x").encode(tokenizer) == encode(PRE, "abx", SUF, "cd", MID)


def test_marker_texts_in_the_parts_are_plain_text():
    prompt = Infill("<|fim_suffix|>", "<|file_sep|>").encode(tokenizer_with(*QWEN))
    assert prompt == encode(PRE, *"<|fim_suffix|>", SUF, *"<|file_sep|>", MID) and len(prompt) == 29


def test_other_files_precede_the_infill_prompt():
    tokenizer, files = tokenizer_with(*QWEN), [("a.py", "1\n"), ("b.py", "2\n")]
    head, last = (REPO, "myproject\n"), (FILE, "filename\n")
    others = (FILE, "a.py\n1\n", FILE, "b.py\n2\n")
    parts = (PRE, "ab", SUF, "cd", MID)
    assert Infill("ab", "cd", files).encode(tokenizer) == encode(*head, *others, *last, *parts)
    assert Infill("ab", "cd", ()).encode(tokenizer) == encode(*head, *last, *parts)
    plain = tokenizer_with(*QWEN[:3])
    snippets = "\n\n--- a.py ---\n\n1\n\n\n--- b.py ---\n\n2\n"
    assert Infill("ab", "cd", files).encode(plain) == encode(snippets, *parts)


def test_bos_comes_first_in_an_infill_prompt():
    tokenizer = tokenizer_with(*QWEN, "<s>", bos_token_id=261, add_bos_token=True)
    assert Infill("a", "b").encode(tokenizer) == encode(261, PRE, "a", SUF, "b", MID)
    assert Infill("a", "b", [("c", "d")]).encode(tokenizer)[:2] == [261, REPO]


def test_long_parts_are_cut_away_from_the_gap():
    """Keep what is next to the gap, and the last of the files."""
    tokenizer, digits = tokenizer_with(*QWEN), "0123456789" * 4
    prompt = Infill(digits, digits, typed="x").encode(tokenizer, limit=40)
    assert prompt == encode(PRE, digits[-30:], "x", SUF, digits[:7], MID)
    files, around = [("a", "11"), ("b", "22")], len("myproject\nfilename\n") + 2
    for most, last in ((10, [0, 1]), (9, [1]), (5, [1]), (4, [])):
        others = [part for place in last for part in (FILE, "{}\n{}".format(*files[place]))]
        expected = encode(REPO, "myproject\n", *others, FILE, "filename\n", PRE, "a", SUF, "b", MID)
        assert Infill("a", "b", files).encode(tokenizer, 40, around + most) == expected


# ---- models


def test_infill_generates_as_generate_does_with_its_prompt(fim_path: Path):
    with localllm.open(fim_path) as model:
        answer = model.infill("hello", "world", 5, temperature=0)
        text = "".join(answer)
        marks = model.tokenizer.infill_tokens
        assert marks is not None
        prompt = [marks.prefix, *model.tokenize("hello"), marks.suffix, *model.tokenize("world"), marks.middle]
        assert answer.prompt == prompt and answer.completion_tokens == 5
        assert text == "".join(model.generate(prompt, 5, temperature=0))
        with_files = model.infill("hello", "world", 1, temperature=0, files=[("a", "b")])
        assert with_files.prompt[0] == marks.repository and with_files.prompt[-len(prompt) :] == prompt
        with pytest.raises(UsageError, match="suffix must be a str, not NoneType"):
            model.infill("hello", None)


def test_infill_refuses_a_model_without_its_tokens(tiny: str):
    with localllm.open(tiny) as model, pytest.raises(UsageError, match="cannot fill in the middle"):
        model.infill("a", "b")


# ---- run


def test_run_prints_the_middle_only(fim_path: Path, tmp_path: Path, cli):
    after = tmp_path / "after.txt"
    after.write_text("world\n", "utf-8")
    with localllm.open(fim_path) as model:
        middle = "".join(model.infill("hello", "world\n", 5, temperature=0))
        other = "".join(model.infill("hello", "world", 5, temperature=0))
        assert middle != other
    greedy = ("-n", 5, "--temp", 0)
    assert cli("run", fim_path, "-p", "hello", "-sf", after, *greedy) == (0, f"{middle}\n", "")
    assert cli("run", fim_path, "-p", "hello", "--suffix", "world\n", *greedy) == (0, f"{middle}\n", "")
    assert cli("run", fim_path, "--suffix", "world", *greedy, stdin=b"hello\n") == (0, f"{other}\n", "")
    code, out, _ = cli("run", fim_path, "-p", "hello", "--suffix", "world", "-n", 5, "--n", 2, "--temp", 0, "--json")
    assert code == 0 and {answer["text"] for answer in json.loads(out)["answers"]} == {other}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["-sys", "Be short"], "--suffix turns off the chat template: leave out -sys"),
        (["--chat-template", "chatml"], "--suffix turns off the chat template: leave out --chat-template"),
        (["--think", "on"], "--suffix turns off the chat template: leave out the options for thinking"),
        (["--raw"], "--suffix cannot be combined with --raw"),
        (["--choices", "a,b"], "--suffix cannot be combined with --choices"),
        (["--tools", "read_file"], "--suffix cannot be combined with --tools"),
        (["--receipt", "x.json"], "--suffix cannot be combined with --receipt"),
        (["--endpoint", "http://127.0.0.1:9"], "--suffix cannot be combined with --endpoint"),
        (["--diffusion-steps", "4"], "--suffix cannot be combined with the options of diffusion"),
        (["-sf", "nowhere.txt"], "cannot read the prompt from nowhere.txt"),
    ],
)
def test_suffix_refuses_conflicting_options(fim_path: Path, refused, words: list[str], reason: str):
    options = [] if words[0] == "-sf" else ["--suffix", "x"]
    assert refused(["run", fim_path, "-p", "a", *options, *words]).startswith(f"localllm: error: {reason}")


def test_run_refuses_two_suffixes(fim_path: Path, cli):
    code, _, err = cli("run", fim_path, "-p", "a", "--suffix", "b", "-sf", fim_path)
    assert code == 2 and err == "localllm: error: give either --suffix or -sf, not both\n"


def test_run_refuses_a_suffix_for_a_model_without_infill(tiny: str, refused):
    assert refused(["run", tiny, "-p", "a", "--suffix", "b"]).startswith(
        "localllm: error: this model cannot fill in the middle of a text: its vocabulary has no"
    )


def test_an_infill_prompt_may_put_the_suffix_first():
    tokenizer = tokenizer_with(*QWEN)
    first = Infill("ab", "cd", typed="e", suffix_first=True).encode(tokenizer)
    assert first == [SUF, *tokenizer.encode("cd"), PRE, *tokenizer.encode("abe"), MID]
