"""The names that an architecture's module uses, and its functions `read` and `forward`."""

from typing import Any, Protocol, runtime_checkable

from localllm.arch.decoder import MtpOutput
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import Latent, Paged, Recurrent, State
from localllm.arch.metadata import Fields
from localllm.arch.rope import Rope
from localllm.arch.verbs import Activation, Builder, Choice, Scores
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen

__all__ = [
    "Activation", "Builder", "Choice", "DraftingFamily", "Family", "Fields", "Hyperparameters", "Latent", "MtpOutput",
    "Paged", "Recurrent", "Rope", "Scores", "State", "Weight", "Weights", "frozen",
]  # fmt: skip


class Family(Protocol):
    """A module of arch/families/.

    Most have a function `block` that applies one layer, for localllm.arch.decoder; `forward` may then be missing, if
    nothing but such layers stands between the embeddings and the final norm.
    """

    def read(self, fields: Fields, /) -> Hyperparameters:
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
