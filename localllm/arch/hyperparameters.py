"""What every model has. A family adds what is its own, in its file."""

from collections.abc import Sequence
from dataclasses import field

from localllm.arch.states import Latent, State
from localllm.frozen import frozen


@frozen
class Hyperparameters:
    """Lengths count floats, the context counts tokens."""

    arch: str
    layers: int
    width: int  # of the residual stream
    vocab_size: int
    context: int  # trained for
    guessing: int = field(default=0, kw_only=True)  # layers behind the others, which guess further tokens

    def states(self) -> Sequence[State]:
        """What the layers keep of the tokens they have seen."""
        raise NotImplementedError

    def layer_states(self) -> Sequence[State]:
        """Of each layer the one that its block works with."""
        return [state for state in self.states() if not (isinstance(state, Latent) and state.is_index)]
