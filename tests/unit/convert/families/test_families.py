"""Compare converted checkpoints of many architectures with llama.cpp's converter and transformers.


checkpoints.json has, for each variant, the config.json, names and shapes of a tiny checkpoint as transformers 5.23
saves it ("-old": as older versions or the publishers did), and the metadata and checksums of what llama.cpp's converter
(November 2026) made of it. The logits of tokens 0, 50, ... 250 behind the text are by transformers with PyTorch 2.13:
those with seven digits in float64, others in float32. scripts/record/record_checkpoints.py records more of them.
"""

import json
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from checkpoint import edit_json, random_tensor, spelled_out, write_family, write_json, write_safetensors
from project import GOLDENS
from step_costs import Free

import localllm
from localllm.arch import ARCHITECTURES
from localllm.convert import Checkpoint, open_folder, tokens
from localllm.convert.config import CheckpointConfig
from localllm.convert.hyperparameters import CheckpointHyperparameters
from localllm.convert.records import find_family
from localllm.convert.tokenizer_json import find_pretokenizer
from localllm.convert.transforms import as_float32
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.embedding.embedder import has_head
from localllm.generation.speculation import speculator
from localllm.quant.recipes import find_recipe
from localllm.quantizing.plan import COPY, QuantizeRequest, make_plan
from localllm.quantizing.quantize import open_source, quantize_model
from tests.unit.convert.convert_parts import refused
from tests.unit.convert.test_hyperparameters import TEXT, write_gguf

VARIANTS: dict[str, dict[str, Any]] = json.loads((GOLDENS / "checkpoints.json").read_text())


# Exponentials differ in their last bits; T5's last norm is scaled here, and not by llama.cpp's converter.
UNLIKE = "blk.ssm_a", "dec.output_norm.weight"


@pytest.fixture(scope="module")
def pretokenizer() -> Callable[[Any, bool], str]:
    """Return a cached pretokenizer_name, which takes 0.13 s."""
    known: dict[str, str] = {}

    def name(content: Any, ignore_merges: bool) -> str:
        key = json.dumps([content, ignore_merges])
        if key not in known:
            known[key] = find_pretokenizer(content, ignore_merges)
        return known[key]

    return name


@pytest.fixture(autouse=True)
def _named_once(monkeypatch: pytest.MonkeyPatch, pretokenizer: Callable[[Any, bool], str]) -> None:
    monkeypatch.setattr(tokens, "find_pretokenizer", pretokenizer)


def facts(variant: str) -> dict[str, Any]:
    """Return what is recorded of a variant; an "-old" one has the weights of another."""
    content = VARIANTS[variant]
    return {**VARIANTS.get(content.get("like", ""), {}), **content}


def shapes_of(variant: str) -> dict[str, list[int]]:
    return spelled_out(facts(variant)["shapes"])


def written(folder: Path, variant: str) -> Path:
    return write_family(folder, facts(variant)["config"], shapes_of(variant))


def check_sums(checkpoint: Checkpoint) -> dict[str, str]:
    """Return checksums of type, shape and bytes of the tensors of a name, over all layers."""
    sums: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        name = re.sub(r"^blk\.\d+\.", "blk.", tensor.name)
        known = crc32(f"{tensor.format.name} {' '.join(map(str, tensor.shape))}".encode(), sums.get(name, 0))
        sums[name] = crc32(tensor.read_rows(0, prod(tensor.shape[:-1])).tobytes(), known)
    return {name: f"{number:08x}" for name, number in sums.items()}


def told(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters, without those that readers assume."""
    arch = metadata["general.architecture"]
    kept = {key: value for key, value in metadata.items() if key.startswith((f"{arch}.", "general."))}
    kept = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in kept.items()}
    if kept.get(f"{arch}.rope.freq_base") == 10000.0:
        del kept[f"{arch}.rope.freq_base"]
    heads = metadata[f"{arch}.attention.head_count"] or 1
    usual = metadata[f"{arch}.embedding_length"] // (max(heads) if isinstance(heads, list) else heads)
    for key in (f"{arch}.attention.key_length", f"{arch}.attention.value_length"):
        if kept.get(key) == usual:
            del kept[key]
    return kept


@pytest.mark.sampled
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "tensors" in facts(variant)])
def test_metadata_and_tensors_agree_with_llama_cpp(tmp_path: Path, variant: str):
    checkpoint = open_folder(written(tmp_path, variant))
    theirs, ours = told(facts(variant)["metadata"]), told(checkpoint.metadata)
    assert {key: ours.get(key) for key in theirs} == {
        key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for key, value in theirs.items()
    }
    more = {f"general.{key}" for key in ("name", "type", "quantization_version", "file_type")}
    more |= {f"{ours['general.architecture']}.pooling_type"} if variant.endswith("-rank") else set()
    more |= {"modern-bert.attention.layer_norm_epsilon"}  # which its readers want, and transformers does not save
    assert ours.keys() - theirs.keys() <= more
    sums = check_sums(checkpoint)
    assert {name: sum for name, sum in sums.items() if name not in UNLIKE} == facts(variant)["tensors"]


NEXTN = {
    "eh_proj": "64 128", "enorm": "64", "hnorm": "64", "embed_tokens": "272 64", "shared_head.norm": "64",
    "shared_head.head": "272 64",
}  # fmt: skip
IN_GGUF = {name: f"nextn.{name.replace('.', '_')}" for name in NEXTN}


@pytest.mark.parametrize(("variant", "last"), [("deepseek3", 1), ("glm4_moe", 2)])
@pytest.mark.parametrize("without", [(), ("embed_tokens", "shared_head.norm", "shared_head.head")], ids=len)
def test_mtp_layers_are_converted(
    tmp_path: Path, variant: str, last: int, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    """Find them after the other layers, as publishers store them; transformers' checkpoints have none."""
    monkeypatch.setattr(speculator, "StepCostModel", Free)  # or it would be a matter of time whether guesses are made
    shapes, own = shapes_of(variant), f"model.layers.{last + 1}."
    its = {name.replace(f".{last}.", f".{last + 1}.", 1): s for name, s in shapes.items() if f"s.{last}." in name}
    its |= {f"{own}{name}.weight": [*map(int, s.split())] for name, s in NEXTN.items() if name not in without}
    folder = write_family(tmp_path / "model", facts(variant)["config"], shapes | its)
    checkpoint = open_folder(folder)
    arch = checkpoint.metadata["general.architecture"]
    assert checkpoint.metadata[f"{arch}.block_count"] == last + 2
    assert checkpoint.metadata[f"{arch}.nextn_predict_layers"] == 1
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    for name, place in IN_GGUF.items():
        if name in without:
            assert f"blk.{last + 1}.{place}.weight" not in tensors
            continue
        tensor = tensors[f"blk.{last + 1}.{place}.weight"]
        stored = random_tensor(f"{own}{name}.weight", tensor.shape)[1]
        got = as_float32(tensor.read_rows(0, prod(tensor.shape[:-1])), tensor.format.name)
        np.testing.assert_array_equal(got.reshape(stored.shape), stored)
    with localllm.open(write_gguf(tmp_path / "model.gguf", checkpoint), threads=1, cache=False) as model:
        answer = model.generate(TEXT, 12, speculate="mtp", temperature=0)
        assert "".join(answer) == "".join(model.generate(TEXT, 12, speculate="off", temperature=0))
        assert answer.drafted > 0


def test_an_incomplete_mtp_layer_is_refused(tmp_path: Path):
    shapes = shapes_of("deepseek3") | {"model.layers.2.eh_proj.weight": [64, 128]}
    folder = write_family(tmp_path, facts("deepseek3")["config"], shapes)
    with pytest.raises(ModelError, match=r"the tensor for blk\.2\.attn_norm"):
        open_folder(folder)


def runs(variant: str) -> bool:
    """Return whether localllm runs the architecture and generates text with it."""
    metadata = facts(variant).get("metadata", {})  # of a few there is none
    return "logits" in facts(variant) and metadata.get("general.architecture", "llama") in ARCHITECTURES


@pytest.mark.sampled("variant", every=2)
@pytest.mark.parametrize("variant", [*filter(runs, VARIANTS)])
def test_logits_agree_with_transformers(tmp_path: Path, variant: str):
    path = write_gguf(tmp_path / "model.gguf", open_folder(written(tmp_path / "model", variant)))
    with localllm.open(path, backend="reference", kv_type="f32") as model:
        start = facts(variant)["config"].get("decoder_start_token_id")
        logits = model.logits(TEXT if start is None else [*TEXT[:60], start, *TEXT[60:]])[-1]
    np.testing.assert_allclose(logits[:251:50], facts(variant)["logits"], atol=ATOL)


# Sums of float32: a CPU that takes them in another order is 1.4e-5 off (Zen 5, Gemma), and with delta rules of large
# numbers transformers itself is 3e-5 off from what it makes in float64.
ATOL = 3e-5


# Whose number of layers says how they attend; and what makes vectors, or fills masks.
BY_SIZE = ("baichuan", "jina-bert", "jina-bert-code", "nomic-bert-moe", "llada_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if not {"logits", "rows", "like"} & {*VARIANTS[name]} and name not in BY_SIZE]
)
def test_variants_without_recorded_logits_run(tmp_path: Path, variant: str):
    """transformers does not have them, or computes something else: neighbours are rotated, or norms have no mean."""
    path = write_gguf(tmp_path / "model.gguf", open_folder(written(tmp_path / "model", variant)))
    with localllm.open(path, backend="reference", kv_type="f32") as model:
        assert np.isfinite(model.logits(TEXT[:9])).all()


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("KORMoForCausalLM", "qwen2"), ("Qwen2Model", "qwen2"), ("LlamaModel", "llama"),
        ("VLlama3ForCausalLM", "llama"), ("IQuestCoderForCausalLM", "llama"), ("OLMoForCausalLM", "olmo"),
        ("LFM2ForCausalLM", "lfm2"), ("UMT5Model", "umt5"), ("T5WithLMHeadModel", "t5"), ("MambaLMHeadModel", "mamba"),
        ("Ernie4_5_ForCausalLM", "ernie4_5"), ("MiniMaxM1ForCausalLM", "minimax01"),
        ("BaiChuanForCausalLM", "baichuan"), ("KimiLinearModel", "kimi_linear"), ("MiMoV2ForCausalLM", "mimo_v2_flash"),
    ],
)  # fmt: skip
def test_other_names_of_an_architecture_convert_the_same(tmp_path: Path, name: str, variant: str):
    """Compare names for which llama.cpp's converter has one class, too."""
    folder = written(tmp_path, variant)
    before = told_or_refused(folder)
    assert not isinstance(before, str)
    edit_json(folder / "config.json", architectures=[name])
    assert told_or_refused(folder) == before


@pytest.mark.parametrize(("variant", "mask"), [("dream", 7), ("llada", 7), ("llada_moe", 156895)])
def test_diffusion_models_get_a_mask_token(tmp_path: Path, variant: str, mask: int):
    metadata = open_folder(written(tmp_path, variant)).metadata
    assert metadata["tokenizer.ggml.mask_token_id"] == mask
    assert metadata.get("diffusion.shift_logits", True) is (variant == "dream")


@pytest.mark.slow
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if "rows" in facts(variant)])
def test_embeddings_and_scores_agree_with_transformers(tmp_path: Path, variant: str):
    """Compare the mean of the rows, or the head's scores."""
    path = write_gguf(tmp_path / "model.gguf", open_folder(written(tmp_path / "model", variant)))
    file = GGUFFile.open(path)
    kind = "rank" if has_head(file) else "mean"
    for backend, most in (("reference", 1e-5), ("cpu", 1e-4)):
        reader = EmbeddingRunner(file, kind, EngineOptions(backend=backend, kv_type="f32"))
        np.testing.assert_allclose(reader.read([TEXT])[0], facts(variant)["rows"], atol=most)
        reader.close()


WITHOUT_SHARED = {
    "n_shared_experts": ["deepseek2", "deepseek3", "deepseek32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4"],
    "moe_num_shared_experts": ["ernie4_5_moe"], "num_shared_experts": ["cohere2_moe"],
}  # fmt: skip


@pytest.mark.parametrize(("key", "variant"), [(key, each) for key, some in WITHOUT_SHARED.items() for each in some])
def test_experts_without_shared_ones_are_converted(tmp_path: Path, key: str, variant: str):
    shapes = {name: shape for name, shape in shapes_of(variant).items() if "shared_experts" not in name}
    checkpoint = open_folder(write_family(tmp_path, facts(variant)["config"] | {key: 0}, shapes))
    assert len(shapes) < len(shapes_of(variant)) and any("_exps" in tensor.name for tensor in checkpoint.tensors)
    assert not any("_shexp" in tensor.name for tensor in checkpoint.tensors)


# transformers' defaults of a config.json: the norms' epsilon and the base of RoPE.
UNSAID = {
    "llama": (1e-6, 10000.0), "qwen2": (1e-6, 10000.0), "qwen3": (1e-6, 10000.0), "gemma": (1e-6, 10000.0),
    "gemma2": (1e-6, 10000.0), "gemma3": (1e-6, 1000000.0), "phi3": (1e-5, 10000.0), "smollm3": (1e-6, 2000000.0),
    "olmo2": (1e-5, 10000.0), "granite": (1e-6, 10000.0), "starcoder2": (1e-5, 10000.0), "gpt2": (1e-5, None),
    "mixtral": (1e-5, 1000000.0), "qwen2moe": (1e-6, 10000.0), "qwen3moe": (1e-6, 10000.0), "olmoe": (1e-5, 10000.0),
    "gpt-oss": (1e-5, 150000.0), "deepseek3": (1e-6, 10000.0), "mamba": (1e-5, None), "phi": (1e-5, 10000.0),
    "gptneox": (1e-5, 10000.0), "falcon": (1e-5, 10000.0), "cohere": (1e-5, 500000.0), "cohere2": (1e-5, 10000.0),
    "stablelm": (1e-5, 10000.0), "exaone4": (1e-5, 10000.0), "glm4": (1.5625e-7, 10000.0), "bloom": (1e-5, None),
    "apertus": (1e-5, 12e6), "hunyuan_dense": (1e-5, 10000.0), "hunyuan_moe": (1e-5, 10000.0), "dbrx": (1e-5, 10000.0),
    "ernie4_5_moe": (1e-5, 500000.0), "lfm2_moe": (1e-5, 1e6), "afmoe": (1e-5, 10000.0), "llama4": (1e-5, 500000.0),
    "glm4_moe_lite": (1e-5, 10000.0), "qwen3_next": (1e-6, 10000.0), "bamba": (1e-5, 10000.0),
    "falcon_mamba": (1e-5, None), "nemotron_h": (1e-5, None), "jais2": (1e-5, 10000.0), "hy_v3": (1e-5, 11158840.0),
    "exaone_moe": (1e-5, 10000.0), "solar_open": (1e-5, 1e6), "gemma3n": (1e-6, 1e6), "gemma4": (1e-6, 1e6),
    "granite_swa": (1e-5, 10000.0), "cohere2_moe": (1e-5, 10000.0), "gpt_bigcode": (1e-5, None),
    "hrm_text": (1e-6, 10000.0), "minicpm3": (1e-5, 10000.0), "youtu": (1e-6, 10000.0), "glm_moe_dsa": (1e-5, 10000.0),
    "laguna": (1e-6, 5e5), "kimi_linear": (1e-5, 10000.0),
}  # fmt: skip


def understood(variant: str, **said: Any) -> CheckpointHyperparameters | str:
    """Read a variant's config.json with these changes (None removes a key), or return why it is refused."""
    content = {name: value for name, value in (facts(variant)["config"] | said).items() if value is not None}
    config = CheckpointConfig(content, Path("config.json"))
    try:
        family = find_family(config)
        return family.read(config.merge_text_config(family.defaults))
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("variant", UNSAID)
def test_missing_epsilon_and_rope_base_get_transformers_defaults(variant: str):
    names = ["rms_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"]
    h = understood(variant, **dict.fromkeys([*names, "rope_theta", "rope_parameters"]))
    assert isinstance(h, CheckpointHyperparameters)
    norms = [f"attention.layer_norm{kind}_epsilon" for kind in ("", "_rms")]
    epsilon, base = UNSAID[variant]
    assert [h.metadata[name] for name in norms if name in h.metadata] == [epsilon]
    assert h.metadata.get("rope.freq_base") == base


@pytest.mark.parametrize(("config", "base"), [
    ({"rotary_emb_base": 50000}, 50000.0), ({"rope_theta": 20000}, 20000.0),
    ({"rope_theta": 20000, "rotary_emb_base": 50000}, 20000.0),
])  # fmt: skip
def test_the_rope_base_is_read_by_its_older_name(tmp_path: Path, config: dict[str, Any], base: float):
    folder = written(tmp_path, "gptneox")
    edit_json(folder / "config.json", rope_parameters=None, **config)
    assert open_folder(folder).metadata["gptneox.rope.freq_base"] == base


# Other defaults of transformers.
TIED = {"tie_word_embeddings": True}
GEMMA = {**TIED, "head_dim": 256, "max_position_embeddings": 8192}
ALSO_UNSAID = {
    "llama": {"tie_word_embeddings": False, "max_position_embeddings": 2048, "hidden_act": "silu"},
    "gemma": GEMMA,
    "gemma2": {
        **GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **TIED, "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "smollm3": TIED, "starcoder2": {**TIED, "max_position_embeddings": 4096}, "gpt2": {**TIED, "n_positions": 1024},
    "falcon": TIED, "cohere": {**TIED, "logit_scale": 0.0625, "use_qk_norm": False},
    "cohere2": {**TIED, "sliding_window": 4096, "head_dim": 128, "logit_scale": 0.0625}, "glm4": {"head_dim": 128},
    "stablelm": {"use_parallel_residual": False, "qk_layernorm": False}, "gptneox": {"use_parallel_residual": True},
    "glm4_moe_lite": {"routed_scaling_factor": 1.8}, "bloom": TIED,
    "afmoe": {"sliding_window": 1024, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.0},
    "ernie4_5_moe": {
        **TIED, "moe_layer_start_index": 1, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    },
    "qwen3_next": {
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "head_dim": 256,
    },
    "falcon_mamba": TIED,
    "nemotron_h": {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mamba_num_heads": 128},
    "mamba": TIED, "qwen3moe": {"norm_topk_prob": False}, "gpt-oss": {"head_dim": 64, "sliding_window": 128},
    "deepseek3": {
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
}  # fmt: skip


def told_or_refused(folder: Path) -> object:
    try:
        checkpoint = open_folder(folder)
    except ModelError as error:
        return str(error)
    return told(checkpoint.metadata), [(tensor.name, tensor.shape) for tensor in checkpoint.tensors]


@pytest.mark.parametrize("variant", ALSO_UNSAID)
def test_missing_keys_equal_their_defaults_and_differ_from_others(variant: str):
    for name, value in ALSO_UNSAID[variant].items():
        unsaid, default, other = (str(understood(variant, **{name: each})) for each in (None, value, another(value)))
        assert unsaid == default != other, name


def another(value: object) -> object:
    return not value if isinstance(value, bool) else 3


# Whose output matrix is the embedding, where nothing is said of it.
TIED_UNSAID = {
    *["gemma", "gemma2", "gemma3", "gemma3-vision", "smollm3", "starcoder2", "gpt2", "mamba", "gemma3-old"],
    *["gemma3-vision-old", "ernie4_5", "bert", "bert-rank", "xlm-roberta", "xlm-roberta-rank", "modern-bert"],
    *["modern-bert-rank", "nomic-bert", "gemma-embedding", "jina-bert", "jina-bert-code", "nomic-bert-moe"],
    *["nomic-bert-old", "t5", "flan_t5", "mt5", "umt5", "t5encoder", "lfm2", "lfm2_as_said", "falcon", "falcon_new"],
    *["cohere", "cohere_norms", "cohere2", "bloom", "mpt", "falcon_mamba", "ernie4_5_moe", "lfm2_moe", "gemma3n"],
    *["gemma4", "gemma4_large", "gemma4_experts", "lfm2_vl", "cohere2_moe", "gpt_bigcode", "minicpm3", "youtu"],
    *["minicpm", "paddleocr", "distilbert"],
}  # fmt: skip


def test_missing_tie_word_embeddings_has_a_default_by_family():
    for variant in VARIANTS:
        text = facts(variant)["config"].get("text_config")
        without = {name: value for name, value in (text or {}).items() if name != "tie_word_embeddings"}
        more = {"text_config": without} if text else {}
        h = understood(variant, tie_word_embeddings=None, **more)
        assert isinstance(h, CheckpointHyperparameters) and h.tied is (variant in TIED_UNSAID), variant


@pytest.mark.parametrize(("kind", "value", "tied", "scaled"), [
    ("t5", None, True, True), ("t5", None, False, False), ("t5", True, False, True), ("t5", False, True, False),
    (None, None, True, True), ("umt5", None, True, True), ("mt5", None, True, False), ("mt5", True, True, False),
])  # fmt: skip
def test_scaling_of_t5_outputs_follows_the_config(kind: str | None, value: bool | None, tied: bool, scaled: bool):
    h = understood("t5", model_type=kind, scale_decoder_outputs=value, tie_word_embeddings=tied)
    assert isinstance(h, CheckpointHyperparameters) and h.sizes["scaled"] is int(scaled)


@pytest.mark.parametrize(("variant", "factor"), [("t5", 64**-0.5), ("mt5", 1.0)])
def test_the_last_norm_of_t5_is_scaled_instead_of_its_outputs(tmp_path: Path, variant: str, factor: float):
    (norm,) = (
        each for each in open_folder(written(tmp_path, variant)).tensors if each.name == "dec.output_norm.weight"
    )
    stored = random_tensor("decoder.final_layer_norm.weight", (64,))[1]
    np.testing.assert_allclose(norm.read_rows(0, 1).view(np.float32)[0], stored * factor, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "shape"), [("", ()), ("F32", (3,)), ("I64", (1, 3)), ("I64", ())])
def test_multipliers_of_ngram_hashes_must_be_a_row_of_integers(tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    """Use Qwen 4, which has n-gram hashes."""
    name = "model.layers.0.ple.ple_embedding.layer_multipliers"
    shapes = shapes_of("qwen4_exp")
    tensors = [(other, *random_tensor(other, tuple(its))) for other, its in shapes.items() if other != name]
    folder = written(tmp_path, "qwen4_exp")
    more = [(name, dtype, np.ones(shape))] if dtype else []
    write_safetensors(folder / "model.safetensors", [*tensors, *more])
    assert "the tensor layer_multipliers of the n-gram embeddings is missing" in refused(folder)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "ernie4_5", "seed_oss", "arcee", "apertus", "llama4"])
def test_every_family_converts_the_rope_scaling_of_llama_3(tmp_path: Path, variant: str):
    """Expect a tensor with the factors that transformers computes from wavelengths."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
    folder = written(tmp_path, variant)
    edit_json(folder / "config.json", rope_parameters=scaling, rope_theta=5e5, rope_scaling=None)
    checkpoint = open_folder(folder)
    (factors,) = (tensor for tensor in checkpoint.tensors if tensor.name == "rope_freqs.weight")
    count = prod(factors.shape)
    lengths = 2 * np.pi * 5e5 ** (np.arange(count) / count)
    smooth = (64 / lengths - 1) / (4 - 1)
    expected = np.where(lengths > 64, 8, np.where(lengths < 16, 1, 1 / ((1 - smooth) / 8 + smooth)))
    assert set(expected.round(3)) > {1, 8}, "both ends, and something between"
    np.testing.assert_allclose(factors.read_rows(0, 1).view(np.float32).reshape(-1), expected, rtol=1e-6)


def test_hunyuan_gets_its_trained_context_and_scaled_base(tmp_path: Path):
    """Scale the base by alpha, as llama.cpp's converter does."""
    folder = written(tmp_path, "hunyuan_dense")
    edit_json(folder / "config.json", rope_parameters={"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4})
    metadata = open_folder(folder).metadata
    hyperparameters = {key.removeprefix("hunyuan-dense."): value for key, value in metadata.items()}
    assert hyperparameters["context_length"] == hyperparameters["rope.scaling.original_context_length"] == 262144
    assert hyperparameters["rope.freq_base"] == pytest.approx(1e4 * 1000 ** (24 / 22), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "gpt-oss", "gpt-oss-mxfp4", "granitemoe", "deepseek3", "gpt2", "mamba"])
def test_any_range_of_rows_equals_the_rows_of_the_whole(tmp_path: Path, variant: str):
    for tensor in open_folder(written(tmp_path, variant)).tensors:
        count = prod(tensor.shape[:-1])
        whole = tensor.read_rows(0, count)
        for step in (7, count // 2 + 1):
            for first in range(0, count, step):
                rows = tensor.read_rows(first, min(first + step, count))
                assert rows.flags.c_contiguous
                np.testing.assert_array_equal(rows, whole[first : first + step])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mixtral", "gpt-oss", "deepseek3", "gpt2", "gemma2", "mamba"])
def test_tensors_of_16_bits_become_float32_where_readers_need_it(tmp_path: Path, variant: str):
    full = {tensor.name: tensor for tensor in open_folder(written(tmp_path / "full", variant)).tensors}
    halves = open_folder(write_family(tmp_path / "half", facts(variant)["config"], shapes_of(variant), "BF16")).tensors
    assert len(halves) == len(full)
    for tensor in halves:
        rows, expected = (one.read_rows(0, prod(one.shape[:-1])) for one in (tensor, full[tensor.name]))
        matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
        small = any(part in tensor.name for part in ("gate_inp", "position_embd", "conv1d"))
        assert tensor.format.name == ("BF16" if matrix and not small else "F32")
        np.testing.assert_allclose(as_float32(rows, tensor.format.name), expected.view(np.float32), rtol=2**-7)


def test_mamba_decay_is_minus_the_exponential(tmp_path: Path):
    tensors = {tensor.name: tensor for tensor in open_folder(written(tmp_path, "mamba")).tensors}
    _, logarithms = random_tensor("backbone.layers.1.mixer.A_log", (128, 16))
    decay = tensors["blk.1.ssm_a"].read_rows(0, 128).view(np.float32)
    np.testing.assert_allclose(decay, -np.exp(logarithms.astype(np.float64)), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "recipe"),
    [("gpt2", "COPY"), ("gpt2", "Q8_0"), ("mixtral", "Q8_0"), ("gpt-oss-mxfp4", "COPY"), ("deepseek3", "COPY")],
)
def test_a_quantized_checkpoint_runs(tmp_path: Path, variant: str, recipe: str):
    request = QuantizeRequest(COPY if recipe == "COPY" else find_recipe(recipe))
    plan = make_plan(open_source(str(written(tmp_path / "model", variant))), request)
    quantize_model(plan, str(tmp_path / "model.gguf"), request, 2, lambda done, name: None)
    with localllm.open(tmp_path / "model.gguf", backend="reference", kv_type="f32") as model:
        logits = model.logits(TEXT)[-1]
    np.testing.assert_allclose(logits[:251:50], facts(variant)["logits"], atol=5e-5 if recipe == "COPY" else 0.1)


def test_mxfp4_blocks_are_copied(tmp_path: Path):
    request = QuantizeRequest(find_recipe("MXFP4"))
    plan = make_plan(open_source(str(written(tmp_path, "gpt-oss-mxfp4"))), request)
    assert {job.format.name for job in plan.jobs if "_exps.weight" in job.tensor.name} == {"MXFP4"}
    assert all(job.is_copied for job in plan.jobs if "_exps" in job.tensor.name)


def test_image_tensors_are_left_out_with_a_warning(tmp_path: Path):
    (warning,) = open_folder(written(tmp_path, "gemma3-vision")).warnings
    assert "34 tensors of the vision encoder are omitted" in warning and warning.endswith(
        "use quantize --mmproj to convert the projector"
    )


def test_qwen2vl_is_converted_as_published(tmp_path: Path):
    """Read a flat config.json, with vision_config beside the text model's keys, and the newest tensor names."""
    config, shapes = facts("qwen2vl")["config"], shapes_of("qwen2vl")
    old = {key: value for key, value in config["text_config"].items() if key not in ("rope_parameters", "rms_norm_eps")}
    old |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "model_type": "qwen2_vl"}
    old |= {key: config[key] for key in ("architectures", "vision_config")}
    names = {name: name.replace("model.", "model.language_model.", 1) for name in shapes if name[:6] == "model."}
    names |= {name: f"model.{name}" for name in shapes if name.startswith("visual.")}
    renamed = {names.get(name, name): shape for name, shape in shapes.items()}
    checkpoint = open_folder(write_family(tmp_path, old, renamed))
    theirs, ours = told(facts("qwen2vl")["metadata"]), told(checkpoint.metadata)
    theirs["qwen2vl.attention.layer_norm_rms_epsilon"] = 1e-5
    assert {key: ours.get(key) for key in theirs} == theirs
    assert {re.sub(r"^blk\.\d+\.", "blk.", t.name) for t in checkpoint.tensors} == facts("qwen2vl")["tensors"].keys()


@pytest.mark.parametrize(
    ("variant", "kind", "image"),
    [
        ("qwen35", "Qwen3_5", "model.visual.pos_embed.weight"),
        ("qwen35_moe", "Qwen3_5Moe", "model.visual.pos_embed.weight"),
        ("gemma3n", "Gemma3n", "model.vision_tower.timm_model.conv_stem.conv.weight"),
        ("gemma4", "Gemma4", "model.vision_tower.patch_embedder.input_proj.weight"),
        ("llama4", "Llama4", "vision_model.class_embedding"),
        ("exaone4", "Exaone4_5_", "model.visual.merger.ln_q.weight"),
        ("gemma4", "Gemma4Unified", "model.vision_tower.patch_embedder.input_proj.weight"),
        ("qwen35", "MiniCPMV4_6", "model.vision_tower.post_layernorm.weight"),
        ("qwen2", "Qwen2Audio", "multi_modal_projector.linear.weight"),
        ("qwen2", "AudioFlamingo3", "multi_modal_projector.linear_1.weight"),
        ("llama", "Voxtral", "multi_modal_projector.linear_1.weight"),
    ],
)
def test_multimodal_checkpoints_convert_to_their_text_models(tmp_path: Path, variant: str, kind: str, image: str):
    """Read a nested config.json and other tensor names; ignore the image tensors."""
    config, shapes = facts(variant)["config"], shapes_of(variant)
    seeing = {"architectures": [f"{kind}ForConditionalGeneration"], "text_config": config, "model_type": "x"}
    names = {name: name.replace("model.", "model.language_model.", 1) for name in shapes if name[:6] == "model."}
    renamed = {names.get(name, name): shape for name, shape in shapes.items()} | {image: [4, 4]}
    text, whole = (open_folder(write_family(tmp_path / name, c, s)) for name, c, s in
                   (("text", config, shapes), ("whole", seeing, renamed)))  # fmt: skip
    assert told(whole.metadata) == told(text.metadata) | {"general.name": whole.metadata["general.name"]}
    assert [(t.name, t.shape) for t in whole.tensors] == [(t.name, t.shape) for t in text.tensors]
    assert "1 tensors of the vision encoder are omitted" in whole.warnings[0] and not text.warnings


def test_smolvlm2_without_head_count_has_32_heads(tmp_path: Path):
    """Assume transformers' default for Llama."""
    content = facts("smolvlm")["config"]
    config_values = {key: value for key, value in (content | content["text_config"]).items() if "heads" not in key}
    config = CheckpointConfig(
        config_values | {"text_config": {"head_dim": 2}, "architectures": content["architectures"]}, tmp_path
    )
    assert find_family(config).read(config.merge_text_config(find_family(config).defaults)).sizes["heads"] == 32


@pytest.mark.parametrize("sections", [None, [2, 3], [2, 3, 4], [2, 3, True], "2 3 3"])
def test_mrope_sections_that_do_not_fit_are_refused(tmp_path: Path, sections: Any):
    folder = written(tmp_path, "qwen2vl")
    text = facts("qwen2vl")["config"]["text_config"]
    rope = text["rope_parameters"] | {"mrope_section": sections}
    edit_json(folder / "config.json", text_config=text | {"rope_parameters": rope})
    assert "mrope_section" in refused(folder)


def test_sparsity_of_gemma3n_becomes_deviations(tmp_path: Path):
    """Compare with the values that torch computes."""
    folder = written(tmp_path, "gemma3n")
    edit_json(folder / "config.json", activation_sparsity_pattern=[0.95, 0.95, 0.5, 0.0, 0.0])
    scales = open_folder(folder).metadata["gemma3n.activation_sparsity_scale"]
    assert scales == [1.6448535919189453, 1.6448535919189453, 0.0, -np.inf, -np.inf]


def test_tokens_without_embeddings_by_layer_get_zeros(tmp_path: Path):
    shapes = shapes_of("gemma3n") | {"model.embed_tokens_per_layer.weight": [260, 80]}
    folder = write_family(tmp_path, facts("gemma3n")["config"] | {"vocab_size_per_layer_input": 260}, shapes)
    (table,) = (tensor for tensor in open_folder(folder).tensors if tensor.name == "per_layer_token_embd.weight")
    assert table.shape == (268, 80)
    stored = random_tensor("model.embed_tokens_per_layer.weight", (260, 80))[1]
    for first, last in ((0, 268), (250, 265), (262, 268)):
        rows = table.read_rows(first, last).view(np.float32)
        np.testing.assert_array_equal(rows, np.concatenate([stored, np.zeros((8, 80), np.float32)])[first:last])


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4", "gemma4_large"])
def test_keys_of_layers_that_share_others_are_kept(tmp_path: Path, variant: str):
    """Keep them because publishers store them, although nothing reads them."""
    shapes = shapes_of(variant)
    last = max(number for number in range(9) if f"model.layers.{number}.input_layernorm.weight" in shapes)
    dim = 32 if variant == "gemma4" else 16
    unread = {"k_proj": [2 * dim, 64], "v_proj": [2 * dim, 64], "k_norm": [dim]}
    names = {f"model.layers.{last}.self_attn.{name}.weight": shape for name, shape in unread.items()}
    folder = write_family(tmp_path / "model", facts(variant)["config"], {**names, **shapes})
    if variant == "gemma4_large":  # whose last layer's keys are its values
        assert "v_proj.weight is not part of" in refused(folder)
        return
    names_found = {tensor.name for tensor in open_folder(folder).tensors}
    assert {f"blk.{last}.attn_{name}.weight" for name in ("k", "v", "k_norm")} <= names_found
    path = write_gguf(tmp_path / "model.gguf", open_folder(folder))
    with localllm.open(path, backend="reference", kv_type="f32") as model:
        np.testing.assert_allclose(model.logits(TEXT)[-1][:251:50], facts(variant)["logits"], atol=5e-5)


@pytest.mark.sampled
def test_the_mtp_layer_of_qwen_3_5_is_converted(tmp_path: Path):
    folder = written(tmp_path / "model", "qwen35")
    checkpoint = open_folder(folder)
    assert checkpoint.metadata["qwen35.nextn_predict_layers"] == 1
    with localllm.open(write_gguf(tmp_path / "model.gguf", checkpoint), threads=1, cache=False) as model:
        answer = model.generate(TEXT, 12, speculate="mtp", temperature=0)
        assert "".join(answer) == "".join(model.generate(TEXT, 12, speculate="off", temperature=0))


def test_experts_stored_in_one_tensor_are_split(tmp_path: Path):
    """Split Qwen 3.5's tensor, in which the rows of gates come first."""
    shapes = shapes_of("qwen35_moe")
    apart = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        apart |= {f"{prefix}.gate_up_proj": [4, 64, 64], f"{prefix}.down_proj": [4, 64, 32]}
    folder = write_family(tmp_path, facts("qwen35_moe")["config"], apart)
    tensors = {tensor.name: tensor for tensor in open_folder(folder).tensors}
    both, down = (random_tensor(f"{prefix}.{name}", (4, 64, size))[1] for name, size in
                  (("gate_up_proj", 64), ("down_proj", 32)))  # fmt: skip
    for name, stored in (("gate", both[:, :32]), ("up", both[:, 32:]), ("down", down)):
        rows = tensors[f"blk.2.ffn_{name}_exps.weight"].read_rows(0, stored.shape[0] * stored.shape[1]).view(np.float32)
        np.testing.assert_array_equal(rows.reshape(stored.shape), stored)


def test_masks_of_old_gpt2_checkpoints_are_ignored(tmp_path: Path):
    written(tmp_path, "gpt2")
    tensors = [(name, *random_tensor(name, tuple(shape))) for name, shape in shapes_of("gpt2").items()]
    mask = ("h.1.attn.bias", "F32", np.ones((1, 1, 256, 256)))
    write_safetensors(tmp_path / "model.safetensors", [*tensors, mask])
    assert len(open_folder(tmp_path).tensors) == len(tensors)


# ---- refusals

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("query_pre_attn_scalar must be", "gemma2", {"query_pre_attn_scalar": 32}),
    ("attn_logit_softcapping must be a positive number (found 0)", "gemma2", {"attn_logit_softcapping": 0}),
    ("layer_types", "gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("hidden_activation must be", "gemma2", {"hidden_activation": "silu"}),
    ("use_bidirectional_attention must be", "gemma3", {"use_bidirectional_attention": True}),
    ("sliding_window_pattern must be", "gemma3-old", {"sliding_window_pattern": 3}),
    ("layer_types", "gemma3", {"layer_types": ["full_attention"] * 6}),
    ("text_config must be an object", "gemma3-vision", {"text_config": [1]}),
    ("rope_type must be one of default, longrope, su (found yarn", "phi3", {"rope_parameters": ROPE}),
    (
        "long_factor must be a list of 6",
        "phi3-longrope-old",
        {
            "partial_rotary_factor": 0.75,
            "rope_scaling": ROPE | {"type": "su", "rope_type": "su", "long_factor": [1.0] * 5},
        },
    ),
    ("partial_rotary_factor", "qwen2-yarn-old", {"partial_rotary_factor": 0.5}),
    ("(found longrope", "qwen3", {"rope_parameters": {"rope_type": "longrope"}}),
    ("no_rope_layers", "smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
    ("no_rope_layer_interval must be", "smollm3", {"no_rope_layer_interval": 2}),
    ("clip_qkv must be", "olmo2", {"clip_qkv": 8.0}),
    ("layer_types", "olmo3", {"layer_types": ["full_attention"] * 4}),
    ("use_bias must be", "starcoder2", {"use_bias": False}),
    ("hidden_act must be", "starcoder2", {"hidden_act": "silu"}),
    ("divisible by n_head 3", "gpt2", {"n_head": 3}),
    ("scale_attn_by_inverse_layer_idx", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("activation_function must be", "gpt2", {"activation_function": "relu"}),
    ("the tensor for blk.0.attn_q.bias", "llama", {"architectures": ["Qwen2ForCausalLM"]}),
    ("num_experts_per_tok 5 must be at most", "mixtral", {"num_experts_per_tok": 5}),
    ("num_local_experts must be an integer", "mixtral", {"num_local_experts": None}),
    ("gate.weight: expected the shape [5, 64] by config.json, found [4, 64]", "mixtral", {"num_local_experts": 5}),
    ("norm_topk_prob must be", "qwen3moe", {"norm_topk_prob": False}),
    ("norm_topk_prob must be", "qwen3moe", {"norm_topk_prob": None}),
    ("norm_topk_prob must be", "qwen2moe", {"norm_topk_prob": True}),
    ("mlp_only_layers", "qwen3moe", {"mlp_only_layers": [0]}),
    ("swiglu_limit must be", "gpt-oss", {"swiglu_limit": 6.0}),
    ("multiples of the block size 32", "gpt-oss", {"intermediate_size": 48}),
    ("the weights are quantized (quip)", "gpt-oss", {"quantization_config": {"quant_method": "quip"}}),
    ("the weights are quantized (mxfp4)", "mixtral", {"quantization_config": {"quant_method": "mxfp4"}}),
    ("_blocks is not part", "gpt-oss-mxfp4", {"quantization_config": None}),
    ("mscale_all_dim must be", "deepseek2", {"rope_parameters": ROPE}),
    ("mscale must be", "deepseek2", {"rope_parameters": ROPE | {"mscale_all_dim": 1, "mscale": 2}}),
    ("rope_interleave must be", "deepseek3", {"rope_interleave": False}),
    ("scoring_func must be", "deepseek3", {"scoring_func": "tanh"}),
    ("kv_b_proj.weight: expected the shape [224, 32] by config.json, found [160, 32]", "deepseek2", {"v_head_dim": 32}),
    ("n_routed_experts must be an integer", "deepseek2", {"n_routed_experts": None}),
    ("twice the hidden_size", "mamba", {"intermediate_size": 64}),
    ("use_conv_bias must be", "mamba", {"use_conv_bias": False}),
    ("qk_layernorm must be", "phi", {"qk_layernorm": True}),
    ("hidden_act must be", "gptneox", {"hidden_act": "relu"}),
    ("alibi must be", "falcon", {"alibi": True}),
    ("parallel_attn must be", "falcon", {"parallel_attn": False}),
    ("rotary_pct must be", "cohere2", {"rotary_pct": 0.5}),
    ("layer_types", "cohere2", {"layer_types": ["full_attention"] * 4}),
    ("attention_bias must be", "cohere", {"attention_bias": True}),
    ("mlp_bias must be", "nemotron", {"mlp_bias": True}),
    ("apply_residual_connection_post_layernorm", "bloom", {"apply_residual_connection_post_layernorm": True}),
    ("alibi must be", "mpt", {"attn_config": {"alibi": False}}),
    ("layer_types", "exaone4", {"layer_types": ["chunked_attention"] * 4}),
    ("sliding_window_pattern must be", "exaone4", {"layer_types": None, "sliding_window_pattern": "LLX"}),
    ("head_dim must equal", "glm", {"head_dim": 32}),
    ("moe_topk must be the same", "hunyuan_moe", {"moe_topk": [1, 2]}),
    (
        "must have the factor 1",
        "hunyuan_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000, "factor": 2.0}},
    ),
    ("alpha must be", "hunyuan_dense", {"rope_parameters": {"rope_type": "dynamic"}}),
    ("moe_layer_end_index must be", "ernie4_5_moe", {"moe_layer_end_index": 1}),
    ("mup_enabled must be true", "afmoe", {"mup_enabled": False}),
    ("score_func must be", "afmoe", {"score_func": "softmax"}),
    ("attention_chunk_size must be", "llama4", {"attention_chunk_size": 16}),
    ("use_qk_norm must be", "llama4", {"use_qk_norm": False}),
    ("moe_layers", "llama4", {"moe_layers": [0, 2]}),
    ("dense layers before sparse", "glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    ("first_k_dense_replace must be", "glm4_moe_lite", {"first_k_dense_replace": 2}),
    ("routed_scaling_factor must be", "lfm2_moe", {"routed_scaling_factor": 2.0}),
    ("moe_normalize_expert_weights must be", "dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}),
    ("layer_types", "qwen3_next", {"layer_types": ["conv"] * 3}),
    ("a multiple of the 3 key heads", "qwen35", {"linear_num_key_heads": 3}),
    ("norm_topk_prob must be", "qwen35_moe", {"norm_topk_prob": False}),
    ("must be sigmoid", "qwen4_exp", {"output_gate_type": None}),
    ("indexer_kv_heads must be", "qwen4_exp", {"indexer_kv_heads": 2}),
    ("must name one layer only", "qwen4_exp", {"ple_layer_ids": [1, 2]}),
    ("must be a single token", "qwen4_exp", {"eos_token_id": [40, 41]}),
    ("in 7 shards", "qwen4_exp", {"split_ngram_parts": 7}),
    ("mrope_section", "qwen35", {"rope_parameters": {"partial_rotary_factor": 0.5, "mrope_section": [4, 4, 4]}}),
    ("attn_layer_indices", "bamba", {"attn_layer_indices": [3]}),
    ("mixer_rms_eps must be", "falcon_mamba", {"mixer_rms_eps": 1e-3}),
    ("first_k_dense_replace must be", "solar_open", {"first_k_dense_replace": 1}),
    ("mlp_bias must be", "jais2", {"mlp_bias": False}),
    ("scoring_func must be", "exaone_moe", {"scoring_func": "softmax"}),
    ("expected the shape [32, 64] by config.json, found [64, 64]", "hy_v3", {"num_shared_experts": 1}),
    ("model_type gpt2 is not supported", "llava", {"text_config": {"model_type": "gpt2"}}),
    (
        "head_dim must be the same for all layers",
        "gemma4",
        {"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
    ),
    ("num_experts must be an integer", "gemma4", {"enable_moe_block": True}),
    ("the last layer must have full attention", "gemma4", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("rope_type must be", "gemma4", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
    ("vocab_size_per_layer_input must be", "gemma4", {"vocab_size_per_layer_input": 99}),
    ("altup_num_inputs must be", "gemma3n", {"altup_num_inputs": 3}),
    ("num_kv_shared_layers must be below 5", "gemma3n", {"num_kv_shared_layers": 5}),
    ("intermediate_size must be the same", "gemma3n", {"intermediate_size": [96, 96, 96, 96, 64]}),
    ("activation_sparsity_pattern", "gemma3n", {"activation_sparsity_pattern": [0.5, 1.0, 0.5, 0.5, 0.5]}),
    ("mtp_num_hidden_layers must be", "qwen35", {"mtp_num_hidden_layers": 2}),
    ("layers_block_type", "nemotron_h", {"hybrid_override_pattern": "M-*X"}),
    ("num_hidden_layers must be", "nemotron_h", {"hybrid_override_pattern": "M-*"}),
    ("must include attention, Mamba 2", "nemotron_h", {"hybrid_override_pattern": "M-M-"}),
    ("must have experts, or none", "nemotron_h", {"hybrid_override_pattern": "M-*E"}),
    ("moe_latent_size must be", "nemotron_h_moe", {"moe_latent_size": 16}),
    ("n_group must be", "nemotron_h_moe", {"n_group": 2}),
    (
        "rope_theta must be",
        "mellum",
        {"rope_parameters": {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_theta": 1e4}}},
    ),
    ("norm_topk_prob must be", "mellum", {"norm_topk_prob": False}),
    ("in the usual layers only", "laguna", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    ("gating must be", "laguna", {"gating": "none"}),
    ("num_attention_heads_per_layer", "laguna", {"num_attention_heads_per_layer": [4, 4]}),
    *(
        ("num_attention_heads_per_layer", "laguna", {"num_attention_heads_per_layer": [2, 4, 4, odd]})
        for odd in (0, -4, True, 4.0, "4", 10**6)
    ),
    ("moe_router_logit_softcapping must be", "laguna", {"moe_router_logit_softcapping": 30.0}),
    ("hybrid_layer_pattern must be", "mimo_v2_flash", {"hybrid_layer_pattern": [1, 1]}),
    ("swa_head_dim must be", "mimo_v2_flash", {"swa_head_dim": 32}),
    ("add_full_attention_sink_bias must be", "mimo_v2_flash", {"add_full_attention_sink_bias": True}),
    ("shared_expert_combination_strategy must be", "cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
    ("prefix_dense_sliding_window_pattern must be", "cohere2_moe", {"prefix_dense_sliding_window_pattern": 4}),
    ("multi_query must be", "gpt_bigcode", {"multi_query": False}),
    ("n_inner must be", "gpt_bigcode", {"n_inner": 96}),
    ("layer_rope_theta must be", "granite_swa", {"layer_rope_theta": [1e4, 1e4, 1e4, 5e4]}),
    ("no_rope_layers must be", "granite_swa", {"no_rope_layers": [1, 2, 1, 1]}),
    ("num_key_value_heads must be", "hrm_text", {"num_key_value_heads": 2}),
    ("H_cycles must be", "hrm_text", {"H_cycles": 0}),
    ("num_expert_group must be", "kimi_linear", {"num_expert_group": 2}),
    ("q_lora_rank must be", "kimi_linear", {"q_lora_rank": 32}),
    ("full_attn_layers must be", "kimi_linear", {"linear_attn_config": {"full_attn_layers": [0]}}),
    ("kda_layers must be", "kimi_linear", {"linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1]}}),
    ("scale_depth must be", "minicpm3", {"scale_depth": 1.2}),
    ("rope_theta must be", "minicpm3", {"rope_parameters": {"rope_theta": 5e4}}),
    ("rope_interleave must be", "youtu", {"rope_interleave": False}),
    ("indexer_types must be", "glm_moe_dsa", {"indexer_types": ["full", "none", "full", "full"]}),
    ("indexer_types must be", "glm_moe_dsa", {"indexer_types": ["full"]}),
    ("indexer_types must be", "glm_moe_dsa", {"indexer_types": "full"}),
    ("indexer_types must be", "hy_v4", {"indexer_types": ["full"]}),
    ("indexer_types must be", "hy_v4", {"indexer_types": "full"}),
    ("indexer_types must be", "hy_v4", {"indexer_types": ["full", "none", "full", "full"]}),
    ("the first layer must have an indexer", "hy_v4", {"indexer_types": ["shared", "full", "full", "full"]}),
    ("n_group must be", "hy_v4", {"n_group": 2}),
    ("hidden_act must be", "bitnet", {"hidden_act": "relu2"}),
    ("num_experts_per_tok must be", "phimoe", {"num_experts_per_tok": 1}),
    ("lm_head_bias must be", "phimoe", {"lm_head_bias": None}),
    (
        "rotary_dim 6",
        "minimax_m3",
        {"text_config": {**VARIANTS["minimax_m3"]["config"]["text_config"], "rotary_dim": 6}},
    ),
    (
        "moe_layer_freq must be 0 in the first layers only",
        "minimax_m3",
        {"text_config": {**VARIANTS["minimax_m3"]["config"]["text_config"], "moe_layer_freq": [0, 1, 0]}},
    ),
    (
        "qk_rope_head_dim must be",
        "glm5_next",
        {"text_config": {**VARIANTS["glm5_next"]["config"]["text_config"], "qk_rope_head_dim": 8}},
    ),
    (
        "indexer_types must be",
        "glm5_next",
        {"text_config": {**VARIANTS["glm5_next"]["config"]["text_config"], "indexer_types": None}},
    ),
    (
        "post_norm_eps must be",
        "muse_glimmer",
        {"text_config": {**VARIANTS["muse_glimmer"]["config"]["text_config"], "post_norm_eps": 1e-5}},
    ),
    ("include_bias must be", "llada", {"include_bias": True}),
    ("sliding_window_layout", "smallthinker", {"sliding_window_layout": [1, 1, 1, 1, 0]}),
    ("rope_layout", "smallthinker", {"rope_layout": [1] * 5}),
    ("hidden_activation must be", "modern-bert", {"hidden_activation": "relu"}),
    ("sliding_window_size must be", "smallthinker", {"sliding_window_size": 512}),
    ("moe_layer_frequency must be", "arctic", {"moe_layer_frequency": 2}),
    ("position_embedding_type must be", "codeshell", {"position_embedding_type": "alibi"}),
    ("multi_query must be", "refact", {"multi_query": False}),
    ("norm_topk_prob must be", "llada_moe", {"norm_topk_prob": True}),
    ("bias must be", "internlm2", {"bias": True}),
    ("rope_theta must be", "orion", {"rope_theta": 5e4}),
    ("norm_topk_prob must be", "deepseek", {"norm_topk_prob": True}),
    ("norm_head must be", "bailingmoe", {"norm_head": True}),
    ("use_qk_norm must be", "bailingmoe2", {"use_qk_norm": False}),
    ("score_function must be", "bailingmoe2", {"score_function": "tanh"}),
    ("attn_type_list", "minimax01", {"attn_type_list": [1] * 8}),
    ("layernorm_mlp_alpha must be", "minimax01", {"layernorm_mlp_alpha": 2.0}),
    ("q_lora_rank must be", "plm", {"q_lora_rank": 32}),
    ("num_loops must be", "nanbeige", {"num_loops": 0}),
    ("activation_function must be", "exaone", {"activation_function": "gelu"}),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("problem", "variant", "changes"), REFUSED, ids=[f"{n}-{r[1]}" for n, r in enumerate(REFUSED)])
def test_configs_that_gguf_cannot_represent_are_refused(
    tmp_path: Path, problem: str, variant: str, changes: dict[str, Any]
):
    written(tmp_path, variant)
    edit_json(tmp_path / "config.json", **changes)
    assert problem in refused(tmp_path)


def test_a_null_value_is_not_the_default(tmp_path: Path):
    write_json(
        written(tmp_path, "gemma2") / "config.json", facts("gemma2")["config"] | {"final_logit_softcapping": None}
    )
    assert "final_logit_softcapping must be a positive number (found missing)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("variant", "name", "problem"),
    [
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
            "expected 4 tensors for the experts of blk.1",
        ),
        (
            "gpt-oss-mxfp4",
            "model.layers.1.mlp.experts.gate_up_proj_scales",
            "the tensor for blk.1.ffn_gate_exps.weight",
        ),
        ("gpt-oss", "model.layers.0.self_attn.sinks", "the tensor for blk.0.attn_sinks.weight"),
        ("deepseek3", "model.layers.1.mlp.gate.e_score_correction_bias", "the tensor for blk.1.exp_probs_b.bias"),
        ("starcoder2", "model.norm.bias", "the tensor for output_norm.bias"),
        ("gpt2", "wpe.weight", "the tensor for position_embd.weight"),
        ("mamba", "backbone.layers.0.mixer.A_log", "the tensor for blk.0.ssm_a"),
        ("apertus", "model.layers.1.mlp.act_fn.beta", "beta of the activation of layer 1 is missing"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, variant: str, name: str, problem: str):
    shapes = shapes_of(variant)
    del shapes[name]
    write_family(tmp_path, facts(variant)["config"], shapes)
    assert problem in refused(tmp_path)


@pytest.mark.parametrize(
    ("variant", "name", "problem"),
    [
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.4.w2.weight",
            "expected 4 tensors for the experts of blk.1",
        ),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.w2.weight", "tensors for the experts of blk.1"),
        ("mixtral", "model.layers.1.mlp.gate_proj.weight", "is not part of"),
        ("qwen3", "model.layers.1.self_attn.sinks", "is not part of"),
        ("deepseek3", "model.layers.3.eh_proj.weight", "is not part of"),
        ("llama", "vision_tower.patch.weight", "is not part of"),
        ("mamba", "backbone.layers.2.mixer.D", "is not part of"),
        ("apertus", "model.layers.0.mlp.act_fn.eps", "eps of the activation of layer 0 is missing"),  # of this shape
    ],
)
def test_an_unknown_tensor_is_named(tmp_path: Path, variant: str, name: str, problem: str):
    write_family(tmp_path, facts(variant)["config"], shapes_of(variant) | {name: [64, 96]})
    assert problem in refused(tmp_path)


def test_byte_tensors_of_another_type_are_refused(tmp_path: Path):
    written(tmp_path, "gpt-oss-mxfp4")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors = [(other, *random_tensor(other, tuple(shape))) for other, shape in shapes_of("gpt-oss-mxfp4").items()]
    others = [tensor for tensor in tensors if tensor[0] != name]
    write_safetensors(tmp_path / "model.safetensors", [*others, (name, "F32", np.zeros((4, 64, 3)))])
    assert "down_proj_scales: the type must be U8 (found F32" in refused(tmp_path)
