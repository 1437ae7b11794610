"""Files that make no sense: every command refuses them with exit code 3, in one line that names the fault."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invalid_models import GONE, Wrong
from tiny_model import MERGES, vocabulary

from localllm.files.gguf.writer import PackedValue

ALL = ("run", "inspect", "tokenize", "quantize")
PIECES = vocabulary()
TYPES = np.array([3] * 3 + [1] * (len(PIECES) - 3), np.int32)


def L(name: str, value: Any) -> dict[str, Any]:  # noqa: N802 (short: the tables are full of it)
    return {f"llama.{name}": value}


def T(name: str, value: Any) -> dict[str, Any]:  # noqa: N802
    return {f"tokenizer.ggml.{name}": value}


def sentence_piece(**changes: Any) -> dict[str, Any]:
    """Return SentencePiece's metadata, of as many tokens as the tiny model has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghi"]
    types = np.array([2, 3, 3] + [6] * 256 + [1] * 9, np.int32)
    metadata = {"model": "llama", "tokens": pieces, "token_type": types, "scores": np.zeros(268, np.float32)}
    metadata_made = {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}
    metadata_made |= {"tokenizer.ggml.merges": GONE, "tokenizer.ggml.pre": GONE}
    return {key: value for key, value in metadata_made.items() if key != "tokenizer.ggml.scores" or value is not GONE}


def with_item(values: np.ndarray, place: int, item: Any) -> np.ndarray:
    values = values.copy()
    values[place] = item
    return values


NESTED = PackedValue(struct.pack("<IIQ", 9, 9, 2) + struct.pack("<IQB", 0, 1, 7) + struct.pack("<IQBB", 0, 2, 7, 7))
SUBNORMAL, INFINITE, NAN = np.float32(1e-40), np.float32(np.inf), np.float32(np.nan)
STRANGE_NUMBERS = {"zero": np.float32(0), "negative": np.float32(-1), "subnormal": SUBNORMAL, "infinite": INFINITE,
                   "not a number": NAN, "text": "1", "bool": True, "array": np.ones(3, np.float32)}  # fmt: skip
STRANGE_COUNTS = {"zero": 0, "negative": -1, "huge": 10**10, "float": 2.0, "text": "2", "bool": True, "nested": NESTED,
                  "wrong length": np.full(3, 2, np.uint32), "floats": np.full(2, 2.0, np.float32)}  # fmt: skip
POSITIVE = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor")
COUNTS = ("feed_forward_length", "block_count", "embedding_length", "context_length", "attention.head_count")
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix", "clean_spaces")
SCALES = ("attention.scale", "logit_scale", "final_logit_softcapping", "rope.scaling.yarn_beta_fast")
YARN = {"llama.rope.scaling.type": "yarn"}
IDS = ("bos", "eos", "unknown", "padding", "separator", "eot", "fim_pad", "mask")

METADATA: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{name}: {kind}": (L(name, value), name) for name in POSITIVE for kind, value in STRANGE_NUMBERS.items()},
    **{f"{name}: {kind}": (L(name, value), name) for name in COUNTS for kind, value in STRANGE_COUNTS.items()},
    **{f"{name}: {value!r}": (T(name, value), name) for name in FLAGS for value in (1, "yes", np.ones(1, np.bool_))},
    **{f"{name}: {value!r}": (T(f"{name}_token_id", value), f"{name}_token_id")
       for name in IDS for value in (-2, 1.5, True, "2", np.ones(1, np.uint32))},
    **{f"{name}: {value}": (L(name, np.float32(value)), name) for name in SCALES for value in (-1, 1e-30, 1e30)},
    **{f"{name}: 1e30": (L(name, np.float32(1e30)), name) for name in POSITIVE},
    **{f"{name}: {value!r}": ({f"general.{name}": value}, f"general.{name}")
       for name, value in (("type", 1), ("architecture", "LLAMA"), ("architecture", "\u202ellama"))},
    **{f"{name}: {value!r}": (T(name, value), f"tokenizer.ggml.{name}")
       for name, value in (("model", "\x1b[2J"), ("pre", "\x1b[2J"), ("token_type_count", -1),
                           ("token_type", np.full(268, 3, np.int32)))},
    **{f"{name}: as many as layers": (L(name, np.full(2, value, np.uint32)), name)
       for name, value in (("context_length", 512), ("embedding_length", 64), ("block_count", 2), ("vocab_size", 268),
                           ("attention.key_length", 16), ("rope.dimension_count", 16), ("expert_used_count", 0))},
    "a tiny epsilon": (L("attention.layer_norm_rms_epsilon", np.float32(1e-30)), "layer_norm_rms_epsilon"),
    "another width": (L("embedding_length", 72), "embedding_length"),
    "another length of values": (L("attention.value_length", 8), "attention.value_length"),
    "another length of keys": (L("attention.key_length", 8), "attention.key_length"),
    "half a head rotated": (L("rope.dimension_count", 8), "rope.dimension_count"),
    "YaRN without a factor": (YARN, "rope.scaling.factor"),
    "YaRN without a context": (YARN | L("rope.scaling.factor", np.float32(2))
                               | L("rope.scaling.original_context_length", 0), "original_context_length"),
    "longrope without factors": (L("rope.scaling.type", "longrope"), "longrope"),
    "a pattern of windows": (L("attention.sliding_window_pattern", np.full(2, 7)), "sliding_window_pattern"),
    "sections": (L("rope.dimension_sections", 3), "rope.dimension_sections"),
    "dense layers": (L("leading_dense_block_count", 9), "leading_dense_block_count"),
    "guessing layers": (L("nextn_predict_layers", 9), "nextn_predict_layers"),
    "a rank without matrices": (L("attention.q_lora_rank", 16), "attn_q_a"),
    "a template's name": ({"tokenizer.chat_templates": "rag"}, "chat_templates"),
    "another template": ({"tokenizer.chat_template.rag": 7}, "chat_template.rag"),
    "a lost part": ({"split.no": 1}, "split.no"),
    "lost tensors": ({"split.tensors.count": 99}, "split.tensors.count"),
    "no feed_forward_length": (L("feed_forward_length", GONE), "feed_forward_length"),
    "no epsilon": (L("attention.layer_norm_rms_epsilon", GONE), "epsilon"),
    "another feed_forward_length": (L("feed_forward_length", 64), "feed_forward_length"),
    "fewer layers": (L("block_count", 1), "blk.1."),
    "more layers": (L("block_count", 3), "blk.2."),
    "vocab_size of nothing": (L("vocab_size", 0), "vocab_size"),
    "experts without experts": (L("expert_count", 4) | L("expert_used_count", 2), "expert_count"),
    "used experts": (L("expert_used_count", 2), "expert_used_count"),
    "shared experts": (L("expert_shared_count", 1), "expert_shared_count"),
    "an unread number": (L("rope.scaling.yarn_ext_factor", INFINITE), "yarn_ext_factor"),
    "an unread count": (L("attention.sliding_window", -4), "sliding_window"),
    "an unread flag": (L("use_parallel_residual", 7), "use_parallel_residual"),
    "rope scaling": (L("rope.scaling.type", "sideways"), "rope scaling sideways"),
    "a template of numbers": ({"tokenizer.chat_template": np.ones(4, np.uint8)}, "tokenizer.chat_template"),
    "pre": (T("pre", ["llama-bpe"]), "tokenizer.ggml.pre"),
    "no model": (T("model", GONE), "tokenizer.ggml.model"),
    "models": (T("model", ["gpt2"]), "tokenizer.ggml.model"),
    "ragged types": (T("token_type", NESTED), "token_type"),
    "type 7": (T("token_type", with_item(TYPES, 9, 7)), "token_type: expected 1 to 6, found 7"),
    "types as text": (T("token_type", ["1"] * 268), "token_type"),
    "fewer types": (T("token_type", TYPES[:-1]), "token_type: expected 268 values"),
    "a byte that is none": (T("token_type", with_item(TYPES, 70, 6)), "token 70: expected a byte"),
    "fewer tokens": (T("tokens", PIECES[:-1]), "26"),
    "numbers as tokens": (T("tokens", np.arange(268)), "tokenizer.ggml.tokens"),
    "merge of one": (T("merges", [*MERGES, "he"]), "merges: entry 9"),
    "merge of three": (T("merges", [*MERGES, "h e l"]), "merges: entry 9"),
    "merge of nothing": (T("merges", [*MERGES, " h"]), "merges: entry 9"),
    "merges as numbers": (T("merges", np.arange(9)), "tokenizer.ggml.merges"),
    "no scores": (sentence_piece(scores=GONE), "tokenizer.ggml.scores"),
    "infinite score": (sentence_piece(scores=with_item(np.zeros(268, np.float32), 5, INFINITE)), "scores"),
    "ragged scores": (sentence_piece(scores=NESTED), "tokenizer.ggml.scores"),
    "architecture": ({"general.architecture": np.ones(2, np.uint8)}, "general.architecture"),
    "alignment as text": ({"general.alignment": "32"}, "general.alignment"),
}  # fmt: skip


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Wrong:
    return Wrong(tmp_path_factory.mktemp("strangers"))


def arguments(verb: str, path: Path) -> list[str]:
    more = {"run": ["-p", "Hi", "-n", "1"], "tokenize": ["Hi"], "quantize": [str(path.with_suffix(".out")), "Q8_0"]}
    return [verb, str(path), *more.get(verb, [])]


def require_refused(cli, path: Path, expected: str, verbs=ALL) -> None:
    for verb in verbs:
        code, _, err = cli(*arguments(verb, path))
        assert code == 3, f"{verb}: {err}"
        assert err.startswith(f"localllm: error: {path}: ") and err.count("\n") == 1, f"{verb}: {err}"
        assert expected in err, f"{verb}: {err}"
        assert not path.with_suffix(".out").exists()


def test_the_valid_model_is_accepted_by_all_commands(wrong: Wrong, cli):
    path = wrong.write()
    for verb in ALL:
        assert cli(*arguments(verb, path))[0] == 0, verb
    path.with_suffix(".out").unlink()
    assert cli("inspect", path, "--check")[0] == 0


def test_sentencepiece_metadata_of_the_test_model_is_valid(wrong: Wrong, cli):
    assert cli(*arguments("tokenize", wrong.write(sentence_piece())))[0] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("case", METADATA)
def test_wrong_metadata_is_refused_by_every_command(wrong: Wrong, cli, case: str):
    changes, expected = METADATA[case]
    if "alignment" in expected:
        return require_refused_by_hand(wrong, cli, changes, expected)
    require_refused(cli, wrong.write(changes), expected)


def test_an_adapter_is_no_model_and_is_inspected_as_an_adapter(wrong: Wrong, cli):
    path = wrong.write({"general.type": "adapter"})
    refusal = "this is an adapter, not a model: use its model with --lora FILE"
    require_refused(cli, path, refusal, ["run", "tokenize"])
    require_refused(cli, path, "adapter.type must be lora (found None)", ["inspect"])
    code, _, err = cli(*arguments("quantize", path))
    assert code == 2 and "must be a model, not an adapter; add --adapter to write it in another type" in err


def test_bidirectional_attention_is_not_usable_but_inspected(wrong: Wrong, cli):
    """It may be a good model, of a kind that is not supported."""
    path = wrong.write(L("attention.causal", False))
    require_refused(cli, path, "attention.causal", ["run"])
    code, out, _ = cli("inspect", path)
    assert code == 0 and "not usable" in out and "bidirectional attention" in out


def require_refused_by_hand(wrong: Wrong, cli, changes: dict[str, Any], expected: str) -> None:
    """Change an alignment behind the writer's back, which would heed it."""
    data = wrong.write({"general.alignment": 32}).read_bytes()
    place = data.index(b"general.alignment") + len("general.alignment")
    for kind, value in ((4, 2**31), (4, 0), (4, 48), (4, 1 << 17), (5, 32), (6, 32)):
        wrong.path.write_bytes(data[:place] + struct.pack("<II", kind, value) + data[place + 8 :])
        require_refused(cli, wrong.path, expected)


def nan_row(weights: np.ndarray) -> np.ndarray:
    weights[-1] = np.nan
    return weights


ONES = np.ones(64, np.float32)
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "without a norm": ({"output_norm.weight": GONE}, "output_norm.weight"),
    "a tensor too many": ({"blk.0.attn_sinks.weight": ONES}, "blk.0.attn_sinks.weight"),
    "a bias of a norm": ({"blk.0.attn_norm.bias": ONES}, "attn_norm.bias"),
    "a bias of the embedding": ({"token_embd.bias": ONES}, "token_embd.bias"),
    "a scale of a norm": ({"blk.0.attn_norm.scale": ONES[:1]}, "attn_norm.scale"),
    "a norm that is not a number": ({"blk.1.ffn_norm.weight": nan_row}, "blk.1.ffn_norm.weight"),
    "a bias that is not a number": (
        {"blk.0.attn_q.bias": ONES, "blk.1.attn_q.bias": ONES * np.inf},
        "blk.1.attn_q.bias",
    ),
    "rope factors of 0": ({"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight"),
    "negative rope factors": ({"rope_freqs.weight": -ONES[:8]}, "rope_freqs.weight"),
    "subnormal rope factors": ({"rope_freqs.weight": np.full(8, 1e-40, np.float32)}, "rope_freqs.weight"),
    "infinite rope factors": ({"rope_freqs.weight": np.full(8, np.inf, np.float32)}, "rope_freqs.weight"),
    "rope factors of 1e-30": ({"rope_freqs.weight": np.full(8, 1e-30, np.float32)}, "rope_freqs.weight"),
    "short rope factors of 0": (
        {"rope_factors_short.weight": ONES[:8] * 0, "rope_factors_long.weight": ONES[:8]},
        "rope_factors_short.weight",
    ),
    "a matrix of integers": ({"blk.0.ffn_up.weight": np.ones((128, 64), np.int32)}, "blk.0.ffn_up.weight: format I32"),
    "an expert of a dense model": ({"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}, "ffn_gate_inp"),
    "a matrix of another size": ({"blk.0.ffn_up.weight": np.ones((64, 64), np.float32)}, "columns"),
    "a stack of matrices": ({"blk.0.attn_q.weight": np.ones((2, 64, 64), np.float32)}, "blk.0.attn_q.weight"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors_are_refused_by_every_command(wrong: Wrong, cli, case: str):
    changes, expected = TENSORS[case]
    require_refused(cli, wrong.write(tensors=changes), expected)


@pytest.mark.parametrize(
    "name", ["", "x" * 64, "a\x1b[2J", "a\u202eb", "a\u2028b", "a\nb", "a\u200fb", "a b", "a\u3164b"]
)
def test_names_with_odd_characters_are_refused(wrong: Wrong, cli, name: str):
    require_refused(cli, wrong.write(tensors={name: ONES}), "name")
    if name != "a b":
        require_refused(cli, wrong.write({name: 1}) if len(name) < 64 else wrong.write({name * 1025: 1}), "name")


def test_a_gap_between_tensors_is_refused(wrong: Wrong, cli):
    data = bytearray(wrong.write().read_bytes())
    place = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    (start,) = struct.unpack_from("<Q", data, place)
    after = data.index(b"output.weight") + len("output.weight") + 4 + 16 + 4
    struct.pack_into("<Q", data, after, struct.unpack_from("<Q", data, after)[0] + 32)
    wrong.path.write_bytes(bytes(data) + bytes(32))
    assert start
    require_refused(cli, wrong.path, "output.weight: offset")


def test_data_behind_the_last_tensor_are_refused(wrong: Wrong, cli):
    """Lose a tensor of the table: without its output matrix, a model takes the embedding."""
    data = wrong.write().read_bytes()
    (count,) = struct.unpack_from("<Q", data, 8)
    wrong.path.write_bytes(data[:8] + struct.pack("<Q", count - 1) + data[16:])
    require_refused(cli, wrong.path, "tensor count: the data of 20 tensors ends at byte")


def test_weights_that_are_no_numbers_are_refused_when_met(wrong: Wrong, cli):
    """Expect inspect to refuse them with --check only."""
    path = wrong.write(tensors={"blk.1.ffn_down.weight": nan_row})
    require_refused(cli, path, "logits that are not finite", ["run"])
    require_refused(cli, path, "blk.1.ffn_down.weight: the weight in row 63, column 0 is nan", ["quantize"])
    assert cli("inspect", path)[0] == 0
    code, _, err = cli("inspect", path, "--check")
    assert (code, err.count("\n")) == (3, 1) and "blk.1.ffn_down.weight: the weight in row 63" in err


def test_a_template_that_does_not_compile_is_refused(wrong: Wrong, cli):
    path = wrong.write({"tokenizer.chat_template": "{% for %}"})
    assert cli("inspect", path)[0] == 0
    code, _, err = cli("inspect", path, "--check")
    assert code == 3 and "the chat template is invalid" in err
    code, _, err = cli(*arguments("run", path))
    assert code == 3 and "the chat template is invalid" in err


def test_a_huge_text_is_refused_only_where_it_is_needed(wrong: Wrong, cli, monkeypatch):
    text = "x" * (5 << 20)
    assert cli("tokenize", wrong.write({"general.description": text}), "Hi")[0] == 0
    require_refused(cli, wrong.write({"general.name": text}), "general.name: the string must have at most")


def test_a_length_with_a_flipped_bit_is_refused(wrong: Wrong, cli):
    data = bytearray(wrong.write({"x.padding": "x" * (1 << 17)}).read_bytes())
    place = data.index(b"\5\0\0\0\0\0\0\0hello") + 2
    data[place] ^= 1
    wrong.path.write_bytes(data)
    require_refused(cli, wrong.path, "must have at most 65536 bytes")


@pytest.mark.parametrize("text", [
    "general.alignment=int:8589934592", "general.alignment=int:2147483648", "general.alignment=int:0",
    "general.alignment=str:32", "general.alignment=bool:true", "general.alignment=float:32", "split.count=int:3",
    "a=int:99999999999999999999", "a=float:1e300", "a=float:nan", "a\x1b=int:1",
])  # fmt: skip
def test_invalid_overrides_are_refused(wrong: Wrong, cli, text: str):
    path = wrong.write()
    code, _, err = cli(*arguments("quantize", path), "--override-kv", text)
    assert (code, err.count("\n")) == (2, 1) and "--override-kv" in err
    assert not path.with_suffix(".out").exists()


def test_overrides_that_make_a_wrong_model_are_refused(wrong: Wrong, cli):
    path = wrong.write()
    code, _, err = cli(*arguments("quantize", path), "--override-kv", "llama.block_count=int:99")
    assert code == 3 and "blk.2." in err
    broken = wrong.write(L("attention.layer_norm_rms_epsilon", 0.0))
    mended = "llama.attention.layer_norm_rms_epsilon=float:1e-5"
    assert cli(*arguments("quantize", broken), "--override-kv", mended)[0] == 0
    broken.with_suffix(".out").unlink()


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_outputs_without_a_proper_name_are_refused(wrong: Wrong, cli, name: str):
    code, _, err = cli("quantize", wrong.valid, str(wrong.path.parent / name) if name else "", "Q8_0")
    assert (code, err.count("\n")) == (2, 1) and "name" in err


def test_the_longest_file_name_is_accepted(wrong: Wrong, cli):
    target = wrong.path.parent / ("x" * 255)
    assert cli("quantize", wrong.valid, target, "Q8_0")[0] == 0
    target.unlink()
