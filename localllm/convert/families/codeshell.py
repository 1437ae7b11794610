"""CodeShell and Refact."""

from collections.abc import Sequence

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Family, Layer, Sizes
from localllm.convert.hyperparameters import GELU, CheckpointFacts, decoder, refuse_other_activations
from localllm.convert.layers import ATTENTION, GATED, NORMS_BEFORE, as_stored
from localllm.convert.tensors import Shape, TensorSource, take_strided


def early(config: Config, hidden: int, groups: int) -> CheckpointFacts:
    """Read configurations with GPT-2's keys."""
    config.only("scale_attn_weights", True)
    renamed = {"hidden_size": config.count("n_embd"), "num_attention_heads": config.count("n_head"), "head_dim": None}
    renamed |= {"num_hidden_layers": config.count("n_layer", maximum=MOST_LAYERS), "num_key_value_heads": groups}
    renamed |= {"max_position_embeddings": config.count("n_positions"), "intermediate_size": hidden}
    return decoder(config.updated(**renamed), activations=(*GELU, "silu"))


def codeshell(config: Config) -> CheckpointFacts:
    """Read CodeShell: RoPE, and biases."""
    refuse_other_activations(config, GELU)
    config.only("position_embedding_type", "rope")
    config.only("group_query_attention", True)
    width = config.count("n_embd")
    config.only("n_inner", 4 * width)
    h = early(config, 4 * width, config.count("num_query_groups"))
    return h.updated(
        {"fused_rows": h.sizes["queries"] + 2 * h.sizes["keys"]},
        attention__layer_norm_rms_epsilon=None,
        attention__layer_norm_epsilon=config.number("layer_norm_epsilon", 1e-5),
        rope__scaling__type="linear",
        rope__scaling__factor=1.0,
    )


NORMS = ("attn_norm", "ffn_norm", "output_norm")


FUSED: Layer = {"attn_qkv": ("fused_rows", "width"), "attn_output": ("width", "queries")}


PLAIN: Layer = {"ffn_up": ("hidden", "width"), "ffn_down": ("width", "hidden")}


CODESHELL = Family("codeshell", {**FUSED, **PLAIN, **NORMS_BEFORE}, codeshell, biased=(*NORMS, *FUSED, *PLAIN))


def refact(config: Config) -> CheckpointFacts:
    """Read Refact: ALiBi, a single key head."""
    refuse_other_activations(config, ("silu",))
    config.only("multi_query", True)
    hidden = -(-int(8 * config.count("n_embd") / 3) // 256) * 256  # as in its code, whatever n_inner is
    h = early(config.updated(rms_norm_eps=config.number("layer_norm_epsilon", 1e-5)), hidden, 1)
    sizes = {"both_keys": 2 * h.sizes["head_dim"], "both_hidden": 2 * hidden}
    return h.updated(sizes, rope__freq_base=None)


def half(name: str, number: int, both: str, *dimensions: str) -> DerivedTensor:
    """Take one of two matrices, stored one below the other."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, 2 * shape[0], number * shape[0])

    return DerivedTensor(dimensions, {f"{name}.weight": (both, "width")}, build)


REFACT = Family(
    "refact",
    {
        **NORMS_BEFORE,
        "attn_q": as_stored("attn.q", *ATTENTION["attn_q"]),
        "attn_k": half("attn.kv", 0, "both_keys", "keys", "width"),
        "attn_v": half("attn.kv", 1, "both_keys", "keys", "width"),
        "attn_output": ATTENTION["attn_output"],
        "ffn_gate": half("mlp.gate_up_proj", 0, "both_hidden", "hidden", "width"),
        "ffn_up": half("mlp.gate_up_proj", 1, "both_hidden", "hidden", "width"),
        "ffn_down": GATED["ffn_down"],
    },
    refact,
)
