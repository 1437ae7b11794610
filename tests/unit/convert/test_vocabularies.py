"""Vocabularies, special tokens and templates of converted checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from checkpoint import added_token, edit_json, sentencepiece, tokenizer, write_checkpoint, write_json
from tiny_model import CHATML

from localllm.convert import open_folder
from localllm.convert.sentencepiece import read_sentencepiece
from localllm.convert.tokenizer_json import USUAL_NAMES, build_sample, find_pretokenizer, list_candidates, split_words
from localllm.convert.vocabulary import build_vocabulary_metadata
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.text.pretokenize import PRETOKENIZERS
from localllm.text.tokenizer import Tokenizer
from tests.unit.convert.convert_parts import refused, splits

LLAMA3_WORDS = (  # as its tokenizer.json spells them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


DIGITS = {"type": "Digits", "individual_digits": True}


STARCODER = {"type": "Sequence", "pretokenizers": [DIGITS, splits(byte_level_words=True)]}


@pytest.mark.parametrize(
    ("name", "content", "ignore_merges"),
    [
        ("llama-bpe", splits(LLAMA3_WORDS), True),
        ("dbrx", splits(LLAMA3_WORDS), False),
        ("qwen2", splits(QWEN2_WORDS), False),
        ("gpt-2", splits(byte_level_words=True), False),
        ("smollm", STARCODER, False),
        ("deepseek-llm", splits(*PRETOKENIZERS["deepseek-llm"].patterns), False),
    ],
)
def test_a_pretokenizer_is_recognized(name: str, content: Any, ignore_merges: bool):
    assert find_pretokenizer(content, ignore_merges) == name


@pytest.mark.slow
def test_the_probe_tells_all_pretokenizers_apart():
    for ignore_merges in (False, True):
        cuts: dict[tuple[tuple[int, int], ...], str] = {}
        same = [
            (cuts[cut], name)
            for name, known in list_candidates(ignore_merges).items()
            if cuts.setdefault(cut := tuple(split_words(known, build_sample())), name) != name
        ]
        assert same in ([], [("qwen2", "bailingmoe")])  # two spellings of one thing
    assert all(PRETOKENIZERS[name] == PRETOKENIZERS[usual] for name, usual in USUAL_NAMES.items())


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"type": "Whitespace"},
        splits("["),
        splits(r"\w+"),
        splits(LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}{1,4}")),
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ],
)
def test_an_unknown_pretokenizer_is_refused(content: Any):
    with pytest.raises(ModelError, match="pre-tokenizer"):
        find_pretokenizer(content, False)


@pytest.mark.parametrize(("extra", "accepted"), [({}, True), ({"lo": 268}, False)])
def test_ignored_merges_are_accepted_if_they_change_nothing(tmp_path: Path, extra: dict[str, int], accepted: bool):
    content = tokenizer()  # with GPT-2's words, for which GGUF cannot say that merges are ignored
    content["model"] |= {"ignore_merges": True, "vocab": content["model"]["vocab"] | extra}
    write_json(write_checkpoint(tmp_path) / "tokenizer.json", content)
    if accepted:
        assert open_folder(tmp_path).metadata["tokenizer.ggml.pre"] == "gpt-2"
    else:
        assert "pre-tokenizer" in refused(tmp_path)


def test_a_name_that_many_know_is_preferred(tmp_path: Path):
    content = tokenizer(pre_tokenizer=splits(*PRETOKENIZERS["gpt-4o"].patterns))
    content["model"]["ignore_merges"] = True
    path = write_checkpoint(tmp_path) / "tokenizer.json"
    write_json(path, content)
    assert open_folder(tmp_path).metadata["tokenizer.ggml.pre"] == "gpt-4o"
    content["model"]["vocab"] |= {"lo": 268}  # which no merge makes
    write_json(path, content)
    assert open_folder(tmp_path).metadata["tokenizer.ggml.pre"] == "granite-embed-multi-97m"


@pytest.fixture(params=["tiny", "released"])
def source(request) -> Path | None:
    """Return the folder that vocabularies come from, or None for tiny ones."""
    return request.getfixturevalue("shared") if request.param == "released" else None


def vocabulary_of(shared: Path | None, name: str) -> Mapping[str, Any]:
    """Return a vocabulary's metadata: a released model's, as llama.cpp's converter made it, or a tiny one's."""
    return (
        GGUFFile.open(shared / "vocabs" / f"ggml-vocab-{name}.gguf").metadata if shared else vocabularies.metadata(name)
    )


def vectors(shared: Path | None, name: str) -> list[tuple[str, list[int]]]:
    """Return texts and llama.cpp's tokens for them."""
    if shared is None:
        tokens = vocabularies.GIVEN["tokens"][name]
        return [(text, plain) for text, (plain, *_) in zip(vocabularies.GIVEN["texts"], tokens, strict=True)]
    path = shared / "vocabs" / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text(encoding="utf-8").splitlines()
    return list(zip(texts[:-1], [[int(token) for token in line.split()] for line in lines], strict=True))


def special_tokens(metadata: dict[str, Any], kinds: set[int]) -> list[dict[str, Any]]:
    tokens = enumerate(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    return [added_token(token, piece, bool(kind != 4)) for token, (piece, kind) in tokens if kind in kinds]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("gpt-2", splits(byte_level_words=True)),
        ("starcoder", STARCODER),
        pytest.param("llama-bpe", splits(LLAMA3_WORDS), marks=pytest.mark.slow),
        pytest.param("deepseek-llm", splits(*PRETOKENIZERS["deepseek-llm"].patterns), marks=pytest.mark.slow),
    ],
)
def test_byte_level_vocabularies_equal_llama_cpps(source, tmp_path: Path, name: str, content: Any):
    theirs = vocabulary_of(source, name)
    pieces, types = theirs["tokenizer.ggml.tokens"], theirs["tokenizer.ggml.token_type"]
    vocab = {piece: token for token, piece in enumerate(pieces) if types[token] == 1}
    model = {"type": "BPE", "vocab": vocab, "merges": theirs["tokenizer.ggml.merges"]}
    model["ignore_merges"] = name == "llama-bpe"
    added = special_tokens(theirs, {2, 3, 4})
    write_json(tmp_path / "tokenizer.json", tokenizer(added_tokens=added, pre_tokenizer=content, model=model))
    ours, warnings = build_vocabulary_metadata(tmp_path, len(pieces))
    assert ours["tokenizer.ggml.tokens"] == pieces and warnings == []
    assert ours["tokenizer.ggml.merges"] == theirs["tokenizer.ggml.merges"]
    assert ours["tokenizer.ggml.token_type"].tolist() == types.tolist()
    encode = Tokenizer(ours).encode
    assert [encode(text) for text, _ in vectors(source, name)] == [tokens for _, tokens in vectors(source, name)]


def merges_of(pieces: dict[str, float]) -> list[list[str]]:
    """List all merges that make pieces of others, as transformers translates them."""
    cuts = [(piece[:n], piece[n:], score) for piece, score in pieces.items() for n in range(1, len(piece))]
    merges = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [[left, right] for left, right, _ in merges]


def byte_fallback(pieces: list[str], scores: list[float], added: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tokenizer.json of a Llama 2."""
    spaces = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    model = {
        "type": "BPE",
        "vocab": {piece: token for token, piece in enumerate(pieces)},
        "merges": merges_of(dict(zip(pieces, scores, strict=True))),
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    normalizer = {"type": "Sequence", "normalizers": spaces}
    return tokenizer(added_tokens=added, normalizer=normalizer, pre_tokenizer=None, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("files", ["tokenizer.model", "both", "tokenizer.json"])
def test_sentencepiece_vocabularies_equal_llama_cpps(source, tmp_path: Path, files: str):
    theirs = vocabulary_of(source, "llama-spm")
    pieces, scores = theirs["tokenizer.ggml.tokens"], theirs["tokenizer.ggml.scores"].tolist()
    types = theirs["tokenizer.ggml.token_type"].tolist()
    if files != "tokenizer.json":
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces, scores, types))
    if files != "tokenizer.model":
        write_json(tmp_path / "tokenizer.json", byte_fallback(pieces, scores, special_tokens(theirs, {2, 3, 4})))
    write_json(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1})
    ours, warnings = build_vocabulary_metadata(tmp_path, len(pieces))
    assert ours["tokenizer.ggml.tokens"] == pieces and warnings == []
    assert ours["tokenizer.ggml.token_type"].tolist() == types
    assert ours["tokenizer.ggml.add_bos_token"] is ours["tokenizer.ggml.add_space_prefix"] is True
    assert (ours["tokenizer.ggml.bos_token_id"], ours["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert "tokenizer.ggml.padding_token_id" not in ours
    if files != "tokenizer.json":
        normal = np.array(types) == 1
        np.testing.assert_array_equal(ours["tokenizer.ggml.scores"][normal], theirs["tokenizer.ggml.scores"][normal])
    encode = Tokenizer(ours).encode
    assert [encode(text) for text, _ in vectors(source, "llama-spm")] == [
        tokens for _, tokens in vectors(source, "llama-spm")
    ]


PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "ab", "▁a", "▁ab", "▁", "a", "b"]


SCORES = [0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]


TYPES = [2, 3, 3, 6, 1, 1, 1, 1, 1, 1]


def test_a_sentencepiece_model_converts_without_tokenizer_json(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES, SCORES, TYPES))
    write_json(tmp_path / "added_tokens.json", {"<extra>": 10, "<|im_end|>": 11, "▁x": 12, "far": 99})
    decoder = {"2": {"content": "</s>", "special": True}, "10": {"content": "<extra>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": decoder, "add_prefix_space": False})
    metadata, warnings = build_vocabulary_metadata(tmp_path, 14)
    assert metadata["tokenizer.ggml.tokens"] == [*PIECES, "<extra>", "<|im_end|>", " x", "[PAD13]"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [*TYPES, 3, 3, 4, 5]
    assert metadata["tokenizer.ggml.scores"].dtype == np.float32
    assert metadata["tokenizer.ggml.scores"].tolist() == [0, 0, -1000, *SCORES[3:], -1000, -1000, -1000, -10000]
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert warnings == ["1 token from id 99 on is dropped: the model has 14"]


def test_scores_come_from_the_order_of_merges(tmp_path: Path):
    added = [added_token(token, PIECES[token]) for token in range(3)]
    write_json(tmp_path / "tokenizer.json", byte_fallback(PIECES, SCORES, added))
    metadata, _ = build_vocabulary_metadata(tmp_path, len(PIECES))
    assert metadata["tokenizer.ggml.token_type"].tolist() == TYPES
    assert metadata["tokenizer.ggml.scores"].tolist()[4:] == [0, -1, -2, -3, -3, -3]


def test_added_tokens_need_no_merges(tmp_path: Path):
    pieces = [*PIECES, "ba"]
    content = byte_fallback(pieces, [*SCORES, -6.0], [added_token(token, pieces[token]) for token in (0, 1, 2, 10)])
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if "".join(merge) != "ba"]
    write_json(tmp_path / "tokenizer.json", content)
    metadata, _ = build_vocabulary_metadata(tmp_path, len(pieces))
    assert metadata["tokenizer.ggml.scores"].tolist()[4:10] == [0, -1, -2, -3, -3, -3]


def test_gemma_cuts_at_spaces_that_are_gone(tmp_path: Path):
    content = byte_fallback(PIECES, SCORES, [added_token(token, PIECES[token]) for token in range(3)])
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    write_json(tmp_path / "tokenizer.json", content)
    metadata, _ = build_vocabulary_metadata(tmp_path, len(PIECES))
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert Tokenizer(metadata).encode("a ab") == [8, 6]
    content["normalizer"] = None
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match="found Split"):
        build_vocabulary_metadata(tmp_path, len(PIECES))


def test_gemma_4_is_read_by_its_merges(tmp_path: Path):
    """Read them whatever their order; the marks of its thoughts and calls are text."""
    pieces, marks = [*PIECES, "<|channel>", "<|turn>"], {0, 1, 2, 10, 11}
    pieces += [f"<0x{byte:02X}>" for byte in range(256) if byte != 10]
    content = byte_fallback(pieces, [0.0] * len(pieces), [added_token(token, pieces[token]) for token in marks])
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["model"]["merges"] = [["▁", "ab"], ["a", "b"], ["▁", "a"]]
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>"})
    metadata, _ = build_vocabulary_metadata(tmp_path, len(pieces), "gemma4")
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert metadata["tokenizer.ggml.merges"] == ["▁ ab", "a b", "▁ a"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [3, 3, 3, 6, 1, 1, 1, 1, 1, 1, 4, 3, *[6] * 255]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert Tokenizer(metadata).encode("a ab\na")[-4:] == [8, 6, 3, 8]
    content["pre_tokenizer"] = {"type": "Digits"}
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match="found Digits"):
        build_vocabulary_metadata(tmp_path, len(pieces), "gemma4")


@pytest.mark.parametrize(
    ("merges", "problem"),
    [
        ([["a", "b"], ["▁", "a"], ["▁", "ab"]], "no merge produces ▁ab of ▁a b"),
        ([["▁", "ab"], ["a", "b"], ["▁", "a"], ["▁a", "b"]], "not consecutive"),
        ([["a"]], "unexpected content"),
        (None, "unexpected content"),
        ("ab", "unexpected content"),
    ],
)
def test_merges_that_differ_from_sentencepiece_are_refused(tmp_path: Path, merges: Any, problem: str):
    content = byte_fallback(PIECES, SCORES, [added_token(token, PIECES[token]) for token in range(3)])
    content["model"]["merges"] = merges
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match=problem):
        build_vocabulary_metadata(tmp_path, len(PIECES))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a", b"IQ== 0\nIg== 1\n", b"\x0a\x05\x0a\xff\xff\xff\xff", b"\xff" * 30, b"\x12\x02\x18\x02", b"\x0b"],
)
def test_data_other_than_a_sentencepiece_model_is_refused(data: bytes):
    with pytest.raises(ValueError):
        read_sentencepiece(data)


def test_unigram_models_are_refused(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES, SCORES, TYPES, kind=1))
    with pytest.raises(ModelError, match="must be 2, BPE"):
        build_vocabulary_metadata(tmp_path, len(PIECES))


def metadata_with(tmp_path: Path, **files: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer metadata of a checkpoint with these changes of its JSON files."""
    write_checkpoint(tmp_path)
    for name, changes in files.items():
        if not (tmp_path / f"{name}.json").exists():
            write_json(tmp_path / f"{name}.json", {})
        edit_json(tmp_path / f"{name}.json", **changes)
    metadata = open_folder(tmp_path).metadata
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


def template(*parts: str) -> dict[str, Any]:
    """Return a post-processor of special tokens' texts, and "A" for the text."""
    single = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "config", "adds"),
    [
        (None, {}, (False, None)),
        (template("<|endoftext|>", "A"), {}, (True, False)),
        (template("<|endoftext|>", "A", "<|im_end|>"), {}, (True, True)),
        ({"type": "Sequence", "processors": [template("A", "<|im_end|>")]}, {}, (False, True)),
        (template("<|im_start|>", "A"), {}, (False, False)),
        (template("<|endoftext|>", "A"), {"add_bos_token": False}, (False, False)),
        (None, {"add_bos_token": True, "add_eos_token": True}, (True, True)),
        (None, {"bos_token": None, "add_bos_token": True}, (True, None)),
    ],
)
def test_switches_follow_the_post_processor_and_the_config(
    tmp_path: Path, processor: Any, config: dict[str, Any], adds: tuple[Any, Any]
):
    metadata = metadata_with(tmp_path, tokenizer={"post_processor": processor}, tokenizer_config=config)
    assert (metadata["add_bos_token"], metadata.get("add_eos_token")) == adds


def test_tokens_named_only_by_the_template_are_found(tmp_path: Path):
    metadata = metadata_with(
        tmp_path,
        tokenizer={"post_processor": template("<|im_start|>", "A")},
        tokenizer_config={"bos_token": None},
        config={"bos_token_id": None},
    )
    assert (metadata["bos_token_id"], metadata["add_bos_token"], metadata["add_eos_token"]) == (1, True, False)


def test_add_bos_is_off_without_a_bos_token(tmp_path: Path):
    changes = {"bos_token": None, "add_bos_token": True}
    metadata = metadata_with(tmp_path, tokenizer_config=changes, config={"bos_token_id": None})
    assert "bos_token_id" not in metadata and metadata["add_bos_token"] is False


def test_special_tokens_are_named_by_text_and_by_number(tmp_path: Path):
    config = {"pad_token": {"content": "<|im_start|>"}, "eos_token": None, "unk_token": "not there"}
    metadata = metadata_with(
        tmp_path, tokenizer_config=config, config={"eos_token_id": [2, 1], "unk_token_id": 5, "pad_token_id": 9}
    )
    ids = {key: value for key, value in metadata.items() if key.endswith("_token_id")}
    assert ids == {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 5,
        "padding_token_id": 1,
        "eot_token_id": 1,
    }


def test_further_ends_become_eot_and_eom(tmp_path: Path):
    metadata = metadata_with(tmp_path, generation_config={"eos_token_id": [2, 0, -1, 273, 7, "x", 272, 8, 9]})
    assert (metadata["eos_token_id"], metadata["eot_token_id"], metadata["eom_token_id"]) == (
        2,
        7,
        272,
    )  # 0 by its text


def test_added_tokens_get_their_type_and_place(tmp_path: Path):
    added = [added_token(268, "<tool>", False), added_token(269, "<|tool|>", False), added_token(300, "<far>")]
    metadata = metadata_with(tmp_path, tokenizer={"added_tokens": tokenizer()["added_tokens"] + added})
    assert metadata["tokens"][268:] == ["<tool>", "<|tool|>", "[PAD270]", "[PAD271]", "[PAD272]"]
    assert metadata["token_type"].tolist()[268:] == [4, 3, 5, 5, 5]


@pytest.mark.parametrize("added", [None, []])
def test_a_tokenizer_need_not_have_added_tokens(tmp_path: Path, added: list[Any] | None):
    metadata = metadata_with(tmp_path, tokenizer={"added_tokens": added})
    assert metadata["token_type"].tolist()[:3] == [1, 1, 1] and metadata["tokens"][0] == "<|endoftext|>"


@pytest.mark.sampled
def test_the_chat_template_file_goes_before_the_config(tmp_path: Path):
    write_checkpoint(tmp_path)
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}, "?"]
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    metadata = open_folder(tmp_path).metadata
    assert metadata["tokenizer.chat_template"] == CHATML  # the file goes first, as in transformers
    assert (
        metadata["tokenizer.chat_templates"] == ["tool_use"] and metadata["tokenizer.chat_template.tool_use"] == "two"
    )
    (tmp_path / "chat_template.jinja").unlink()
    assert open_folder(tmp_path).metadata["tokenizer.chat_template"] == "one"
    edit_json(tmp_path / "tokenizer_config.json", chat_template="three")
    assert open_folder(tmp_path).metadata["tokenizer.chat_template"] == "three"
    edit_json(tmp_path / "tokenizer_config.json", chat_template=None)
    assert "tokenizer.chat_template" not in open_folder(tmp_path).metadata
