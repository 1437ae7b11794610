"""Models with a layer that guesses, and what llama.cpp's says: recorded by scripts/record_guesses.py."""

from pathlib import Path

import numpy as np

from . import model
from .declaration import Model
from .golden import PROMPT
from .numbers import Numbers

GUESSES = (
    Path(__file__).parents[1] / "goldens" / "guesses.npz"
)  # by name, float32 [PROMPT, logits kept]; by "name digest"
OWN = ["glm4moe", "hy_v3", "cohere2moe"]
MADE = ["deepseek2_v3", "qwen35", "qwen35moe", "qwen3next", "cohere2moe_rms"]


def with_guess(name: str) -> Model:
    """A model with a layer that guesses: its own, or one made of its last layer, which attends."""
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


def text(count: int = PROMPT, seed: int = 1) -> list[int]:
    """Tokens."""
    return np.random.default_rng(seed).integers(3, 260, count).tolist()
