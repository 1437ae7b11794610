"""The common structure of encoders: bidirectional attention, and pooling to one row per text."""

from dataclasses import field
from typing import Any, ClassVar

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters
from localllm.arch.decoder import NONE, read_pooling
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import FULL_ATTENTION, Activation, Builder
from localllm.arch.weights import Weights
from localllm.frozen import frozen


@frozen
class EncoderHyperparameters(TransformerHyperparameters):
    """Hyperparameters of a model with bidirectional attention.

    Attributes:
        windows: by layer, the number of tokens that a token attends to, half of them on each side; None for all.
    """

    bidirectional: ClassVar[bool] = True
    windows: tuple[int | None, ...] = field(default=(), kw_only=True)

    def get_window(self, layer: int) -> int | None:
        return count_past_tokens(self.windows[layer]) if self.windows else None

    def get_lookahead(self, layer: int) -> int:
        return count_later_tokens(self.windows[layer]) if self.windows else FULL_ATTENTION

    @property
    def classifier_epsilon(self) -> float:
        return self.epsilon


def count_past_tokens(window: int | None) -> int | None:
    """Return how many tokens of a bidirectional window end with the current one; None without a window."""
    return window // 2 + 1 if window else None


def count_later_tokens(window: int | None) -> int:
    """Return how many tokens of a bidirectional window follow the current one; FULL_ATTENTION without a window."""
    return window // 2 if window else FULL_ATTENTION


def read_encoder_fields(fields: HyperparameterReader) -> dict[str, Any]:
    """Read the arguments that all encoders with layer norms share, by their names. Raises ModelError."""
    shared = EncoderHyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    return {**shared, "pooling": read_encoder_pooling(fields)}


def read_encoder_pooling(fields: HyperparameterReader) -> str:
    """Read an encoder's pooling; the default is the mean."""
    pooling = read_pooling(fields)
    return pooling if pooling and pooling != NONE else "mean"


def embed_tokens(b: Builder, w: Weights) -> Activation:
    """Look up the tokens' embeddings, and add those of their token types if the file has them."""
    x, kinds = b.embed(w.token_embd, b.ids), w.get("token_types")
    return b.add(x, b.embed_kinds(kinds, b.kinds)) if kinds else x
