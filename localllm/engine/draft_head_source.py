"""Find a draft head before it runs: a layer of the model's own, or the head in another file."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from localllm.arch.families import eagle3
from localllm.arch.family import DraftingFamily
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import State
from localllm.arch.metadata import Fields, require_general, require_kinds
from localllm.arch.metadata_consistency import require_supported_values
from localllm.arch.mtp import MtpOutput, mtp_state
from localllm.arch.verbs import Activation
from localllm.arch.weights import Weights
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile

HEADS = ("eagle3",)  # architectures that are draft heads
TOKENS = "d2t"


class DraftHeadSource(NamedTuple):
    """A draft head, not compiled yet.

    Attributes:
        path: path of its file.  hyperparameters, weights: its own.  state: where its keys and values are cached.
        columns: length of the model's hidden states that it reads.
        layers: the model's layers whose inputs are these hidden states; empty: its last hidden state (HiddenStateTap).
        draft: makes the head's output: (builder, weights, hyperparameters, hidden states).
        fuse: preprocesses hidden states, with the same arguments; None without preprocessing.
        names: tensors that the head must use, so that none is ignored.
        tokens: the token of each logit, int64; None for the whole vocabulary.
    """

    path: str
    hyperparameters: Hyperparameters
    state: State
    columns: int
    layers: tuple[int, ...]
    weights: Weights | eagle3.Pair
    draft: Callable[..., MtpOutput]
    fuse: Callable[..., Activation] | None
    names: Collection[str]
    tokens: np.ndarray | None = None


def own_layer(file: GGUFFile, model: DraftingFamily, h: Hyperparameters) -> DraftHeadSource:
    """Return the first multi-token prediction layer of a file that has one."""
    weights = Weights(file.tensors)
    names = [weight.name for weight in weights.block(h.layers).all()]
    return DraftHeadSource(file.path, h, mtp_state(h), h.width, (), weights, model.draft, None, names)


def is_head(file: GGUFFile) -> bool:
    """Return whether a file contains only a draft head."""
    return file.metadata.get("general.architecture") in HEADS


def head(file: GGUFFile, model: GGUFFile, of_model: Hyperparameters) -> DraftHeadSource:
    """Return the file's head for that model. Raises ModelError, UsageError if it is for another one."""
    require_general(file)
    fields = Fields.of(file)
    require_kinds(fields)
    fields.asked.clear()  # ensured by the checks
    h = eagle3.read(fields)
    require_supported_values(fields)
    if h.target_width != of_model.width or max(h.target_layers) > of_model.layers:
        required = f"at least {max(h.target_layers)} layers and a width of {h.target_width}"
        ours = f"{model.path} has {of_model.layers} layers and a width of {of_model.width}"
        raise UsageError(f"{file.path} is a draft head for a model with {required}; {ours}")
    if h.vocab_size != of_model.vocab_size:
        raise UsageError(
            f"{file.path} is a draft head for {h.vocab_size} tokens; {model.path} has {of_model.vocab_size}"
        )
    weights, columns = eagle3.Pair(Weights(file.tensors), Weights(model.tensors)), eagle3.COUNT * h.target_width
    names, tokens = [name for name in file.tensors if name != TOKENS], tokens_of(file, h.vocab_size)
    layers, (state,) = h.target_layers, h.states()
    return DraftHeadSource(file.path, h, state, columns, layers, weights, eagle3.draft, eagle3.fuse, names, tokens)


def tokens_of(file: GGUFFile, vocab_size: int) -> np.ndarray | None:
    """Return the model's token for each logit of the head, int64; None if it has all. Raises ModelError."""
    tensor = file.tensors.get(TOKENS)
    if tensor is None:
        return None
    if tensor.format.name != "I64" or len(tensor.shape) != 1:
        raise ModelError(
            f"{file.path}: tensor {TOKENS} should be a vector of I64, is {tensor.format.name} {tensor.shape}"
        )
    tokens = tensor.data.reshape(-1).view(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
        raise ModelError(f"{file.path}: tensor {TOKENS} should have different tokens from 0 to {vocab_size - 1}")
    return tokens
