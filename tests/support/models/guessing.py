"""Models with a layer that guesses, and what llama.cpp's says: recorded by scripts/record/record_guesses.py."""

from pathlib import Path
from typing import Any

import numpy as np

from . import model
from .declaration import Model
from .golden import PROMPT
from .numbers import Numbers

GUESSES = (
    Path(__file__).parents[2] / "goldens" / "guesses.npz"
)  # by name, float32 [PROMPT, logits kept]; by "name digest"
OWN = ["glm4moe", "hy_v3", "cohere2moe"]
# Heads in files of their own (EAGLE-3): dimensions of the model, and what the head has.
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"model": {"layers": 4}, "layers": [0, 2, 3]},
    "eagle3_own": {
        "model": {"layers": 4}, "layers": [1, 2, 3], "width": 64, "tokens": 100, "normed": True, "adds_normed": True,
        "factors": True,
    },
}  # fmt: skip
MADE = ["deepseek2_v3", "qwen35", "qwen35moe", "qwen3next", "cohere2moe_rms"]


def with_guess(name: str) -> Model:
    """Return a model with a layer that guesses: its own, or one made of its last layer, which attends."""
    made = model(name)
    if name in OWN:
        return made
    key, width = f"{made.arch}.block_count", made.metadata[f"{made.arch}.embedding_length"]
    layers = made.metadata[key]
    last, own = f"blk.{layers - 1}.", f"blk.{layers}."
    tensors = {name.replace(last, own): values for name, values in made.tensors.items() if name.startswith(last)}
    numbers = Numbers(0, name, "nextn")
    tensors[f"{own}nextn.eh_proj.weight"] = numbers.normal((width, 2 * width), width**-0.5)
    for norm in ("enorm", "hnorm"):
        tensors[f"{own}nextn.{norm}.weight"] = numbers.uniform((width,), 0.5, 1.5)
    more = {key: layers + 1, f"{made.arch}.nextn_predict_layers": 1}
    if (pattern := made.metadata.get(by_layer := f"{made.arch}.attention.sliding_window_pattern")) is not None:
        more[by_layer] = type(pattern)([*pattern, pattern[-1]])
    return Model(made.arch, made.metadata | more, made.tensors | tensors, made.formats)


def with_head(name: str) -> tuple[Model, Model]:
    """Return a model, and the head that guesses for it."""
    made = model("llama", **HEADS[name].get("model", {}))
    return made, head(name, made)


def head(name: str, made: Model, **metadata: Any) -> Model:
    """metadata: what it says besides."""
    given, old = HEADS[name], made.metadata
    width, vocab = old["llama.embedding_length"], old["llama.vocab_size"]
    own, hidden, heads, head_dim, kv_heads = given.get("width", width), 40, 4, 16, 2
    shapes = {
        "fc.weight": (own, 3 * width), "output_norm.weight": (own,), "blk.0.attn_norm.weight": (own,),
        "blk.0.attn_norm_2.weight": (own,), "blk.0.attn_q.weight": (heads * head_dim, 2 * own),
        "blk.0.attn_k.weight": (kv_heads * head_dim, 2 * own), "blk.0.attn_v.weight": (kv_heads * head_dim, 2 * own),
        "blk.0.attn_output.weight": (own, heads * head_dim), "blk.0.ffn_norm.weight": (own,),
        "blk.0.ffn_gate.weight": (hidden, own), "blk.0.ffn_up.weight": (hidden, own),
        "blk.0.ffn_down.weight": (own, hidden),
    }  # fmt: skip
    if given.get("normed"):
        shapes["enc.output_norm.weight"] = (3 * width,)
    if given.get("factors"):
        shapes["rope_freqs.weight"] = (head_dim // 2,)
    if count := given.get("tokens"):
        shapes |= {"token_embd.weight": (vocab, own), "output.weight": (count, own)}
    numbers = {
        name: Numbers(0, "eagle3", name).uniform(shape, 0.5, 1.5)
        if len(shape) == 1
        else Numbers(0, "eagle3", name).normal(shape, 1.5 * shape[1] ** -0.5)
        for name, shape in shapes.items()
    }
    formats = {}
    if count:
        tokens = np.sort(Numbers(0, "eagle3", "d2t").raw(4 * vocab).view("<u4").argsort(kind="stable")[:count])
        numbers["d2t"], formats["d2t"] = tokens.astype("<i8").view(np.uint8), "I64"
    said = {
        "block_count": 1, "embedding_length": own, "feed_forward_length": hidden, "context_length": 512,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": 1e-3, "rope.freq_base": 500.0,
        "rope.dimension_count": head_dim, "vocab_size": vocab, "target_hidden_size": width,
        "target_layers": np.array(given["layers"], np.int32), "norm_before_fc": bool(given.get("normed")),
        "norm_before_residual": bool(given.get("adds_normed")), **metadata,
    }  # fmt: skip
    whole = {f"eagle3.{key}": value for key, value in said.items()} | {"general.architecture": "eagle3"}
    return Model("eagle3", whole, numbers, formats)


def text(count: int = PROMPT, seed: int = 1) -> list[int]:
    """Tokens."""
    return np.random.default_rng(seed).integers(3, 260, count).tolist()
