"""Define the interface of an architecture's module: `read` its hyperparameters, `forward` its graph."""

from typing import Any, Protocol, runtime_checkable

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.metadata import Fields
from localllm.arch.mtp import MtpOutput
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights


class Family(Protocol):
    """A module of arch/families/; `forward` gets the hyperparameters that `read` returned."""

    def read(self, fields: Fields, /) -> Hyperparameters:
        """Read hyperparameters from checked metadata. Raises ModelError."""

    def forward(self, b: Builder, w: Weights, h: Any) -> Activation:
        """Describe the model in verbs; return the requested tokens' logits, or the rows of a model with pooling."""


@runtime_checkable
class DraftingFamily(Family, Protocol):
    """A family whose files may have layers for multi-token prediction."""

    def draft(self, b: Builder, w: Weights, h: Any, hidden: Activation, /) -> MtpOutput:
        """Record the first multi-token prediction layer, which reads the model's hidden states."""
