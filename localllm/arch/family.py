"""Define the interface of an architecture's module: `read` its hyperparameters, `forward` its graph."""

from typing import Any, Protocol, runtime_checkable

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.metadata import Fields
from localllm.arch.mtp import MtpOutput
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


class Family(Protocol):
    """A module of arch/families/; the hyperparameters of its functions are those that its `read` returns."""

    def read(self, fields: Fields, /) -> Hyperparameters:
        """Read hyperparameters from checked metadata. Raises ModelError."""

    def forward(self, b: Builder, w: Weights, h: Any) -> Activation:
        """Write down what the model computes; the logits of the wanted tokens, or the vectors of all."""


@runtime_checkable
class DraftingFamily(Family, Protocol):
    """A family whose files may have layers for multi-token prediction."""

    def guess(self, b: Builder, w: Weights, h: Any, hidden: Activation, /) -> MtpOutput:
        """Record the first multi-token prediction layer, which reads the model's hidden states."""
