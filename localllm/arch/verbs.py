"""The verbs that an architecture is written in.

A verb gets everything by argument, changes no argument and returns a new activation. The recorder of localllm.engine
writes them down, once, when a model is opened; `Reference` computes them at once in NumPy. What each means is written
in localllm.kernels.reference. An Activation is [rows, columns] in the builder's own form; rows are the tokens of a run,
or those of them that were selected.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from localllm.arch.rope import Rope
from localllm.arch.states import Latent, Paged, Recurrent
from localllm.arch.weights import Weight

if TYPE_CHECKING:
    from localllm.arch.experts import Routing  # which is written in verbs

Activation = Any
Numbers = Any  # one integer for each row
Choice = Any  # which experts the tokens of an activation go to


class Builder(Protocol):
    """What all builders can do."""

    ids: Numbers  # of the run's tokens
    positions: Numbers  # theirs in their sequences
    wanted: Numbers  # which tokens' logits are asked for

    def embed(self, weight: Weight, ids: Numbers) -> Activation: ...

    def embed_positions(self, weight: Weight, positions: Numbers) -> Activation: ...

    def select(self, x: Activation, which: Numbers) -> Activation: ...

    def columns(self, x: Activation, first: int, end: int, period: int | None = None) -> Activation: ...

    def join(self, x: Activation, y: Activation, heads: int, shared: bool = False) -> Activation: ...

    def head_linear(self, x: Activation, weight: Weight) -> Activation: ...

    def rms_norm(
        self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Activation: ...

    def layer_norm(
        self, x: Activation, weight: Weight | None, epsilon: float, group: int | None = None
    ) -> Activation: ...

    def linear(self, x: Activation, weight: Weight) -> Activation: ...

    def rope(self, x: Activation, rope: Rope, positions: Numbers, factors: Weight | None = None) -> Activation: ...

    def by_context(self, short: Weight, long: Weight, original: int) -> Weight: ...

    def ignore(self, *weights: Weight | None) -> None: ...

    def attend(
        self,
        q: Activation,
        k: Activation | None,
        v: Activation | None,
        state: Paged | Latent,
        heads: int,
        scale: float,
        softcap: float = 0.0,
        slopes: Sequence[float] = (),
        sinks: Weight | None = None,
    ) -> Activation: ...

    def route(self, logits: Activation, routing: "Routing", bias: Weight | None = None) -> Choice: ...

    def gather(self, x: Activation, choice: Choice) -> Activation: ...

    def expert_linear(self, x: Activation, weight: Weight, choice: Choice) -> Activation: ...

    def scatter(self, x: Activation, choice: Choice) -> Activation: ...

    def add(self, x: Activation, y: Activation) -> Activation: ...

    def swiglu(self, gate: Activation, up: Activation) -> Activation: ...

    def swiglu_limited(self, gate: Activation, up: Activation, sharpness: float, limit: float) -> Activation: ...

    def sigmoid_gate(self, x: Activation, gate: Activation) -> Activation: ...

    def geglu(self, gate: Activation, up: Activation) -> Activation: ...

    def gelu(self, x: Activation) -> Activation: ...

    def relu_squared(self, x: Activation) -> Activation: ...

    def scale(self, x: Activation, factor: float | Weight) -> Activation: ...

    def temper(self, x: Activation, positions: Numbers, slope: float, length: int, offset: int = 0) -> Activation: ...

    def clamp(self, x: Activation, limit: float) -> Activation: ...

    def softcap(self, x: Activation, cap: float) -> Activation: ...

    def multiply(self, x: Activation, y: Activation) -> Activation: ...

    def sigmoid(self, x: Activation) -> Activation: ...

    def softplus(self, x: Activation, bias: Weight | None = None) -> Activation: ...

    def convolve(
        self, x: Activation, weight: Weight, state: Recurrent, number: int = 0, silu: bool = True
    ) -> Activation: ...

    def selective_scan(
        self,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        rates: Weight,
        skip: Weight,
        state: Recurrent,
    ) -> Activation: ...

    def state_space(
        self,
        x: Activation,
        dt: Activation,
        b: Activation,
        c: Activation,
        rates: Weight,
        skip: Weight,
        state: Recurrent,
        number: int,
        groups: int,
    ) -> Activation: ...

    def delta_rule(
        self,
        q: Activation,
        k: Activation,
        v: Activation,
        dt: Activation,
        strength: Activation,
        rates: Weight,
        state: Recurrent,
        number: int,
        key_heads: int,
        repeat: int = 1,
    ) -> Activation: ...
