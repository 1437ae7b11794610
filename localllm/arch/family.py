"""The names that an architecture's module uses, and its functions `read` and `forward`."""

from typing import Any, Protocol, runtime_checkable

from localllm.arch.decoder import MtpOutput
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import LatentState, PagedState, RecurrentLayerState, State
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.rope import RopeParameters
from localllm.arch.verbs import Activation, AttentionScores, Builder, Choice
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen

__all__ = [
    "Activation",
    "AttentionScores",
    "Builder",
    "Choice",
    "DraftingFamily",
    "Family",
    "HyperparameterReader",
    "Hyperparameters",
    "LatentState",
    "MtpOutput",
    "PagedState",
    "RecurrentLayerState",
    "RopeParameters",
    "State",
    "Weight",
    "Weights",
    "frozen",
]  # fmt: skip


class Family(Protocol):
    """Functions of a module of arch/families/.

    A module may have `block`, which applies one layer, instead of `forward`; load_family then adds a `forward` of
    embeddings, those layers and the final norm.
    """

    def read(self, fields: HyperparameterReader, /) -> Hyperparameters:
        """Read hyperparameters from validated metadata. Raises ModelError."""

    def forward(self, b: Builder, w: Weights, h: Any) -> Activation:
        """Describe the model in verbs; return the requested tokens' logits, or the pooled rows.

        h: the hyperparameters that `read` returned.
        """


@runtime_checkable
class DraftingFamily(Family, Protocol):
    """A family whose files may have layers for multi-token prediction."""

    def draft(self, b: Builder, w: Weights, h: Any, hidden: Activation, /) -> MtpOutput:
        """Describe the first multi-token prediction layer, which reads the model's hidden states."""
