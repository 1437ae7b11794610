"""The verbs that an architecture is written in. `Reference` runs them at once in NumPy, `CpuBuilder` records them on a
tape; what each means is written in localllm.kernels.reference. An Activation is [tokens, columns] in the builder's own
form. A verb leaves its arguments as they are, except `rope`, which may overwrite x."""

from typing import Any, Protocol

from localllm.arch.config import Config
from localllm.arch.weights import Weight

Activation = Any


class Builder(Protocol):
    """What both builders can do."""

    config: Config

    def embed(self, weight: Weight) -> Activation: ...

    def select(self, x: Activation) -> Activation: ...

    def rms_norm(self, x: Activation, weight: Weight) -> Activation: ...

    def linear(self, x: Activation, weight: Weight, cached: bool = False) -> Activation: ...

    def rope(self, x: Activation, factors: Weight | None = None) -> Activation: ...

    def attend(self, q: Activation, k: Activation, v: Activation, layer: int) -> Activation: ...

    def add(self, x: Activation, y: Activation) -> Activation: ...

    def swiglu(self, gate: Activation, up: Activation) -> Activation: ...
