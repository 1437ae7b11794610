"""Make control vectors: the directions in which a model's hidden states differ between two sets of prompts.

A control vector is added to the outputs of layers (Zou et al. 2023, arXiv 2310.01405; Rimsky et al. 2023, arXiv
2312.06681). The vector of layer N is made from the output of layer N, counted from 0, and is added to the same output;
there is none for layer 0, as in llama.cpp.
"""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from localllm.api import open_with_options
from localllm.engine.hooks import LayerHook
from localllm.engine.options import EngineOptions
from localllm.errors import ModelError, UnsupportedError, UsageError
from localllm.files.gguf.header import printable
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.services.records.lines import Record, read_records
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.api import Model

Prompt = str | list[Message]
Method = Literal["mean", "pca"]


def read_prompts(data: bytes, name: str) -> list[Prompt]:
    """Parse a file of prompts: lines, or JSON Lines with the field "prompt" or "messages". Raises UsageError."""
    prompts = [parse_prompt(record, name) for record in read_records(data, name)]
    if not prompts:
        raise UsageError(f"{printable(name, 4096)}: the file contains no prompts")
    return prompts


def parse_prompt(record: Record, name: str) -> Prompt:
    """Return a record's prompt. Raises UsageError, which names the file and the record."""
    if record.error:
        raise UsageError(f"{printable(name, 4096)}: {record.error}")
    if isinstance(record.input, str):
        return record.input
    fields = record.input if isinstance(record.input, dict) else {}
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(messages, list):
        return messages
    if isinstance(prompt, str):
        return prompt
    raise UsageError(f'{printable(name, 4096)}: record {record.id!r} must have a "prompt" or "messages"')


class StateReader:
    """Reads the outputs of a model's layers after the last token of prompts. Use it in a `with` statement.

    Attributes:
        arch: the model's architecture.  files: its files.
    """

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions):
        """Open a model. Raises the errors of open_with_options; UnsupportedError if it does not continue texts."""
        self._model: Model = open_with_options(path, options, cache=False)
        try:
            h = self._model.engine.hyperparameters
            if h.bidirectional or h.start_token is not None or h.layers < 2:
                raise UnsupportedError(f"{self._model.path}: control vectors are not supported for {h.arch} models")
            self._outputs = np.zeros((h.layers - 1, h.width), np.float32)
            hook = LayerHook(frozenset(range(2, h.layers + 1)), self._record_last)
            self._sequence = self._model.engine.sequence(hook)
        except BaseException:
            self._model.close()
            raise
        self.arch, self.files, self.warnings = h.arch, self._model.files, self._model.warnings

    def _record_last(self, states: np.ndarray, layer: int, position: int) -> None:
        self._outputs[layer - 2] = states[-1]  # the input of a layer is the output of the one before

    def encode(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids; messages get the chat template. Raises UsageError."""
        if isinstance(prompt, str):
            return self._model.tokenizer.encode(prompt, special=True, bos=True)
        return self._model.session.encode_chat(prompt)

    def read(self, prompts: Sequence[Prompt]) -> Iterator[np.ndarray]:
        """Yield the outputs of layers 1 and later after each prompt, float32 [layers - 1, width].

        Raises UsageError, ContextError, ModelError.
        """
        encoded = [self.encode(prompt) for prompt in prompts]
        if not all(encoded):
            raise UsageError("a prompt has no tokens")
        for ids in encoded:
            self._sequence.truncate(0)
            self._sequence.append(ids, "last")
            if not np.isfinite(self._outputs).all():
                raise ModelError(f"{self._model.path}: the output of a layer is not finite")
            yield self._outputs.copy()

    def close(self) -> None:
        self._model.close()

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def require_pairs(positive: Sequence[Prompt], negative: Sequence[Prompt]) -> None:
    """Raise UsageError unless each positive prompt has a negative one."""
    if len(positive) != len(negative):
        count = f"found {len(positive)} and {len(negative)}"
        raise UsageError(f"the files of positive and negative prompts must have the same number of prompts ({count})")


def compute_directions(positive: np.ndarray, negative: np.ndarray, method: Method) -> np.ndarray:
    """Return the direction from negative to positive states in each layer, float32 [layers, width].

    positive, negative: float32 [pairs, layers, width].  method: mean, the mean of the differences; pca, their first
    principal component (of differences that are not centred), as long as their mean projection on it, so that a scale
    of 1 moves states as far as the prompts differ. Positive states have the higher mean projection. Raises UsageError
    if the states of a layer do not differ.
    """
    differences = (positive.astype(np.float64) - negative).swapaxes(0, 1)  # [layers, pairs, width]
    directions = differences.mean(axis=1)
    if method == "pca":
        components = np.linalg.svd(differences, full_matrices=False)[2][:, 0]  # [layers, width], of length 1
        directions = np.einsum("lw,lw->l", components, directions)[:, None] * components
    if not directions.any(axis=1).all():
        raise UsageError("the positive and the negative prompts must differ: a layer has the same states after both")
    return np.asarray(directions, np.float32)


def write_control_vector(path: str | os.PathLike[str], arch: str, directions: np.ndarray) -> int:
    """Atomically write a control vector in llama.cpp's format; return the number of bytes of its vectors.

    directions: float32 [layers - 1, width], from layer 1 on. Raises LocalllmError.
    """
    metadata: dict[str, object] = {
        "general.architecture": "controlvector", "controlvector.model_hint": arch,
        "controlvector.layer_count": np.int32(len(directions)),
    }  # fmt: skip
    tensors = [OutputTensor.from_array(f"direction.{layer}", vector) for layer, vector in enumerate(directions, 1)]
    write_gguf(path, metadata, tensors)
    return directions.nbytes
