"""Weights and hyperparameters of converted checkpoints."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint import CONFIG, edit_json, encoded, make_weights, write_checkpoint, write_json, write_safetensors
from tiny_model import CHATML, finish, vocabulary

import localllm
from localllm.convert import Checkpoint, open_folder
from localllm.convert.general_metadata import is_plain
from localllm.convert.sentencepiece import parse_message, parse_varint, read_sentencepiece
from localllm.convert.tensor_mapping import is_untied
from localllm.convert.tokens import VocabularyBuilder, group_merges, has_space_prefix, parse_merges, refuse_normalizer
from localllm.convert.transforms import from_array
from localllm.convert.vocabulary import VocabularySettings, build_tokenizer_flags
from localllm.errors import ModelError
from tests.unit.convert.convert_parts import LLAMA3, YARN, all_rows, refused, scaled

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
    """Write the checkpoint as a file, by the gguf package."""
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
    finish(writer)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("variant", LOGITS)
def test_logits_equal_those_of_transformers(tmp_path: Path, variant: str):
    config, dtype, files, expected = LOGITS[variant]
    checkpoint = open_folder(write_checkpoint(tmp_path / "model", config, dtype, files))
    path = write_gguf(tmp_path / "model.gguf", checkpoint)
    with localllm.open(path, backend="reference", kv_type="f32") as model:
        logits = model.logits(TEXT)[-1]
    np.testing.assert_allclose(logits[:251:50], expected, atol=5e-5)
    assert checkpoint.warnings == []


def test_rows_of_queries_and_keys_become_pairs(tmp_path: Path):
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
            np.testing.assert_array_equal(tensor.read_rows(first, last), expected[first:last])
        vector = tensors[f"blk.1.{name}.bias"]
        assert vector.format.name == "F32"
        np.testing.assert_array_equal(
            all_rows(vector).view(np.float32)[0], bias.reshape(heads, 2, 8).swapaxes(1, 2).ravel()
        )


def test_other_weights_and_metadata_stay_as_they_were(tmp_path: Path):
    checkpoint = open_folder(write_checkpoint(tmp_path / "Tiny-Test-Instruct", dtype="F16"))
    weights = make_weights({**json.loads((Path(checkpoint.path) / "config.json").read_text(encoding="utf-8"))})
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    down = tensors["blk.0.ffn_down.weight"].read_rows(3, 9).view(np.float16)
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


def test_the_model_card_supplies_license_and_languages(tmp_path: Path):
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
    """Accept what editors on Windows save; the template would print it."""
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
def test_a_model_card_may_hold_plain_values_only(value: object, expected: bool):
    assert is_plain(value) == expected


def test_a_folder_of_the_cache_gets_the_models_name(tmp_path: Path):
    folder = tmp_path / "models--some-body--Tiny-Test" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    assert open_folder(write_checkpoint(folder)).metadata["general.name"] == "Tiny-Test"


def with_output(folder: Path, like_embedding: bool, dtype: str = "F32") -> Path:
    """Write a checkpoint that ties its output matrix to the embedding and stores one all the same."""
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
    """Follow transformers 5: adapters were merged, or heads trained, and config.json was left as it was."""
    checkpoint = open_folder(with_output(tmp_path, False))
    output = next(tensor for tensor in checkpoint.tensors if tensor.name == "output.weight")
    np.testing.assert_array_equal(output.read_rows(0, 5).view(np.float32), make_weights(CONFIG)["lm_head.weight"][:5])
    assert checkpoint.warnings == [
        "lm_head.weight differs from the embedding, though config.json ties them: both are written"
    ]


def test_an_output_matrix_unknown_to_the_architecture_is_named():
    embedding, output = (from_array(np.full((3, 2), number, np.float32)) for number in (1, 2))
    assert not is_untied(embedding, output, gguf.MODEL_ARCH.GEMMA2, warnings := list[str](), "lm_head.weight")
    assert "it is omitted, because gemma2 has no output matrix" in warnings[0]


def renamed(folder: Path, name: Callable[[str], str]) -> Path:
    """Write a checkpoint whose tensors have other names."""
    folder = write_checkpoint(folder)
    write_safetensors(folder / "model.safetensors", [(name(n), "F32", a) for n, a in make_weights(CONFIG).items()])
    return folder


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "module._orig_mod."])
def test_names_wrapped_by_training_frameworks_are_unwrapped(tmp_path: Path, prefix: str):
    """Strip what data parallel training, torch.compile and PEFT put before all names."""
    plain = open_folder(write_checkpoint(tmp_path / "plain")).tensors
    wrapped = open_folder(renamed(tmp_path / "wrapped", lambda name: prefix + name)).tensors
    assert [tensor.name for tensor in wrapped] == [tensor.name for tensor in plain]


def test_unmerged_adapters_are_refused(tmp_path: Path):
    folder = renamed(tmp_path / "x", lambda n: "base_model.model." + n.replace("q_proj.", "q_proj.lora_A.default."))
    assert "q_proj.lora_A.default.weight) into the model first" in refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, name: str):
    folder = write_checkpoint(tmp_path)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")
    assert f"{name}: a Git LFS pointer instead of the file: run `git lfs pull`" in refused(folder)


def test_a_config_without_architectures_is_refused(tmp_path: Path):
    edit_json(write_checkpoint(tmp_path) / "config.json", architectures=None)
    assert 'config.json: "architectures" must name the model class' in refused(tmp_path)


def test_a_sliding_window_in_use_is_warned_of(tmp_path: Path):
    folder = write_checkpoint(tmp_path, {"sliding_window": 100})
    assert "sliding window of 100" in open_folder(folder).warnings[0]
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    for window, is_used, warnings in ((context - 1, True, 1), (context, True, 0), (100, False, 0), (None, True, 0)):
        edit_json(folder / "config.json", sliding_window=window, use_sliding_window=is_used)
        assert len(open_folder(folder).warnings) == warnings


def test_tokens_fill_a_vocabulary_and_refuse_odd_ids():
    tokens = VocabularyBuilder(6, "llama", "default")
    assert tokens.pieces == [f"[PAD{n}]" for n in range(6)] and tokens.types == [5] * 6
    tokens.put(0, "<unk>", 2)
    tokens.put(5, "▁a", 1, -7.5)
    tokens.put(6, "far", 1)
    assert (tokens.pieces[5], tokens.types[5], tokens.scores) == ("▁a", 1, [0.0, *[-10000.0] * 4, -7.5])
    for token, piece in ((-1, "a"), ("1", "a"), (1.0, "a"), (1, 5), (1, None)):
        with pytest.raises(ValueError, match="has the id"):
            tokens.put(token, piece, 1)
    tokens.add(0, "<new>", special=True)  # the unknown one stays it
    tokens.add(1, "▁x", special=False)
    tokens.add(2, "▁y", special=True)
    tokens.add(9, "further", special=False)
    assert tokens.pieces[:3] == ["<new>", " x", "▁y"] and tokens.types[:3] == [2, 4, 3]
    assert tokens.scores[:3] == [-1000.0] * 3 and [*tokens.left_out.items()] == [(6, "far"), (9, "further")]
    other = VocabularyBuilder(2, "gpt2", "default")
    other.add(1, "▁x", special=False)
    assert other.pieces[1] == "▁x"


@pytest.mark.parametrize(("text", "kind"), [
    ("<|x|>", 3), ("<|a\nb|>", 3), ("<｜x｜>", 3), ("<unused>", 3), ("<unused12>", 3), ("<pad>", 3), ("<mask>", 3),
    ("<|x", 4), ("x<|x|>", 4), ("<unusedx>", 4), ("<pad>x", 4), ("<s>", 4),
])  # fmt: skip
def test_tokens_that_look_special_become_control_tokens(text: str, kind: int):
    tokens = VocabularyBuilder(1, "gpt2", "default")
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
def test_unsupported_normalizers_are_refused(normalizer: Any, fits: bool):
    with nullcontext() if fits else pytest.raises(ModelError, match=r"t\.json: normalizer \w+ is not supported"):
        refuse_normalizer(Path("t.json"), {"normalizer": normalizer}, {"Prepend", "Replace"})


@pytest.mark.parametrize(("normalizer", "words", "prepends"), [
    (None, None, False), (step("Prepend"), None, True), (step("Replace"), None, False), (None, step("Metaspace"), True),
    (None, step("Metaspace", prepend_scheme="first"), True), (None, step("Metaspace", prepend_scheme="never"), False),
    (None, step("Split", prepend_scheme="always"), False),
    (step("Prepend"), step("Metaspace", prepend_scheme="never"), True),
])  # fmt: skip
def test_a_space_before_texts_is_read_from_tokenizer_json(normalizer: Any, words: Any, prepends: bool):
    assert has_space_prefix({"normalizer": normalizer, "pre_tokenizer": words}) is prepends


def test_merges_are_grouped_by_piece():
    """Group those of one piece, or of several that are mingled."""
    assert parse_merges({"model": {"merges": ["a b", ["c ", "d"], "e f g"]}}) == [("a", "b"), ("c ", "d"), ("e", "f g")]
    pairs = [("a", "b"), ("ab", "c"), ("d", "e"), ("a", "bc"), ("x", "y")]
    assert [*group_merges(pairs)] == [[("a", "b")], [("ab", "c"), ("d", "e"), ("a", "bc")], [("x", "y")]]
    assert [*group_merges([])] == []


def settings_of(folder: Path, **files: Any) -> VocabularySettings:
    for name, content in files.items():
        write_json(folder / f"{name}.json", content)
    return VocabularySettings.read(folder)


def test_special_tokens_are_read_from_all_files(tmp_path: Path):
    """Take the first text, and all numbers."""
    known = settings_of(
        tmp_path, tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": 5},
        special_tokens_map={"bos_token": "other", "eos_token": {"content": "</s>"}, "pad_token": {}},
        config={"eos_token_id": [2, 7], "bos_token_id": "x"}, generation_config={"eos_token_id": 7, "bos_token_id": 1},
    )  # fmt: skip
    assert [known.get_token(name) for name in ("bos", "eos", "pad", "unk")] == ["<s>", "</s>", None, None]
    assert (known.get_ids("eos"), known.get_ids("bos"), known.get_ids("pad")) == ([2, 7], [1], [])


THE_TEXT, BEGIN, END = {"Sequence": {}}, {"SpecialToken": {"id": "<s>"}}, {"SpecialToken": {"id": "</s>"}}


@pytest.mark.parametrize(("processor", "expected"), [
    (None, None), ({"type": "ByteLevel"}, None), (step("Sequence", processors=[]), None),
    (step("TemplateProcessing", single=[THE_TEXT]), {"bos": None, "eos": None}),
    (step("TemplateProcessing", single=[BEGIN, THE_TEXT]), {"bos": "<s>", "eos": None}),
    (step("TemplateProcessing", single=[BEGIN, THE_TEXT, END]), {"bos": "<s>", "eos": "</s>"}),
    (step("Sequence", processors=[step("ByteLevel"), step("TemplateProcessing", single=[THE_TEXT, END])]),
     {"bos": None, "eos": "</s>"}),
    (step("BertProcessing", cls=["<s>", 0], sep=["</s>", 2]), {"bos": "<s>", "eos": "</s>"}),
    (step("RobertaProcessing", cls=["<s>", 0], sep=["</s>", 2]), {"bos": "<s>", "eos": "</s>"}),
])  # fmt: skip
def test_the_template_is_read_from_the_post_processor(tmp_path: Path, processor: Any, expected: Any):
    assert settings_of(tmp_path, tokenizer={"post_processor": processor}).read_template() == expected


IDS = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}


AROUND = {"type": "TemplateProcessing", "single": [BEGIN, THE_TEXT]}


@pytest.mark.parametrize(("model", "processor", "settings", "ids", "expected"), [
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
def test_token_flags_say_which_tokens_enclose_texts(
    tmp_path: Path, model: str, processor: Any, settings: Any, ids: Any, expected: Any
):
    tokens = VocabularyBuilder(2, model, "default")
    tokens.put(0, "<s>", 3)
    tokens.put(1, "</s>", 3)
    known = settings_of(tmp_path, tokenizer={"post_processor": processor}, tokenizer_config=settings)
    flags = build_tokenizer_flags(tokens, known, ids)
    assert {name.removeprefix("tokenizer.ggml."): value for name, value in flags.items()} == expected
    for adds in (True, False):
        tokens.adds_space = adds
        space = build_tokenizer_flags(tokens, known, ids).get("tokenizer.ggml.add_space_prefix")
        explicit = False if settings.get("add_prefix_space") is False else adds
        assert space == (None if model == "bert" else explicit)


def test_a_sentencepiece_model_is_read_past_unknown_fields():
    """Cover numbers of several bytes, and fields that nobody reads."""
    piece = b"\x0a\x01a\x15\x00\x00\x20\xc0"  # its text, and -2.5; no type: a normal one
    unread = b"\x79" + bytes(8) + b"\x80\x01\x96\x01"  # the fields 15, of eight bytes, and 16, the number 150
    model = b"\x0a" + bytes([len(piece)]) + piece + unread
    read = read_sentencepiece(model)
    assert (read.pieces, read.scores, read.types, read.kind) == (["a"], [-2.5], [1], 1)
    assert (read.normalizes, read.adds_space) == (False, True)
    assert [*parse_message(unread)] == [(15, 0), (16, 150)]
    trained = model + b"\x12\x02\x18\x02" + b"\x1a\x05\x12\x01x\x18\x00"
    read = read_sentencepiece(trained)
    assert (read.kind, read.normalizes, read.adds_space) == (2, True, False)
    for cut in range(1, len(trained)):
        if cut not in (len(model) - len(unread), len(model) - 4, len(model), len(model) + 4):
            with pytest.raises(ValueError):
                read_sentencepiece(trained[:cut])
    assert parse_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10) and parse_varint(b"x\x7f", 1) == (127, 2)
    for odd in (b"\xff" * 10 + b"\x01", b"\x80", b""):
        with pytest.raises(ValueError, match="not a SentencePiece model"):
            parse_varint(odd, 0)
