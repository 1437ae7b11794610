"""The hyperparameters of every model. A family adds its own in its module."""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import ClassVar

from localllm.arch.layer_state import LatentState, State
from localllm.frozen import frozen

RANK = "rank"  # the pooling of rerankers and classifiers, to a row of scores


@frozen
class Hyperparameters:
    """The hyperparameters of a model.

    Attributes:
        pooling: how to reduce a text's rows to one (localllm.arch.decoder); None for a model with logits.
        bidirectional: tokens also attend to later ones, so the model cannot generate one token after the other.
        is_diffusion: a bidirectional model that fills masked tokens (diffusion language models).
        before_head, head_gelu, norm_of_head: of a classification head: the pooling before it, GELU instead of tanh
            inside, and its norm's epsilon.
        encode: describes the encoder of an encoder-decoder model in verbs (builder, weights, hyperparameters).
        start_token: the decoder's first token in such a model.
    """

    bidirectional: ClassVar[bool] = False
    is_diffusion: ClassVar[bool] = False
    has_gelu_classifier: ClassVar[bool] = False

    arch: str
    layers: int
    width: int  # of the residual stream
    vocab_size: int
    context: int  # the length trained for, in tokens
    mtp_layers: int = field(default=0, kw_only=True)  # MTP layers after the others
    pooling: str | None = field(default=None, kw_only=True)

    @property
    def row_width(self) -> int:
        """The width of an image's rows."""
        return self.width

    @property
    def classifier_pooling(self) -> str:
        return "cls" if self.bidirectional else "last"

    @property
    def encode(self) -> Callable[..., object] | None:
        return None

    @property
    def start_token(self) -> int | None:
        return None

    @property
    def classifier_epsilon(self) -> float:
        return 1e-5

    def list_states(self) -> Sequence[State]:
        """Return the layers' states: KV caches and recurrent states."""
        raise NotImplementedError

    def list_layer_states(self) -> Sequence[State]:
        """Return the states of list_states without those of indexers: one for each layer."""
        return [state for state in self.list_states() if not (isinstance(state, LatentState) and state.is_index)]
