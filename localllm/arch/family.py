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
    """A module of arch/families/.

    Most have a function `block` that applies one layer, for localllm.arch.decoder; `forward` may then be missing, if
    nothing but such layers stands between the embeddings and the final norm.
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
