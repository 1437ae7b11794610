"""Hugging Face checkpoints as sources: logits as by transformers, vocabularies as by llama.cpp, refusals."""

import json
import struct
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import vocabularies
from checkpoint import (
    CONFIG,
    added_token,
    edit_json,
    encoded,
    make_weights,
    sentencepiece,
    tokenizer,
    write_checkpoint,
    write_json,
    write_safetensors,
)
from tiny_model import CHATML, vocabulary

import localllm
from localllm.convert import Checkpoint, open_folder
from localllm.convert.files import report_as_model_error
from localllm.convert.general_metadata import is_plain
from localllm.convert.sentencepiece import message, read_sentencepiece, varint
from localllm.convert.tensor_mapping import unties_output
from localllm.convert.tokenizer_json import USUAL_NAMES, candidates, pretokenizer_name, probe, split_words
from localllm.convert.tokens import (
    Tokens,
    cuts_nothing,
    groups_of_merges,
    merge_pairs,
    prepends_space,
    refuse_normalizer,
)
from localllm.convert.transforms import from_array
from localllm.convert.vocabulary import VocabularySettings, token_flags, vocabulary_metadata
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.text.pretokenize import PRETOKENIZERS
from localllm.text.tokenizer import Tokenizer

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def scaled(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


# Changes of the checkpoint -> logits of tokens 0, 50, ... 250 behind the text, by transformers 5.23 with PyTorch 2.13:
# AutoModelForCausalLM.from_pretrained(folder, dtype=float32, attn_implementation="eager").
TEXT = [(i * 37) % 250 + 3 for i in range(100)]
LOGITS: dict[str, tuple[dict[str, Any], str, int, list[float]]] = {
    "F32": ({}, "F32", 1, [-0.44137, 0.25852, 0.17065, 1.61614, 0.72142, 0.83689]),
    "F64": ({}, "F64", 1, [-0.44137, 0.25852, 0.17065, 1.61614, 0.72142, 0.83689]),
    "F16": ({}, "F16", 1, [-0.44137, 0.25852, 0.17065, 1.61614, 0.72142, 0.83689]),
    "BF16 in three files": ({}, "BF16", 3, [-0.44137, 0.25852, 0.17065, 1.61614, 0.72142, 0.83689]),
    "tied": ({"tie_word_embeddings": True}, "F32", 1, [-0.56265, 0.99559, 0.30584, -0.17492, -0.66416, -0.47859]),
    "biases": (
        {"attention_bias": True, "mlp_bias": True},
        "F32",
        1,
        [0.26499, -0.93975, 1.34205, -0.43568, -0.75481, 0.45878],
    ),
    "head_dim": ({"head_dim": 24}, "F32", 1, [-1.55745, 0.25843, -0.33332, 0.48353, 0.28518, -0.46598]),
    "no groups": ({"num_key_value_heads": 4}, "F32", 1, [-0.24948, 1.0348, 1.95801, -1.28245, 0.33176, -0.72099]),
    "mistral": (
        {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6},
        "F32",
        1,
        [-0.09436, -0.15243, 0.50374, 1.29619, 0.96627, 0.12812],
    ),
    "linear": (scaled("linear", factor=4.0), "F32", 1, [0.26952, 0.30433, 0.57197, 1.26448, 1.02336, -0.50496]),
    "yarn": (scaled("yarn", **YARN), "F32", 1, [-0.60622, 0.814, 0.77255, 1.58655, 0.87069, 0.10898]),
    "yarn, magnitude": (
        scaled("yarn", attention_factor=1.3, **YARN),
        "F32",
        1,
        [-1.258, 1.13515, 0.56953, 1.77743, 1.10762, 0.31242],
    ),
    "yarn, mscale": (
        scaled("yarn", mscale=1.0, mscale_all_dim=0.7, **YARN),
        "F32",
        1,
        [-0.32153, 0.55042, 0.74847, 1.45532, 0.72884, -0.09824],
    ),
    "llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": None},
        *("F32", 1, [0.42572, -0.36234, 0.68433, 1.0803, 0.86409, -0.73212]),
    ),
}


def write_gguf(path: Path, checkpoint: Checkpoint) -> Path:
    """The checkpoint as a file, by the gguf package."""
    writer = gguf.GGUFWriter(str(path), checkpoint.metadata["general.architecture"])
    for key, value in checkpoint.metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, np.ndarray) and value.dtype == np.uint64:
            kinds_of_array = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64
            writer.add_key_value(key, value.tolist(), *kinds_of_array)
        elif isinstance(value, list | np.ndarray):
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](key, value)
    for tensor in checkpoint.tensors:
        data = all_rows(tensor)
        if tensor.format.name in ("F32", "F16"):
            data = data.view({"F32": np.float32, "F16": np.float16}[tensor.format.name]).reshape(tensor.shape)
        else:
            data = data.reshape(*tensor.shape[:-1], -1)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType(tensor.format.id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_rows(tensor: Any) -> np.ndarray:
    return tensor.rows(0, prod(tensor.shape[:-1]))


def refused(folder: Path) -> str:
    """The message with which a folder is refused: one line."""
    with pytest.raises(ModelError) as caught:
        open_folder(folder)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


# ---- weights and hyperparameters


@pytest.mark.slow
@pytest.mark.parametrize("variant", LOGITS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str):
    config, dtype, files, expected = LOGITS[variant]
    checkpoint = open_folder(write_checkpoint(tmp_path / "model", config, dtype, files))
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    with localllm.open(path, backend="reference", kv_type="f32") as model:
        logits = model.logits(TEXT)[-1]
    np.testing.assert_allclose(logits[:251:50], expected, atol=5e-5)
    assert checkpoint.warnings == []


def test_rows_of_queries_and_keys_are_in_pairs(tmp_path: Path):
    checkpoint = open_folder(write_checkpoint(tmp_path, {"attention_bias": True}, "BF16"))
    weights = make_weights(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    for name, theirs, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        matrix, bias = (weights[f"model.layers.1.self_attn.{theirs}.{kind}"] for kind in ("weight", "bias"))
        halves = matrix.reshape(heads, 2, 8, 64)  # as llama.cpp's converter does it
        expected = np.frombuffer(encoded(halves.swapaxes(1, 2), "BF16"), np.uint8).reshape(len(matrix), -1)
        tensor = tensors[f"blk.1.{name}.weight"]
        assert (tensor.format.name, tensor.shape) == ("BF16", matrix.shape)
        for first, last in ((0, len(matrix)), (0, 1), (5, 19), (15, 17), (31, 32)):
            np.testing.assert_array_equal(tensor.rows(first, last), expected[first:last])
        vector = tensors[f"blk.1.{name}.bias"]
        assert vector.format.name == "F32"
        np.testing.assert_array_equal(
            all_rows(vector).view(np.float32)[0], bias.reshape(heads, 2, 8).swapaxes(1, 2).ravel()
        )


def test_other_weights_and_metadata_are_as_they_were(tmp_path: Path):
    checkpoint = open_folder(write_checkpoint(tmp_path / "Tiny-Test-Instruct", dtype="F16"))
    weights = make_weights({**json.loads((Path(checkpoint.path) / "config.json").read_text(encoding="utf-8"))})
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    down = tensors["blk.0.ffn_down.weight"].rows(3, 9).view(np.float16)
    np.testing.assert_array_equal(down, weights["model.layers.0.mlp.down_proj.weight"][3:9])
    norm = all_rows(tensors["output_norm.weight"]).view(np.float32)[0]
    np.testing.assert_array_equal(norm, weights["model.norm.weight"])
    plain = {key: value for key, value in checkpoint.metadata.items() if not isinstance(value, list | np.ndarray)}
    assert plain == {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny Test Instruct",
        "general.finetune": "Instruct",
        "general.basename": "Tiny-Test",
        "general.size_label": "97K",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 273,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        "general.file_type": gguf.LlamaFileType.MOSTLY_F16,
        "general.quantization_version": 2,
    }
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == vocabulary() + [f"[PAD{n}]" for n in range(268, 273)]
    types = checkpoint.metadata["tokenizer.ggml.token_type"]
    assert types.dtype == np.int32 and types.tolist() == [3] * 3 + [1] * 265 + [5] * 5


def test_the_model_card_tells_license_and_languages(tmp_path: Path):
    write_checkpoint(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\n- de\n---\n# Tiny\n", encoding="utf-8")
    metadata = open_folder(tmp_path).metadata
    assert (metadata["general.license"], metadata["general.languages"]) == ("mit", ["en", "de"])


@pytest.mark.parametrize(
    "card", ["---\n[", "---\nlicense: [1, {}]\ntags: 3\n---\n", "---\nname: !!python/name:os\n---\n"]
)
def test_a_broken_model_card_is_left_out_with_a_warning(tmp_path: Path, card: str):
    folder = write_checkpoint(tmp_path / "Tiny-1B-Chat")
    (folder / "README.md").write_text(card, encoding="utf-8")
    checkpoint = open_folder(folder)
    assert checkpoint.metadata["general.name"] == "Tiny 1B Chat"
    assert checkpoint.metadata["general.basename"] == "Tiny"
    assert [line for line in checkpoint.warnings if line.startswith("README.md: the model card's metadata is invalid")]


def test_json_and_templates_may_begin_with_a_byte_order_mark(tmp_path: Path):
    """As editors on Windows save them; the template would print it."""
    plain = open_folder(write_checkpoint(tmp_path / "Tiny", {"_name_or_path": "somebody/Tiny"})).metadata
    for path in (tmp_path / "Tiny").iterdir():
        if path.suffix in (".json", ".jinja"):
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    marked = open_folder(tmp_path / "Tiny").metadata
    assert marked.keys() == plain.keys()
    for key, value in plain.items():
        np.testing.assert_array_equal(marked[key], value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("mit", True), ("", True), (5, True), (["en", "de"], True), ([], False), (["en", 5], False), (0.5, False),
        (None, False), ({"name": "x"}, False),
    ],
)  # fmt: skip
def test_what_a_model_card_may_say(value: object, expected: bool):
    assert is_plain(value) == expected


def test_a_folder_of_the_cache_has_the_models_name(tmp_path: Path):
    folder = tmp_path / "models--some-body--Tiny-Test" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    assert open_folder(write_checkpoint(folder)).metadata["general.name"] == "Tiny-Test"


def with_output(folder: Path, like_embedding: bool, dtype: str = "F32") -> Path:
    """A checkpoint that ties its output matrix to the embedding and stores one all the same."""
    folder = write_checkpoint(folder)
    weights = make_weights(CONFIG)
    if like_embedding:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    kinds = {"lm_head.weight": dtype}
    write_safetensors(folder / "model.safetensors", [(name, kinds.get(name, "F32"), a) for name, a in weights.items()])
    edit_json(folder / "config.json", tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_tied_checkpoint_may_store_its_output_matrix(tmp_path: Path, dtype: str):
    checkpoint = open_folder(with_output(tmp_path, True, dtype))
    assert "output.weight" not in [tensor.name for tensor in checkpoint.tensors] and not checkpoint.warnings


def test_a_tied_checkpoint_keeps_an_output_matrix_that_differs(tmp_path: Path):
    """As transformers 5 does: adapters were merged, or heads trained, and config.json was left as it was."""
    checkpoint = open_folder(with_output(tmp_path, False))
    output = next(tensor for tensor in checkpoint.tensors if tensor.name == "output.weight")
    np.testing.assert_array_equal(output.rows(0, 5).view(np.float32), make_weights(CONFIG)["lm_head.weight"][:5])
    assert checkpoint.warnings == [
        "lm_head.weight differs from the embedding, though config.json ties them: both are written"
    ]


def test_an_output_matrix_that_an_architecture_has_not_is_named():
    matrices = [from_array(np.full((3, 2), number, np.float32)) for number in (1, 2)]
    assert not unties_output(*matrices, gguf.MODEL_ARCH.GEMMA2, warnings := list[str](), "lm_head.weight")
    assert "it is left out, because gemma2 has no output matrix" in warnings[0]


def renamed(folder: Path, name: Callable[[str], str]) -> Path:
    """A checkpoint whose tensors have other names."""
    folder = write_checkpoint(folder)
    write_safetensors(folder / "model.safetensors", [(name(n), "F32", a) for n, a in make_weights(CONFIG).items()])
    return folder


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod."])
def test_names_as_training_frameworks_wrap_them(tmp_path: Path, prefix: str):
    """Data parallel training, torch.compile and PEFT put something before all names."""
    plain = open_folder(write_checkpoint(tmp_path / "plain")).tensors
    wrapped = open_folder(renamed(tmp_path / "wrapped", lambda name: prefix + name)).tensors
    assert [tensor.name for tensor in wrapped] == [tensor.name for tensor in plain]


def test_adapters_that_are_not_merged_are_refused(tmp_path: Path):
    folder = renamed(tmp_path / "x", lambda n: "base_model.model." + n.replace("q_proj.", "q_proj.lora_A.default."))
    assert "q_proj.lora_A.default.weight): merge them into the model first" in refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str):
    folder = write_checkpoint(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    assert f"{name}: a Git LFS pointer instead of the file: run `git lfs pull`" in refused(folder)


def test_a_config_without_architectures(tmp_path: Path):
    edit_json(write_checkpoint(tmp_path) / "config.json", architectures=None)
    assert 'config.json: no "architectures", which names the model class' in refused(tmp_path)


def test_a_sliding_window_is_warned_of(tmp_path: Path):
    """If it leaves something out, and is in use."""
    folder = write_checkpoint(tmp_path, {"sliding_window": 100})
    assert "sliding window of 100" in open_folder(folder).warnings[0]
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    for window, is_used, warnings in ((context - 1, True, 1), (context, True, 0), (100, False, 0), (None, True, 0)):
        edit_json(folder / "config.json", sliding_window=window, use_sliding_window=is_used)
        assert len(open_folder(folder).warnings) == warnings


# ---- byte-level vocabularies

LLAMA3_WORDS = (  # as its tokenizer.json spells them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")


def splits(*patterns: str, byte_level_words: bool = False) -> dict[str, Any]:
    """A pre-tokenizer of regular expressions, then bytes."""
    parts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": byte_level_words}
    return {"type": "Sequence", "pretokenizers": [*parts, byte_level]}


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
    assert pretokenizer_name(content, ignore_merges) == name


@pytest.mark.slow
def test_the_probe_tells_all_pretokenizers_apart():
    for ignore_merges in (False, True):
        cuts: dict[tuple[tuple[int, int], ...], str] = {}
        same = [
            (cuts[cut], name)
            for name, known in candidates(ignore_merges).items()
            if cuts.setdefault(cut := tuple(split_words(known, probe())), name) != name
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
        pretokenizer_name(content, False)


@pytest.mark.parametrize(("extra", "accepted"), [({}, True), ({"lo": 268}, False)])
def test_ignored_merges_that_make_no_difference(tmp_path: Path, extra: dict[str, int], accepted: bool):
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
    """Where vocabularies come from."""
    return request.getfixturevalue("shared") if request.param == "released" else None


def vocabulary_of(shared: Path | None, name: str) -> dict[str, Any]:
    """The metadata of a vocabulary: of a released model, as llama.cpp's converter made it, or a tiny one."""
    return (
        GGUFFile.open(shared / "vocabs" / f"ggml-vocab-{name}.gguf").metadata if shared else vocabularies.metadata(name)
    )


def vectors(shared: Path | None, name: str) -> list[tuple[str, list[int]]]:
    """Texts and llama.cpp's tokens for them."""
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
def test_byte_level_vocabularies_are_those_of_llama_cpp(source, tmp_path: Path, name: str, content: Any):
    theirs = vocabulary_of(source, name)
    pieces, types = theirs["tokenizer.ggml.tokens"], theirs["tokenizer.ggml.token_type"]
    vocab = {piece: token for token, piece in enumerate(pieces) if types[token] == 1}
    model = {"type": "BPE", "vocab": vocab, "merges": theirs["tokenizer.ggml.merges"]}
    model["ignore_merges"] = name == "llama-bpe"
    added = special_tokens(theirs, {2, 3, 4})
    write_json(tmp_path / "tokenizer.json", tokenizer(added_tokens=added, pre_tokenizer=content, model=model))
    ours, warnings = vocabulary_metadata(tmp_path, len(pieces))
    assert ours["tokenizer.ggml.tokens"] == pieces and warnings == []
    assert ours["tokenizer.ggml.merges"] == theirs["tokenizer.ggml.merges"]
    assert ours["tokenizer.ggml.token_type"].tolist() == types.tolist()
    encode = Tokenizer(ours).encode
    assert [encode(text) for text, _ in vectors(source, name)] == [tokens for _, tokens in vectors(source, name)]


# ---- SentencePiece


def merges_of(pieces: dict[str, float]) -> list[list[str]]:
    """All merges that make pieces of others, as transformers translates them."""
    cuts = [(piece[:n], piece[n:], score) for piece, score in pieces.items() for n in range(1, len(piece))]
    merges = [cut for cut in cuts if cut[0] in pieces and cut[1] in pieces]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [[left, right] for left, right, _ in merges]


def byte_fallback(pieces: list[str], scores: list[float], added: list[dict[str, Any]]) -> dict[str, Any]:
    """The tokenizer.json of a Llama 2."""
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
def test_sentencepiece_vocabularies_are_those_of_llama_cpp(source, tmp_path: Path, files: str):
    theirs = vocabulary_of(source, "llama-spm")
    pieces, scores = theirs["tokenizer.ggml.tokens"], theirs["tokenizer.ggml.scores"].tolist()
    types = theirs["tokenizer.ggml.token_type"].tolist()
    if files != "tokenizer.json":
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece(pieces, scores, types))
    if files != "tokenizer.model":
        write_json(tmp_path / "tokenizer.json", byte_fallback(pieces, scores, special_tokens(theirs, {2, 3, 4})))
    write_json(tmp_path / "config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1})
    ours, warnings = vocabulary_metadata(tmp_path, len(pieces))
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


def test_a_sentencepiece_model_without_tokenizer_json(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES, SCORES, TYPES))
    write_json(tmp_path / "added_tokens.json", {"<extra>": 10, "<|im_end|>": 11, "▁x": 12, "far": 99})
    decoder = {"2": {"content": "</s>", "special": True}, "10": {"content": "<extra>", "special": True}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": decoder, "add_prefix_space": False})
    metadata, warnings = vocabulary_metadata(tmp_path, 14)
    assert metadata["tokenizer.ggml.tokens"] == [*PIECES, "<extra>", "<|im_end|>", " x", "[PAD13]"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [*TYPES, 3, 3, 4, 5]
    assert metadata["tokenizer.ggml.scores"].dtype == np.float32
    assert metadata["tokenizer.ggml.scores"].tolist() == [0, 0, -1000, *SCORES[3:], -1000, -1000, -1000, -10000]
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert warnings == ["1 token from id 99 on is dropped: the model has 14"]


def test_scores_come_from_the_order_of_merges(tmp_path: Path):
    added = [added_token(token, PIECES[token]) for token in range(3)]
    write_json(tmp_path / "tokenizer.json", byte_fallback(PIECES, SCORES, added))
    metadata, _ = vocabulary_metadata(tmp_path, len(PIECES))
    assert metadata["tokenizer.ggml.token_type"].tolist() == TYPES
    assert metadata["tokenizer.ggml.scores"].tolist()[4:] == [0, -1, -2, -3, -3, -3]


def test_gemma_cuts_at_spaces_that_are_gone(tmp_path: Path):
    content = byte_fallback(PIECES, SCORES, [added_token(token, PIECES[token]) for token in range(3)])
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    write_json(tmp_path / "tokenizer.json", content)
    metadata, _ = vocabulary_metadata(tmp_path, len(PIECES))
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert Tokenizer(metadata).encode("a ab") == [8, 6]
    content["normalizer"] = None
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match="pre-tokenizer Split"):
        vocabulary_metadata(tmp_path, len(PIECES))


def test_gemma_4_is_read_by_its_merges(tmp_path: Path):
    """Whatever their order; the marks of its thoughts and calls are text."""
    pieces, marks = [*PIECES, "<|channel>", "<|turn>"], {0, 1, 2, 10, 11}
    pieces += [f"<0x{byte:02X}>" for byte in range(256) if byte != 10]
    content = byte_fallback(pieces, [0.0] * len(pieces), [added_token(token, pieces[token]) for token in marks])
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["model"]["merges"] = [["▁", "ab"], ["a", "b"], ["▁", "a"]]
    write_json(tmp_path / "tokenizer.json", content)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>"})
    metadata, _ = vocabulary_metadata(tmp_path, len(pieces), "gemma4")
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    assert metadata["tokenizer.ggml.merges"] == ["▁ ab", "a b", "▁ a"]
    assert metadata["tokenizer.ggml.token_type"].tolist() == [3, 3, 3, 6, 1, 1, 1, 1, 1, 1, 4, 3, *[6] * 255]
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert Tokenizer(metadata).encode("a ab\na")[-4:] == [8, 6, 3, 8]
    content["pre_tokenizer"] = {"type": "Digits"}
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match="pre-tokenizer Digits"):
        vocabulary_metadata(tmp_path, len(pieces), "gemma4")


@pytest.mark.parametrize(
    ("merges", "problem"),
    [
        ([["a", "b"], ["▁", "a"], ["▁", "ab"]], "no merge makes ▁ab of ▁a b"),
        ([["▁", "ab"], ["a", "b"], ["▁", "a"], ["▁a", "b"]], "not consecutive"),
        ([["a"]], "unexpected content"),
        (None, "unexpected content"),
        ("ab", "unexpected content"),
    ],
)
def test_merges_that_are_not_sentencepieces_are_refused(tmp_path: Path, merges: Any, problem: str):
    content = byte_fallback(PIECES, SCORES, [added_token(token, PIECES[token]) for token in range(3)])
    content["model"]["merges"] = merges
    write_json(tmp_path / "tokenizer.json", content)
    with pytest.raises(ModelError, match=problem):
        vocabulary_metadata(tmp_path, len(PIECES))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a", b"IQ== 0\nIg== 1\n", b"\x0a\x05\x0a\xff\xff\xff\xff", b"\xff" * 30, b"\x12\x02\x18\x02", b"\x0b"],
)
def test_what_is_no_sentencepiece_model_is_refused(data: bytes):
    with pytest.raises(ValueError):
        read_sentencepiece(data)


def test_unigram_models_are_refused(tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(PIECES, SCORES, TYPES, kind=1))
    with pytest.raises(ModelError, match="not BPE"):
        vocabulary_metadata(tmp_path, len(PIECES))


# ---- special tokens and templates


def metadata_with(tmp_path: Path, **files: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer metadata of a checkpoint with these changes of its JSON files."""
    write_checkpoint(tmp_path)
    for name, changes in files.items():
        if not (tmp_path / f"{name}.json").exists():
            write_json(tmp_path / f"{name}.json", {})
        edit_json(tmp_path / f"{name}.json", **changes)
    metadata = open_folder(tmp_path).metadata
    return {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}


def template(*parts: str) -> dict[str, Any]:
    """A post-processor: texts of special tokens, and "A" for the text."""
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
def test_what_texts_are_surrounded_with(tmp_path: Path, processor: Any, config: dict[str, Any], adds: tuple[Any, Any]):
    metadata = metadata_with(tmp_path, tokenizer={"post_processor": processor}, tokenizer_config=config)
    assert (metadata["add_bos_token"], metadata.get("add_eos_token")) == adds


def test_tokens_that_only_the_template_names(tmp_path: Path):
    metadata = metadata_with(
        tmp_path,
        tokenizer={"post_processor": template("<|im_start|>", "A")},
        tokenizer_config={"bos_token": None},
        config={"bos_token_id": None},
    )
    assert (metadata["bos_token_id"], metadata["add_bos_token"], metadata["add_eos_token"]) == (1, True, False)


def test_no_token_no_switch(tmp_path: Path):
    changes = {"bos_token": None, "add_bos_token": True}
    metadata = metadata_with(tmp_path, tokenizer_config=changes, config={"bos_token_id": None})
    assert "bos_token_id" not in metadata and metadata["add_bos_token"] is False


def test_special_tokens_by_text_and_by_number(tmp_path: Path):
    config = {"pad_token": {"content": "<|im_start|>"}, "eos_token": None, "unk_token": "not there"}
    metadata = metadata_with(
        tmp_path, tokenizer_config=config, config={"eos_token_id": [2, 1], "unk_token_id": 5, "pad_token_id": 9}
    )
    found = {key: value for key, value in metadata.items() if key.endswith("_token_id")}
    assert found == {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 5,
        "padding_token_id": 1,
        "eot_token_id": 1,
    }


def test_more_ends_of_an_answer(tmp_path: Path):
    metadata = metadata_with(tmp_path, generation_config={"eos_token_id": [2, 0, -1, 273, 7, "x", 272, 8, 9]})
    assert (metadata["eos_token_id"], metadata["eot_token_id"], metadata["eom_token_id"]) == (
        2,
        7,
        272,
    )  # 0 by its text


def test_added_tokens(tmp_path: Path):
    added = [added_token(268, "<tool>", False), added_token(269, "<|tool|>", False), added_token(300, "<far>")]
    metadata = metadata_with(tmp_path, tokenizer={"added_tokens": tokenizer()["added_tokens"] + added})
    assert metadata["tokens"][268:] == ["<tool>", "<|tool|>", "[PAD270]", "[PAD271]", "[PAD272]"]
    assert metadata["token_type"].tolist()[268:] == [4, 3, 5, 5, 5]


@pytest.mark.parametrize("added", [None, []])
def test_a_tokenizer_need_not_have_added_tokens(tmp_path: Path, added: list[Any] | None):
    metadata = metadata_with(tmp_path, tokenizer={"added_tokens": added})
    assert metadata["token_type"].tolist()[:3] == [1, 1, 1] and metadata["tokens"][0] == "<|endoftext|>"


@pytest.mark.sampled
def test_chat_templates(tmp_path: Path):
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


# ---- bad folders


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content.encode("utf-8", "surrogatepass"))


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / name, **changes)


def weights_with(dtype: str = "F32", drop: str = "", **more: np.ndarray) -> Callable[[Path], None]:
    """Write other weights: one left out, some added."""

    def write(folder: Path) -> None:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = [(name, dtype, array) for name, array in (make_weights(settings) | more).items() if name != drop]
        write_safetensors(folder / "model.safetensors", tensors)

    return write


CONFIG_FILE, TOKENIZER = "config.json", "tokenizer.json"
BAD_FOLDERS: list[tuple[str, Callable[[Path], None]]] = [
    ("no config.json", remove(CONFIG_FILE)),
    ("config.json: not valid JSON", text(CONFIG_FILE, "{")),
    ("config.json: not valid JSON", text(CONFIG_FILE, "[" * 100000)),
    ("expected a JSON object, found list", text(CONFIG_FILE, "[]")),
    ("architecture T5Model is not supported", edit(CONFIG_FILE, architectures=["T5Model"])),
    ('no "architectures"', edit(CONFIG_FILE, architectures=7)),
    ('no "architectures"', edit(CONFIG_FILE, architectures=[])),
    ("the weights are quantized (quip)", edit(CONFIG_FILE, quantization_config={"quant_method": "quip"})),
    ("hidden_act gelu", edit(CONFIG_FILE, hidden_act="gelu")),
    ("hidden_size must be a number", edit(CONFIG_FILE, hidden_size="64")),
    ("num_hidden_layers must be a number", edit(CONFIG_FILE, num_hidden_layers=10**9)),
    ("vocab_size must be a number", edit(CONFIG_FILE, vocab_size=None)),
    ("inconsistent", edit(CONFIG_FILE, num_key_value_heads=3)),
    ("rms_norm_eps must be a positive number", edit(CONFIG_FILE, rms_norm_eps=float("nan"))),
    ("rope scaling longrope is not supported", edit(CONFIG_FILE, **scaled("longrope"))),
    ("rope scaling ['yarn'] is not supported", edit(CONFIG_FILE, rope_scaling={"type": ["yarn"]})),
    ("beta_fast 64", edit(CONFIG_FILE, **scaled("yarn", beta_fast=64, **YARN))),
    ("factor must be a positive number", edit(CONFIG_FILE, **scaled("linear"))),
    ("high_freq_factor", edit(CONFIG_FILE, **scaled("llama3", **LLAMA3 | {"low_freq_factor": 4.0}))),
    ("no model.safetensors", remove("model.safetensors")),
    ("not a valid safetensors file", text("model.safetensors", "")),
    ("a Git LFS pointer", text("model.safetensors", "version https://git-lfs.github.com/spec/v1")),
    ("no tensor for blk.1.ffn_up.weight", weights_with(drop="model.layers.1.mlp.up_proj.weight")),
    ("no tensor for output.weight", weights_with(drop="lm_head.weight")),
    ("not part of the architecture llama", weights_with(**{"model.layers.0.mlp.gate.weight": np.zeros((2, 64))})),
    ("not part of the architecture llama", weights_with(**{"model.layers.2.mlp.up_proj.weight": np.zeros((96, 64))})),
    ("[96, 32]; expected [96, 64]", weights_with(**{"model.layers.0.mlp.up_proj.weight": np.zeros((96, 32))})),
    ("[273]; expected [273, 64]", weights_with(**{"lm_head.weight": np.zeros(273)})),
    ("type U8 is not supported", weights_with("U8")),
    ("type I64 is not supported", weights_with("I64")),
    ("no tokenizer.json and no tokenizer.model", remove(TOKENIZER)),
    ("tokenizer.json: not valid JSON", text(TOKENIZER, "\x00")),
    ("tokenizer.json: not UTF-8", text(TOKENIZER, '"\ud800"')),
    ("type WordLevel are not supported", edit(TOKENIZER, model={"type": "WordLevel", "vocab": []})),
    ("neither byte-level BPE nor SentencePiece", edit(TOKENIZER, pre_tokenizer={"type": "Whitespace"})),
    ("pre-tokenizer is unknown", edit(TOKENIZER, pre_tokenizer=splits(r"\w+"))),
    ("normalizer NFKC is not supported", edit(TOKENIZER, normalizer={"type": "NFKC"})),
    ("unexpected content", edit(TOKENIZER, normalizer=[1])),
    ("unexpected content", edit(TOKENIZER, model=None)),
    ("unexpected content", edit(TOKENIZER, model={"type": "BPE", "vocab": {"a": "b"}, "merges": []})),
    ("unexpected content", edit(TOKENIZER, model={"type": "BPE", "vocab": {"a": -1}, "merges": []})),
    ("unexpected content", edit(TOKENIZER, added_tokens=[{"id": 1}])),
    ("unexpected content", edit(TOKENIZER, post_processor={"type": "TemplateProcessing", "single": []})),
    ("are both 'he'", edit(TOKENIZER, added_tokens=[added_token(5, "he")])),
    ("lone surrogate", edit(TOKENIZER, added_tokens=[added_token(5, "\ud800")])),
]


@pytest.mark.parametrize(("problem", "spoil"), BAD_FOLDERS, ids=[f"{n}: {p}" for n, (p, _) in enumerate(BAD_FOLDERS)])
def test_bad_folders_are_refused(tmp_path: Path, problem: str, spoil: Callable[[Path], None]):
    spoil(write_checkpoint(tmp_path))
    assert problem in refused(tmp_path)


def test_folders_that_are_none(tmp_path: Path):
    assert "no config.json" in refused(tmp_path)
    assert "no config.json" in refused(tmp_path / "missing")
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pickles" in refused(tmp_path)


def test_parts_that_are_missing(tmp_path: Path):
    write_checkpoint(tmp_path, files=3)
    second = tmp_path / "model-00002-of-00003.safetensors"
    data = second.read_bytes()
    second.unlink()
    assert "model-00002-of-00003.safetensors: this file is missing" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00003.safetensors: this file is missing" in refused(tmp_path)
    second.write_bytes(data)
    assert len(open_folder(tmp_path).tensors) == 21


def test_an_index_that_does_not_fit(tmp_path: Path):
    index = write_checkpoint(tmp_path, files=2) / "model.safetensors.index.json"
    good = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    edit_json(index, weight_map=good | {"more.weight": "model-00001-of-00002.safetensors"})
    assert "tensor more.weight must be in model-00001-of-00002.safetensors" in refused(tmp_path)
    for file in ("../model.safetensors", "/etc/passwd", "a\\b.safetensors", 3, "x\x00.safetensors"):
        edit_json(index, weight_map=good | {"more.weight": file})
        assert "expected the name of a safetensors file" in refused(tmp_path)
    edit_json(index, weight_map=[])
    assert "expected a weight_map" in refused(tmp_path)
    index.unlink()
    both = tmp_path / "model-00002-of-00002.safetensors"
    both.write_bytes((tmp_path / "model-00001-of-00002.safetensors").read_bytes())
    assert "is in model-00001-of-00002.safetensors too" in refused(tmp_path)


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(offsets=(0, 8))},
        {"a": entry(offsets=(4, 0))},
        {"a": entry(offsets=(-4, 0))},
        {"a": entry(offsets=(0, 4)), "b": entry(offsets=(0, 4))},
        {"a": entry(offsets=(0, 1 << 63))},
        {"a": entry(shape=(1 << 62, 1 << 62, 16))},
        {"a": entry(shape=(-1,))},
        {"a": entry(shape="1")},
        {"a": entry(dtype=7)},
        {"a": entry(dtype="F\n")},
        {"a": 1},
        {"a": {"b": {}}},
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, header: dict[str, Any]):
    write_checkpoint(tmp_path)
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    assert "safetensors" in refused(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 30, 1 << 63, (1 << 64) - 1])
def test_hostile_lengths_are_refused(tmp_path: Path, length: int):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{" * 100)
    assert "not a valid safetensors file" in refused(tmp_path)


def test_a_file_that_is_cut_off(tmp_path: Path):
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    checkpoint = open_folder(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="truncated"):
        all_rows(next(tensor for tensor in checkpoint.tensors if tensor.name == "output.weight"))
    assert "not a valid safetensors file" in refused(tmp_path)


@pytest.mark.parametrize(
    ("error", "told"), [(KeyError("vocab"), "no 'vocab'"), (TypeError("vocab"), "vocab"), (IndexError("far"), "far")]
)
def test_whatever_trips_over_a_file_names_it(error: Exception, told: str):
    with (
        pytest.raises(ModelError, match=f"^x.json: has unexpected content: {told}$"),
        report_as_model_error(Path("x.json")),
    ):
        raise error


@pytest.mark.parametrize(
    ("part", "normalizer", "nothing"),
    [
        ({"type": "Metaspace", "split": False}, {}, True),
        ({"type": "Metaspace", "split": True}, {}, False),
        ({"type": "Metaspace"}, {}, False),
        ({"type": "Digits", "split": False}, {}, False),
        ({"type": "Split", "pattern": {"String": " "}}, {"type": "Replace"}, True),
        ({"type": "Split", "pattern": {"String": " "}}, {"type": "NFC"}, False),
        ({"type": "Split", "pattern": {"String": "x"}}, {"type": "Replace"}, False),
    ],
)
def test_steps_that_cut_nothing(part: dict, normalizer: dict, nothing: bool):
    assert cuts_nothing(part, {"normalizer": normalizer}) is nothing


# ---- its parts, one by one


def test_a_vocabulary_in_the_making():
    tokens = Tokens(6, "llama", "default")
    assert tokens.pieces == [f"[PAD{n}]" for n in range(6)] and tokens.types == [5] * 6
    tokens.put(0, "<unk>", 2)
    tokens.put(5, "▁a", 1, -7.5)
    tokens.put(6, "far", 1)
    assert (tokens.pieces[5], tokens.types[5], tokens.scores) == ("▁a", 1, [0.0, *[-10000.0] * 4, -7.5])
    for token, piece in ((-1, "a"), ("1", "a"), (1.0, "a"), (1, 5), (1, None)):
        with pytest.raises(ValueError, match="has the id"):
            tokens.put(token, piece, 1)  # type: ignore[arg-type]
    tokens.add(0, "<new>", special=True)  # the unknown one stays it
    tokens.add(1, "▁x", special=False)
    tokens.add(2, "▁y", special=True)
    tokens.add(9, "further", special=False)
    assert tokens.pieces[:3] == ["<new>", " x", "▁y"] and tokens.types[:3] == [2, 4, 3]
    assert tokens.scores[:3] == [-1000.0] * 3 and [*tokens.left_out.items()] == [(6, "far"), (9, "further")]
    other = Tokens(2, "gpt2", "default")
    other.add(1, "▁x", special=False)
    assert other.pieces[1] == "▁x"


@pytest.mark.parametrize(("text", "kind"), [
    ("<|x|>", 3), ("<|a\nb|>", 3), ("<｜x｜>", 3), ("<unused>", 3), ("<unused12>", 3), ("<pad>", 3), ("<mask>", 3),
    ("<|x", 4), ("x<|x|>", 4), ("<unusedx>", 4), ("<pad>x", 4), ("<s>", 4),
])  # fmt: skip
def test_tokens_that_look_special(text: str, kind: int):
    tokens = Tokens(1, "gpt2", "default")
    tokens.add(0, text, special=False)
    assert tokens.types == [kind]


def step(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


SPACES = step("Replace", pattern={"String": " "}, content="▁")


@pytest.mark.parametrize(("normalizer", "fits"), [
    (None, True), ({}, True), (step("Prepend", prepend="▁"), True), (step("Prepend"), True), (SPACES, True),
    (step("Sequence", normalizers=[step("Prepend", prepend="▁"), step("Sequence", normalizers=[SPACES])]), True),
    (step("Prepend", prepend=" "), False), (SPACES | {"content": "_"}, False), (step("Replace"), False),
    (SPACES | {"pattern": {"Regex": " "}}, False), (step("NFC"), False),
    (step("Sequence", normalizers=[step("NFC")]), False),
])  # fmt: skip
def test_what_may_be_done_to_texts(normalizer: Any, fits: bool):
    with nullcontext() if fits else pytest.raises(ModelError, match=r"t\.json: normalizer \w+ is not supported"):
        refuse_normalizer(Path("t.json"), {"normalizer": normalizer}, {"Prepend", "Replace"})


@pytest.mark.parametrize(("normalizer", "words", "prepends"), [
    (None, None, False), (step("Prepend"), None, True), (step("Replace"), None, False), (None, step("Metaspace"), True),
    (None, step("Metaspace", prepend_scheme="first"), True), (None, step("Metaspace", prepend_scheme="never"), False),
    (None, step("Split", prepend_scheme="always"), False),
    (step("Prepend"), step("Metaspace", prepend_scheme="never"), True),
])  # fmt: skip
def test_whether_a_space_stands_before_texts(normalizer: Any, words: Any, prepends: bool):
    assert prepends_space({"normalizer": normalizer, "pre_tokenizer": words}) is prepends


def test_merges_in_groups():
    """Those of one piece, or of several that are mingled."""
    assert merge_pairs({"model": {"merges": ["a b", ["c ", "d"], "e f g"]}}) == [("a", "b"), ("c ", "d"), ("e", "f g")]
    pairs = [("a", "b"), ("ab", "c"), ("d", "e"), ("a", "bc"), ("x", "y")]
    assert [*groups_of_merges(pairs)] == [[("a", "b")], [("ab", "c"), ("d", "e"), ("a", "bc")], [("x", "y")]]
    assert [*groups_of_merges([])] == []


def settings_of(folder: Path, **files: Any) -> VocabularySettings:
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return VocabularySettings.read(folder)


def test_what_files_say_of_special_tokens(tmp_path: Path):
    """The first that says it, by text; all that do, by number."""
    known = settings_of(
        tmp_path, tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": 5},
        special_tokens_map={"bos_token": "other", "eos_token": {"content": "</s>"}, "pad_token": {}},
        config={"eos_token_id": [2, 7], "bos_token_id": "x"}, generation_config={"eos_token_id": 7, "bos_token_id": 1},
    )  # fmt: skip
    assert [known.text(name) for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", None, None]
    assert (known.ids("eos"), known.ids("bos"), known.ids("pad")) == ([2, 7], [1], [])


THE_TEXT, BEGIN, END = {"Sequence": {}}, {"SpecialToken": {"id": "<s>"}}, {"SpecialToken": {"id": "</s>"}}


@pytest.mark.parametrize(("processor", "found"), [
    (None, None), ({"type": "ByteLevel"}, None), (step("Sequence", processors=[]), None),
    (step("TemplateProcessing", single=[THE_TEXT]), {"bos": None, "eos": None}),
    (step("TemplateProcessing", single=[BEGIN, THE_TEXT]), {"bos": "<s>", "eos": None}),
    (step("TemplateProcessing", single=[BEGIN, THE_TEXT, END]), {"bos": "<s>", "eos": "</s>"}),
    (step("Sequence", processors=[step("ByteLevel"), step("TemplateProcessing", single=[THE_TEXT, END])]),
     {"bos": None, "eos": "</s>"}),
    (step("BertProcessing", cls=["<s>", 0], sep=["</s>", 2]), {"bos": "<s>", "eos": "</s>"}),
    (step("RobertaProcessing", cls=["<s>", 0], sep=["</s>", 2]), {"bos": "<s>", "eos": "</s>"}),
])  # fmt: skip
def test_what_stands_around_texts_by_tokenizer_json(tmp_path: Path, processor: Any, found: Any):
    assert settings_of(tmp_path, tokenizer={"post_processor": processor}).template() == found


IDS = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
AROUND = {"type": "TemplateProcessing", "single": [BEGIN, THE_TEXT]}


@pytest.mark.parametrize(("model", "processor", "said", "ids", "expected"), [
    ("gpt2", None, {}, IDS, {"add_bos_token": False}), ("llama", None, {}, IDS, {"add_bos_token": True}),
    ("gemma4", None, {}, IDS, {"add_bos_token": True}), ("bert", None, {}, IDS, {}),
    ("llama", None, {}, {}, {"add_bos_token": False}),
    ("gpt2", AROUND, {}, IDS, {"add_bos_token": True, "add_eos_token": False}),
    ("llama", {"type": "TemplateProcessing", "single": [THE_TEXT, END]}, {}, IDS,
     {"add_bos_token": False, "add_eos_token": True}),
    ("gpt2", AROUND, {"add_bos_token": False, "add_eos_token": True}, IDS,
     {"add_bos_token": False, "add_eos_token": True}),
    ("gpt2", AROUND, {"add_bos_token": "yes"}, IDS, {"add_bos_token": True, "add_eos_token": False}),
    ("gpt2", None, {"add_bos_token": True, "add_eos_token": True}, {},
     {"add_bos_token": False, "add_eos_token": False}),
    ("llama", None, {"add_prefix_space": False}, IDS, {"add_bos_token": True, "add_space_prefix": False}),
    ("llama", None, {"add_prefix_space": 1}, IDS, {"add_bos_token": True}),
])  # fmt: skip
def test_what_is_put_around_texts(tmp_path: Path, model: str, processor: Any, said: Any, ids: Any, expected: Any):
    tokens = Tokens(2, model, "default")
    tokens.put(0, "<s>", 3)
    tokens.put(1, "</s>", 3)
    known = settings_of(tmp_path, tokenizer={"post_processor": processor}, tokenizer_config=said)
    found = token_flags(tokens, known, ids)
    assert {name.removeprefix("tokenizer.ggml."): value for name, value in found.items()} == expected
    for adds in (True, False):
        tokens.adds_space = adds
        told = token_flags(tokens, known, ids).get("tokenizer.ggml.add_space_prefix")
        assert told == (
            None if model == "bert" else said["add_prefix_space"] if said.get("add_prefix_space") is False else adds
        )


def test_fields_of_a_sentencepiece_model():
    """Numbers of several bytes, and fields that nobody reads."""
    piece = b"\x0a\x01a\x15\x00\x00\x20\xc0"  # its text, and -2.5; no type: a normal one
    unread = b"\x79" + bytes(8) + b"\x80\x01\x96\x01"  # the fields 15, of eight bytes, and 16, the number 150
    model = b"\x0a" + bytes([len(piece)]) + piece + unread
    found = read_sentencepiece(model)
    assert (found.pieces, found.scores, found.types, found.kind) == (["a"], [-2.5], [1], 1)
    assert (found.normalizes, found.adds_space) == (False, True)
    assert [*message(unread)] == [(15, 0), (16, 150)]
    trained = model + b"\x12\x02\x18\x02" + b"\x1a\x05\x12\x01x\x18\x00"
    found = read_sentencepiece(trained)
    assert (found.kind, found.normalizes, found.adds_space) == (2, True, False)
    for cut in range(1, len(trained)):
        if cut not in (len(model) - len(unread), len(model) - 4, len(model), len(model) + 4):
            with pytest.raises(ValueError):
                read_sentencepiece(trained[:cut])
    assert varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10) and varint(b"x\x7f", 1) == (127, 2)
    for odd in (b"\xff" * 10 + b"\x01", b"\x80", b""):
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            varint(odd, 0)
