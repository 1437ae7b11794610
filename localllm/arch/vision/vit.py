"""The vision transformer that most encoders share (Dosovitskiy et al. 2020, arXiv 2010.11929).

Patches are tokens with full attention; layers have pre-norms, and all matrices have biases.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localllm.arch.family import Activation, AttentionScores, Builder, PagedState, Weight, Weights
from localllm.arch.vision.hyperparameters import VisionHyperparameters
from localllm.errors import ModelError
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME

Rotate = Callable[[Activation], Activation]
QUICK = 1.702  # x * sigmoid(1.702 x) is near GELU (Hendrycks and Gimpel 2016)


def embed_patches(b: Builder, w: Weights, h: VisionHyperparameters, x: Activation) -> Activation:
    """Embed patches; the file's convolution has no overlap, so it is a matrix product."""
    return b.linear(x, to_matrix(w.patch_embd, h.pixels))


def to_matrix(weight: Weight, columns: int) -> Weight:
    """Return the weights of a convolution [rows, colours, patch, patch] as a matrix. Raises ModelError."""
    tensor = weight.tensor
    if len(tensor.shape) < 2 or int(np.prod(tensor.shape[1:])) != columns:
        raise ModelError(
            f"tensor {tensor.name} must have rows of length {columns} (found the shape {list(tensor.shape)})"
        )
    data = tensor.data.reshape(tensor.shape[0], -1)
    return replace(weight, tensor=replace(tensor, shape=(tensor.shape[0], columns), data=data))


def transpose(weight: Weight) -> Weight:
    """Transpose a matrix. Raises ModelError for a quantized one."""
    kinds = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
    kind = kinds.get(weight.tensor.format.name)
    if kind is None or len(weight.shape) != 2:
        raise ModelError(f"tensor {weight.name} must be a matrix of F32, F16 or BF16")
    data = np.ascontiguousarray(weight.tensor.data.view(kind).T).view(np.uint8)
    return replace(weight, tensor=replace(weight.tensor, shape=weight.shape[::-1], data=data))


def make_table(name: str, numbers: np.ndarray) -> Weight:
    """Wrap an array [rows, columns] as an F32 tensor of that name."""
    data = np.ascontiguousarray(numbers, np.float32)
    return Weight(Tensor(name, BY_NAME["F32"], data.shape, data.view(np.uint8)))


def to_array(weight: Weight) -> np.ndarray:
    """Return the values of an unquantized vector or matrix, float32 of its shape. Raises ModelError."""
    return weight.flatten().read_vector().reshape(weight.shape)


def apply_siglip(b: Builder, w: Weights, h: VisionHyperparameters, x: Activation) -> Activation:
    """Apply SigLIP (Zhai et al. 2023, arXiv 2303.15343): learned positions, all layers, and a final norm."""
    v = w.get_submodel("v.")
    x = b.add(embed_patches(b, v, h, x), b.embed_positions(v.position_embd, b.positions))
    return b.layer_norm(apply_transformer(b, v, h, x, h.layers), v.post_ln, h.epsilon)


def apply_transformer(
    b: Builder, w: Weights, h: VisionHyperparameters, x: Activation, layers: int, rotate: Rotate | None = None
) -> Activation:
    """Apply the first `layers` layers.

    rotate: applies RoPE to queries and keys.
    """
    for state in h.list_states()[:layers]:
        x = block(b, w.get_layer(state.layer), h, state, x, rotate)
    return x


def block(
    b: Builder, w: Weights, h: VisionHyperparameters, state: PagedState, x: Activation, rotate: Rotate | None
) -> Activation:
    y = apply_norm(b, h, x, w.ln1)
    q, k, v = (b.linear(y, part) for part in split_qkv(w, h))
    q, k = (
        apply_norm(b, h, x, norm) if (norm := w.get(name)) else x
        for name, x in (("attn_q_norm", q), ("attn_k_norm", k))
    )
    q, k = (rotate(q), rotate(k)) if rotate else (q, k)
    scores = AttentionScores(h.heads, h.head_dim**-0.5, lookahead=h.lookahead, windowed=h.is_windowed(state.layer))
    attended = b.attend(q, k, v, state, scores)
    x = b.add(x, apply_layer_scale(b, b.linear(attended, w.attn_out), w.get("ls1")))
    return b.add(x, apply_layer_scale(b, apply_feed_forward(b, w, h, apply_norm(b, h, x, w.ln2)), w.get("ls2")))


def apply_layer_scale(b: Builder, x: Activation, scales: Weight | None) -> Activation:
    """Apply LayerScale, one factor per column, if the file has it (Touvron et al. 2021, arXiv 2103.17239)."""
    return b.scale_columns(x, scales) if scales else x


def apply_norm(b: Builder, h: VisionHyperparameters, x: Activation, weight: Weight) -> Activation:
    """Apply the encoder's norm, RMSNorm or LayerNorm."""
    return (b.rms_norm if h.uses_rms_norm else b.layer_norm)(x, weight, h.epsilon)


def split_qkv(w: Weights, h: VisionHyperparameters) -> list[Weight]:
    """Return the matrices of queries, keys and values, which the file has separately or fused."""
    fused = w.get("attn_qkv")
    return fused.split(h.width, h.width, h.width) if fused else [w.attn_q, w.attn_k, w.attn_v]


def apply_feed_forward(b: Builder, w: Weights, h: VisionHyperparameters, x: Activation) -> Activation:
    """Apply the feed-forward network, gated if the file has a gate.

    Older files have `up` and `down` exchanged.
    """
    up, down = w.ffn_up, w.ffn_down
    if up.shape[-1] != h.width:
        up, down = down, up
    gate, y = w.get("ffn_gate"), b.linear(x, up)
    if gate is None:
        return b.linear(apply_activation(b, h, y), down)
    if h.activation == "gelu_quick":
        raise ModelError(f"tensor {gate.name}: a gate needs an activation, clip.use_gelu or clip.use_silu")
    return b.linear((b.swiglu if h.activation == "silu" else b.geglu)(b.linear(x, gate), y), down)


def apply_activation(b: Builder, h: VisionHyperparameters, x: Activation) -> Activation:
    """Apply the activation between the two matrices."""
    if h.activation == "gelu":
        return b.gelu_erf(x) if h.exact else b.gelu(x)
    return b.multiply(x, b.sigmoid(b.scale(x, QUICK) if h.activation == "gelu_quick" else x))
