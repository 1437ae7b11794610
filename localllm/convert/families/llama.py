"""Llama and models like it: Mistral, Mixtral, Granite, SmolLM 3, ERNIE 4.5, Seed-OSS, Arcee, MiniCPM, Pangu."""

from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families.experts import with_experts
from localllm.convert.families.layers import ATTENTION, EXPERTS, FEED_FORWARD, GATED, HEAD_NORMS, NORMS_BEFORE, ROTATED
from localllm.convert.family import DerivedTensor, Family
from localllm.convert.hyperparameters import PLAIN_SCALING, CheckpointFacts, decoder, warn_of_window
from localllm.convert.rope_scaling import BEYOND, rope_parameters
from localllm.convert.tensors import take_strided

LLAMA_SCALING = (*PLAIN_SCALING, "llama3")


def llama(config: Config, scalings: tuple[str, ...] = LLAMA_SCALING) -> CheckpointFacts:
    """Read Llama; its GGUF files have two keys that those of other architectures lack."""
    h = decoder(config, scalings=scalings)
    warn_of_window(config)
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


def internlm3(config: Config) -> CheckpointFacts:
    """Read InternLM 3, whose scaling begins beyond its context."""
    return llama(config, (*LLAMA_SCALING, BEYOND))


def mistral3(config: Config) -> CheckpointFacts:
    """Read the language model of Mistral Small 3; Ministral 3 adds YaRN and a temperature by position."""
    h = llama(config, ("bordered", "yarn"))
    if h.metadata.get("rope.scaling.type") != "yarn":
        return h
    rope = rope_parameters(config)
    rope.only("attention_factor")
    rope.only("mscale", 1)
    return h.updated(
        rope__scaling__attn_factor=None,
        rope__scaling__yarn_log_multiplier=rope.number("mscale_all_dim"),
        attention__temperature_scale=rope.number("llama_4_scaling_beta"),
    )


def mixtral(config: Config) -> CheckpointFacts:
    return with_experts(config, llama(config), "intermediate_size", "num_local_experts")


def smollm3(config: Config) -> CheckpointFacts:
    """Read SmolLM 3: GGUF's readers skip RoPE in every fourth layer."""
    h = llama(config)
    rotated = [int((number + 1) % 4 != 0) for number in range(h.sizes["layers"])]
    config.only("no_rope_layer_interval", 4)
    config.only("no_rope_layers", rotated)
    return h


def granite(config: Config) -> CheckpointFacts:
    """Read Granite: four scaling factors."""
    return llama(config).updated(
        attention__scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=config.number("logits_scaling", 1.0),
    )


def granitemoe(config: Config) -> CheckpointFacts:
    h = with_experts(config, granite(config), "intermediate_size", "num_local_experts")
    return h.updated({"both_hidden": 2 * h.sizes["expert_hidden"]})


LLAMA = Family("llama", {**ATTENTION, **GATED, **NORMS_BEFORE}, llama, rotated=ROTATED)
INTERNLM3 = replace(LLAMA, read=internlm3)
MISTRAL3 = replace(LLAMA, arch="mistral3", read=mistral3, sees=True)
IDEFICS3 = replace(LLAMA, sees=True, defaults={"num_attention_heads": 32})
MIXTRAL = replace(
    LLAMA,
    layer={**ATTENTION, **NORMS_BEFORE, **EXPERTS},
    read=mixtral,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
SMOLLM3 = replace(LLAMA, arch="smollm3", read=smollm3, defaults={"tie_word_embeddings": True, "rope_theta": 2e6})
GRANITE = replace(LLAMA, arch="granite", read=granite)
BOTH_HALVES = {"block_sparse_moe.input_linear.weight": ("experts", "both_hidden", "width")}
ONE_HALF = ("experts", "expert_hidden", "width")
GRANITEMOE = replace(
    GRANITE,
    arch="granitemoe",
    layer={
        **ATTENTION,
        **NORMS_BEFORE,
        **EXPERTS,
        "ffn_gate_exps": DerivedTensor(
            ONE_HALF, BOTH_HALVES, lambda s, shape, _: take_strided(s[0], shape, 2 * shape[-2], 0)
        ),
        "ffn_up_exps": DerivedTensor(
            ONE_HALF, BOTH_HALVES, lambda s, shape, _: take_strided(s[0], shape, 2 * shape[-2], shape[-2])
        ),
    },
    read=granitemoe,
)


QKV = ("attn_q", "attn_k", "attn_v")


NORMS_AROUND = {"attn_norm": ("width",), "post_attention_norm": ("width",)}


def ernie(config: Config) -> CheckpointFacts:
    config.only("use_bias", False)
    return decoder(config, scalings=LLAMA_SCALING)


ERNIE4_5 = Family(
    "ernie4_5",
    {**ATTENTION, **GATED, **NORMS_BEFORE},
    ernie,
    defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
)


def seed_oss(config: Config) -> CheckpointFacts:
    config.only("attention_bias", True)
    config.only("attention_out_bias", False)
    config.only("mlp_bias", False)
    return decoder(config, scalings=LLAMA_SCALING)


SEED_OSS = Family("seed_oss", {**ATTENTION, **GATED, **NORMS_AROUND}, seed_oss, biased=QKV)


def arcee(config: Config) -> CheckpointFacts:
    """Read Arcee: squared ReLU without gates."""
    h = decoder(config, activations=("relu2",), scalings=LLAMA_SCALING)
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"])


ARCEE = replace(
    LLAMA,
    arch="arcee",
    layer={**ATTENTION, **FEED_FORWARD, **NORMS_BEFORE},
    read=arcee,
    defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
)


def minicpm(config: Config) -> CheckpointFacts:
    """Read MiniCPM: factors of embeddings, residuals and logits; frequency factors for short and long contexts."""
    h = decoder(config, scalings=("longrope",))
    magnitude = h.metadata.get("rope.scaling.attn_factor")
    return h.updated(
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth") / h.sizes["layers"] ** 0.5,
        logit_scale=h.sizes["width"] / config.number("dim_model_base"),
        rope__scaling__type="longrope" if h.tensors else h.metadata.get("rope.scaling.type"),
        rope__scaling__attn_factor=None if magnitude == 1 else magnitude,
    )


MINICPM = replace(LLAMA, arch="minicpm", read=minicpm, defaults={"tie_word_embeddings": True})


def pangu(config: Config) -> CheckpointFacts:
    """Read Pangu: attention biases."""
    h = decoder(config)
    lengths: dict[str, object] = {f"attention__{side}_length": h.sizes["head_dim"] for side in ("key", "value")}
    return h.updated(vocab_size=h.sizes["vocab"], rope__dimension_count=h.sizes["head_dim"], **lengths)


PANGU = Family("pangu-embedded", {**ATTENTION, **GATED, **NORMS_BEFORE}, pangu, biased=tuple(ATTENTION))


def maincoder(config: Config) -> CheckpointFacts:
    """Read Maincoder: head norms."""
    h = decoder(config)
    return h.updated(rope__dimension_count=h.sizes["head_dim"] if config.get("head_dim") is not None else None)


MAINCODER = Family("maincoder", {**ATTENTION, **HEAD_NORMS, **GATED, **NORMS_BEFORE}, maincoder)


def nanbeige(config: Config) -> CheckpointFacts:
    """Read Nanbeige: the layers may run several times."""
    return llama(config).updated(
        num_loops=config.count("num_loops", 1), skip_loop_final_norm=config.flag("skip_loop_final_norm")
    )


NANBEIGE = replace(LLAMA, arch="nanbeige", read=nanbeige, named_as="llama")
