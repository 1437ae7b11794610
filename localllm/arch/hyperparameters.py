"""The hyperparameters of every model. A family adds its own, in its file."""

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import ClassVar

from localllm.arch.layer_state import Latent, State
from localllm.frozen import frozen

RANK = "rank"  # the pooling whose row is one of scores


@frozen
class Hyperparameters:
    """Lengths count floats, the context counts tokens.

    Attributes:
        pooling: how the rows of a text become one (localllm.arch.pooling); None: logits are made of each.
        bidirectional: whether tokens see later ones, too; then the model makes no text.
        fills: whether it fills masked places then.
        before_head, head_gelu, norm_of_head: what is pooled for a classification head, its function, its norm's
            epsilon.
        encode: says the verbs of an encoder (builder, weights, hyperparameters), whose text a decoder answers.
        start_token: what stands after that text, and begins the answer.
    """

    bidirectional: ClassVar[bool] = False
    fills: ClassVar[bool] = False
    head_gelu: ClassVar[bool] = False

    arch: str
    layers: int
    width: int  # of the residual stream
    vocab_size: int
    context: int  # trained for
    guessing: int = field(default=0, kw_only=True)  # layers behind the others, which guess further tokens
    pooling: str | None = field(default=None, kw_only=True)

    @property
    def row_width(self) -> int:
        """Numbers of an image's rows."""
        return self.width

    @property
    def before_head(self) -> str:
        return "cls" if self.bidirectional else "last"

    @property
    def encode(self) -> Callable[..., object] | None:
        return None

    @property
    def start_token(self) -> int | None:
        return None

    @property
    def norm_of_head(self) -> float:
        return 1e-5

    def states(self) -> Sequence[State]:
        """Return the layers' states: KV caches and recurrent states."""
        raise NotImplementedError

    def layer_states(self) -> Sequence[State]:
        """Return for each layer the state that its block works with."""
        return [state for state in self.states() if not (isinstance(state, Latent) and state.is_index)]
