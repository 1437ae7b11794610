"""Mellum 2 (JetBrains 2026): Qwen 3 MoE with a sliding window, and unscaled RoPE, in three layers of four."""

from localllm.arch.attention import Windowed, read_windows
from localllm.arch.families.qwen3 import forward
from localllm.arch.feed_forward import read_routing
from localllm.arch.metadata import Fields
from localllm.arch.rope import Rope
from localllm.frozen import frozen

__all__ = ["forward", "read"]


@frozen
class Mellum(Windowed):
    def rope(self, layer: int) -> Rope | None:
        rope = self.attention.rope
        return rope.without_scaling(rope.base) if self.windows[layer] else rope


def read(fields: Fields) -> Mellum:
    """Read the hyperparameters. Raises ModelError."""
    shared = Mellum.shared_fields(fields, interleaved=False)
    return Mellum(**shared, windows=read_windows(fields, period=4, default=0), routing=read_routing(fields))
