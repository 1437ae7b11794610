"""HRM-Text: two stacks of layers that alternate; the low-level one comes first in a GGUF file."""

import re
from collections.abc import Sequence

from localllm.arch.metadata import MOST_LAYERS
from localllm.convert.config import Config
from localllm.convert.family import DerivedTensor, Family, Sizes
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import as_it_is
from localllm.convert.tensors import Shape, TensorSource, take_strided

LAYER = re.compile(r"model\.([LH])_module\.layers\.([0-9]+)\.(.+)")


def hrm_text(config: Config) -> CheckpointFacts:
    """Read HRM-Text. A layer is counted once for each pass with keys and values of its own."""
    for name in ("attention_bias", "mlp_bias"):
        config.only(name, False)
    config.only("num_key_value_heads", config.get("num_attention_heads"))
    high, low = (config.count(f"{name}_cycles", maximum=MOST_LAYERS) for name in "HL")
    in_stack = config.count("num_layers_per_stack", config.get("num_hidden_layers"), maximum=MOST_LAYERS)
    h = decoder(config.updated(num_hidden_layers=in_stack))
    if config.flag("prefix_lm", True):
        config.warnings.append("prompts are read causally, although the model can read them bidirectionally")
    return h.updated(
        {"layers": 2 * in_stack, "all_queries": 4 * h.sizes["queries"], "both_hidden": 2 * h.sizes["hidden"]},
        block_count=in_stack * high * (low + 1),
        attention__head_count_kv=None,
        embedding_scale=config.number("embedding_scale", 1 / config.number("initializer_range", 0.02)),
        rope__dimension_count=h.sizes["head_dim"],
        hrm__layers_per_stack=in_stack,
        hrm__h_cycles=high,
        hrm__l_cycles=low,
        hrm__prefix_lm=config.flag("prefix_lm", True),
    )


def part(name: str, both: str, number: int, *dimensions: str) -> DerivedTensor:
    """Take one of several matrices that are stored below each other."""

    def build(sources: Sequence[TensorSource], shape: Shape, sizes: Sizes) -> TensorSource:
        return take_strided(sources[0], shape, sizes[both], number * shape[0])

    return DerivedTensor(dimensions, {f"{name}.weight": (both, "width")}, build)


def in_one_stack(name: str, layers: int) -> str:
    """Rename a tensor as if there were a single stack."""
    match = LAYER.fullmatch(name)
    if not match:
        return name
    return f"model.layers.{int(match[2]) + (layers // 2 if match[1] == 'H' else 0)}.{match[3]}"


QUERIES = ("queries", "width")
HRM_TEXT = Family(
    "hrm_text",
    {
        **{
            f"attn_{name}": part("attn.gqkv_proj", "all_queries", number, *QUERIES)
            for number, name in enumerate(("gate", "q", "k", "v"))
        },
        "attn_output": DerivedTensor(
            ("width", "queries"), {"attn.o_proj.weight": ("width", "queries")}, lambda s, *_: s[0]
        ),
        "ffn_gate": part("mlp.gate_up_proj", "both_hidden", 0, "hidden", "width"),
        "ffn_up": part("mlp.gate_up_proj", "both_hidden", 1, "hidden", "width"),
        "ffn_down": ("width", "hidden"),
    },
    hrm_text,
    whole={"hrm.z_l_init": as_it_is("model.z_L_init", "width")},
    last_norm="",
    named_as="llama",
    named=in_one_stack,
    defaults={"head_dim": 128},
)
