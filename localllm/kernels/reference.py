"""Every verb in plain NumPy, run at once: the oracle that the fast kernels are tested against, and the place to read
what a verb means. Activations are float32 [tokens, columns]."""

import numpy as np

from localllm.errors import ModelError


class Reference:
    """A builder whose verbs compute. One instance per model; `tokens`, `positions` and `outputs` are set per run."""

    def __init__(self, config, context: int, kv_type: str, interleaved_rope: bool, collect: bool = False):
        """collect: sum up in `squares` what the matrices meet: by name, float64 [columns]."""
        self.config, self.interleaved = config, interleaved_rope
        self.squares: dict[str, np.ndarray] | None = {} if collect else None
        self.keep = {"f32": np.float32, "f16": np.float16, "q8_0": rounded_to_q8_0}[kv_type]
        self.cache = np.zeros((config.layers, 2, config.kv_heads, context, config.head_dim), np.float32)
        self.tokens = self.positions = self.outputs = np.zeros(0, np.int64)
        self._matrices: dict[str, np.ndarray] = {}

    def matrix(self, weight) -> np.ndarray:
        """A weight in float32, whatever its format."""
        if weight.name not in self._matrices:
            self._matrices[weight.name] = dequantize(weight.tensor)
        return self._matrices[weight.name]

    def embed(self, weight):
        """The embedding rows of the tokens: [tokens, width]."""
        return self.matrix(weight)[self.tokens]

    def select(self, x):
        """The rows whose logits are wanted."""
        return x[self.outputs]

    def rms_norm(self, x, weight):
        """x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019)."""
        mean = np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True)
        return (x / np.sqrt(mean + self.config.epsilon)).astype(np.float32) * weight.vector()

    def linear(self, x, weight, cached=False):
        """x W^T + bias: [tokens, rows of W]. `cached`: goes to the KV cache, where all later tokens see its error."""
        matrix = self.matrix(weight)
        if x.shape[1] != matrix.shape[1]:
            raise ModelError(f"tensor {weight.name} should have {x.shape[1]} columns, has {matrix.shape[1]}")
        if self.squares is not None:
            self.squares[weight.name] = self.squares.get(weight.name, 0) + (x.astype(np.float64) ** 2).sum(axis=0)
        y = x @ matrix.T
        return y + weight.bias.vector() if weight.bias else y

    def rope(self, x, factors=None):
        """Rotate each head's pairs by position * frequency (Su et al. 2021)."""
        rope = self.config.rope
        frequencies = rope.frequencies(factors.vector() if factors else None)
        angles = self.positions[:, None, None] * frequencies
        cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
        y = x.reshape(len(x), -1, self.config.head_dim).copy()
        rotated = y[:, :, : rope.dims]
        half = rope.dims // 2
        first, second = (
            (np.s_[..., 0::2], np.s_[..., 1::2]) if self.interleaved else (np.s_[..., :half], np.s_[..., half:])
        )
        u, v = rotated[first].copy(), rotated[second].copy()
        rotated[first], rotated[second] = u * cos - v * sin, u * sin + v * cos
        return y.reshape(x.shape)

    def attend(self, q, k, v, layer):
        """Causal attention over the cache, into which k and v go first."""
        config = self.config
        for which, x in enumerate((k, v)):
            heads = x.reshape(len(x), config.kv_heads, config.head_dim).swapaxes(0, 1)
            self.cache[layer, which][:, self.positions] = self.keep(heads)
        length = self.positions[-1] + 1
        keys, values = self.cache[layer, :, :, :length]
        group = config.heads // config.kv_heads
        rows = q.reshape(len(q), config.kv_heads, group, config.head_dim)
        scores = np.einsum("thgd,hkd->thgk", rows, keys, optimize=True) / np.sqrt(np.float32(config.head_dim))
        hidden = np.arange(length) > self.positions[:, None]
        scores = np.where(hidden[:, None, None], -np.inf, scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("thgk,hkd->thgd", weights, values, optimize=True).reshape(q.shape).astype(np.float32)

    def add(self, x, y):
        """x + y."""
        return x + y

    def swiglu(self, gate, up):
        """silu(gate) * up (Shazeer 2020)."""
        with np.errstate(over="ignore"):
            return gate / (1 + np.exp(-gate)) * up


def rounded_to_q8_0(x: np.ndarray) -> np.ndarray:
    """What a cache in Q8_0 keeps of heads [..., head dimension]: signed bytes times a float16 scale per 32."""
    *places, columns = x.shape
    blocks = np.pad(x, [(0, 0)] * len(places) + [(0, -columns % 32)]).reshape(*places, -(-columns // 32), 32)
    scales = (np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(blocks / np.maximum(scales, np.float32(2**-24))), -127, 127)
    return (codes * scales).reshape(*places, -1)[..., :columns]


def dequantize(tensor) -> np.ndarray:
    """A tensor's weights as float32, in its shape. Raises ModelError for a format that `gguf` cannot dequantize."""
    import gguf

    kind = gguf.GGMLQuantizationType(tensor.format.id)
    try:
        return gguf.dequantize(np.asarray(tensor.data), kind).astype(np.float32).reshape(tensor.shape)
    except NotImplementedError:
        raise ModelError(f"tensor {tensor.name}: format {tensor.format.name} is not supported") from None
