"""What every model has. A family adds what is its own, in its file."""

from collections.abc import Sequence

from localllm.arch.states import State
from localllm.frozen import frozen


@frozen
class Hyperparameters:
    """Lengths count floats, the context counts tokens."""

    arch: str
    layers: int
    width: int  # of the residual stream
    vocab_size: int
    context: int  # trained for

    def states(self) -> Sequence[State]:
        """What the layers keep of the tokens they have seen."""
        raise NotImplementedError
