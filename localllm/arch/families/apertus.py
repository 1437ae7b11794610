"""Apertus (Swiss AI Initiative 2025, arXiv 2509.14233).

Unlike llama: xIELU instead of a gate, with parameters in each layer; each head of queries and keys is normalized;
rotated pairs are half a head apart.
"""

import numpy as np

from localllm.arch.attention import (
    TransformerHyperparameters,
    attend,
    normalize_heads,
    project_qkv,
    select_rope_factors,
)
from localllm.arch.decoder import apply_decoder
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weight, Weights, frozen
from localllm.arch.feed_forward import apply_ungated_feed_forward
from localllm.files.gguf.metadata_reader import MetadataReader

NAMES = "alpha_p", "alpha_n", "beta", "eps"
MOST = 1e4  # of a parameter's magnitude


@frozen
class ApertusHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Apertus.

    Attributes:
        xielu: by layer, the arguments of xIELU: alpha_p, alpha_n, beta, epsilon.
    """

    xielu: tuple[tuple[float, float, float, float], ...]


def read(fields: HyperparameterReader) -> ApertusHyperparameters:
    shared = ApertusHyperparameters.read_shared_fields(fields, interleaved=False)
    of_xielu = MetadataReader(fields.metadata, "xielu.", fields.path)
    alpha_p, alpha_n, beta, epsilon = (read_per_layer(of_xielu, name, shared["layers"]) for name in NAMES)
    alpha_p, alpha_n = np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n)
    xielu = np.stack((alpha_p, alpha_n, beta, epsilon), axis=1).tolist()
    return ApertusHyperparameters(**shared, xielu=tuple(tuple(of_layer) for of_layer in xielu))


def read_per_layer(fields: MetadataReader, name: str, layers: int) -> np.ndarray:
    """Read one number per layer; a single one applies to all. Raises ModelError."""
    value = fields.read_raw(name)
    numbers = np.full(layers, value) if isinstance(value, float) else value
    if (
        not isinstance(numbers, np.ndarray)
        or numbers.dtype.kind != "f"
        or numbers.shape != (layers,)
        or not (np.abs(numbers) <= MOST).all()
    ):
        raise fields.make_value_error(name, f"{layers} numbers from {-MOST:g} to {MOST:g}")
    return numbers.astype(np.float64)


def forward(b: Builder, w: Weights, h: ApertusHyperparameters) -> Activation:
    w.require("output")
    return apply_decoder(b, w, h, block, factors=select_rope_factors(b, w, h))


def block(
    b: Builder, w: Weights, h: ApertusHyperparameters, state: PagedState, x: Activation, factors: Weight | None
) -> Activation:
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v, factors), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    return b.add(x, apply_ungated_feed_forward(b, w, y, lambda z: b.xielu(z, *h.xielu[state.layer])))


CHECKPOINTS = {
    "ApertusForCausalLM": {
        "layer": "attention head_norms feed_forward norms",
        "unread": r"model\.layers\.[0-9]+\.mlp\.act_fn\.(alpha_p|alpha_n|beta|eps)", "activations": "xielu",
        "scalings": "linear yarn llama3", "only": {"attention_bias": False},
        "amounts": {"vocab_size": "vocab", "rope.dimension_count": "head_dim"}, "read": "@llama.read_apertus",
        "of_tensors": "@llama.read_xielu",
        "defaults": {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6},
    },
}  # fmt: skip
