"""Shapes of models with recurrent layers, for make_synthetic.py: their hyperparameters, and the sizes of their tensors.

A size is (rows, columns), with 0 rows for a vector. Names that end in .weight, .bias or ssm_a and ssm_d are whole.
"""

from typing import Any, NamedTuple

Sizes = dict[str, tuple[int, int]]
ALWAYS_F32 = ("ssm_conv1d.weight", "shortconv.conv.weight")  # matrices that llama-quantize leaves as they are


def feed_forward(width: int, hidden: int) -> Sizes:
    up = {f"{name}.weight": (hidden, width) for name in ("ffn_gate", "ffn_up")}
    return {**up, "ffn_down.weight": (width, hidden)}


class Mamba2(NamedTuple):
    """A Mamba 2 with one group."""

    layers: int
    width: int
    heads: int
    state: int
    vocabulary: int
    context: int
    tied: bool = True
    arch: str = "mamba2"
    kv_heads: int = 1

    def hyperparameters(self) -> dict[str, Any]:
        numbers = {"conv_kernel": 4, "inner_size": 2 * self.width, "state_size": self.state}
        numbers |= {"time_step_rank": self.heads, "group_count": 1}
        return {"feed_forward_length": 0, **{f"ssm.{name}": value for name, value in numbers.items()}}

    def of_layer(self, layer: int) -> Sizes:
        inner = 2 * self.width
        columns = inner + 2 * self.state
        matrices = {"ssm_in.weight": (inner + columns + self.heads, self.width), "ssm_out.weight": (self.width, inner)}
        vectors = {"attn_norm.weight": self.width, "ssm_conv1d.bias": columns, "ssm_dt.bias": self.heads}
        small = {"ssm_conv1d.weight": (columns, 4), "ssm_a": (self.heads, 1), "ssm_d": (self.heads, 1)}
        small["ssm_norm.weight"] = (1, inner)
        return {**matrices, **small, **{name: (0, columns) for name, columns in vectors.items()}}


class Qwen35(NamedTuple):
    """A Qwen 3.5, every fourth layer of which attends."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    delta_heads: int
    key_heads: int
    state: int
    vocabulary: int
    context: int
    tied: bool = True
    arch: str = "qwen35"

    def hyperparameters(self) -> dict[str, Any]:
        numbers = {"conv_kernel": 4, "inner_size": self.delta_heads * self.state, "state_size": self.state}
        numbers |= {"time_step_rank": self.delta_heads, "group_count": self.key_heads}
        rope = {"rope.dimension_count": self.head_dim // 4, "rope.dimension_sections": [11, 11, 10, 0]}
        attention = {"attention.head_count": self.heads, "attention.head_count_kv": self.kv_heads}
        attention |= {"attention.key_length": self.head_dim, "attention.value_length": self.head_dim}
        shared = {"feed_forward_length": self.feed_forward, "rope.freq_base": 1e7, "full_attention_interval": 4}
        return {**shared, **rope, **attention, **{f"ssm.{name}": value for name, value in numbers.items()}}

    def of_layer(self, layer: int) -> Sizes:
        norms = {name: (0, self.width) for name in ("attn_norm.weight", "post_attention_norm.weight")}
        mix = self._attention() if layer % 4 == 3 else self._delta_net()
        return {**norms, **mix, **feed_forward(self.width, self.feed_forward)}

    def _attention(self) -> Sizes:
        kv_width, inner = self.kv_heads * self.head_dim, self.heads * self.head_dim
        norms = {name: (0, self.head_dim) for name in ("attn_q_norm.weight", "attn_k_norm.weight")}
        matrices = {"attn_k.weight": (kv_width, self.width), "attn_v.weight": (kv_width, self.width)}
        matrices |= {"attn_q.weight": (2 * inner, self.width), "attn_output.weight": (self.width, inner)}
        return {**norms, **matrices}

    def _delta_net(self) -> Sizes:
        inner, heads = self.delta_heads * self.state, self.delta_heads
        columns = inner + 2 * self.key_heads * self.state
        matrices = {"attn_qkv.weight": (columns, self.width), "attn_gate.weight": (inner, self.width)}
        matrices |= {"ssm_beta.weight": (heads, self.width), "ssm_alpha.weight": (heads, self.width)}
        matrices |= {"ssm_conv1d.weight": (columns, 4), "ssm_out.weight": (self.width, inner)}
        return {**matrices, "ssm_dt.bias": (0, heads), "ssm_a": (0, heads), "ssm_norm.weight": (0, self.state)}


class Lfm2(NamedTuple):
    """An LFM2; the layers `attending` attend."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    attending: tuple[int, ...]
    vocabulary: int
    context: int
    tied: bool = True
    arch: str = "lfm2"
    output_norm: str = "token_embd_norm"

    def hyperparameters(self) -> dict[str, Any]:
        kv_heads = [self.kv_heads if layer in self.attending else 0 for layer in range(self.layers)]
        attention = {"attention.head_count": self.heads, "attention.head_count_kv": kv_heads}
        shared = {"feed_forward_length": self.feed_forward, "rope.freq_base": 1e6, "shortconv.l_cache": 3}
        return {**shared, **attention}

    def of_layer(self, layer: int) -> Sizes:
        norms = {name: (0, self.width) for name in ("attn_norm.weight", "ffn_norm.weight")}
        mix = self._attention() if layer in self.attending else self._convolution()
        return {**norms, **mix, **feed_forward(self.width, self.feed_forward)}

    def _attention(self) -> Sizes:
        head_dim = self.width // self.heads
        norms = {name: (0, head_dim) for name in ("attn_q_norm.weight", "attn_k_norm.weight")}
        matrices = {f"attn_{name}.weight": (self.kv_heads * head_dim, self.width) for name in "kv"}
        return {**norms, **matrices, **{f"attn_{name}.weight": (self.width, self.width) for name in ("q", "output")}}

    def _convolution(self) -> Sizes:
        matrices = {
            "in_proj": (3 * self.width, self.width),
            "conv": (self.width, 3),
            "out_proj": (self.width, self.width),
        }
        return {f"shortconv.{name}.weight": size for name, size in matrices.items()}


RecurrentShape = Mamba2 | Qwen35 | Lfm2
SHAPES: dict[str, RecurrentShape] = {
    "mamba2-tiny": Mamba2(2, 256, 8, 64, 512, 2048),
    "qwen35-tiny": Qwen35(4, 256, 512, 4, 2, 128, 4, 2, 128, 512, 2048),
    "lfm2-tiny": Lfm2(3, 256, 512, 4, 2, (1,), 512, 2048),
    "mamba2-370m": Mamba2(48, 1024, 32, 128, 50288, 1 << 20),
    "mamba2-1.3b": Mamba2(48, 2048, 64, 128, 50288, 1 << 20),
    "qwen35-0.8b": Qwen35(24, 1024, 3584, 8, 2, 256, 16, 16, 128, 248320, 262144),
    "lfm2-1.2b": Lfm2(16, 2048, 8192, 32, 8, (2, 5, 8, 10, 12, 14), 65536, 128000),
}


def sizes_of(shape: RecurrentShape) -> Sizes:
    """All tensors, by their whole names."""
    sizes = {"token_embd.weight": (shape.vocabulary, shape.width)}
    for layer in range(shape.layers):
        sizes |= {f"blk.{layer}.{name}": size for name, size in shape.of_layer(layer).items()}
    sizes[f"{getattr(shape, 'output_norm', 'output_norm')}.weight"] = (0, shape.width)
    return sizes if shape.tied else {**sizes, "output.weight": (shape.vocabulary, shape.width)}
