"""Embed images and texts in one vector space with CLIP's encoders (localllm.arch.vision.clip)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from localllm.arch.verbs import Activation
from localllm.arch.vision import clip
from localllm.arch.weights import Weight, Weights
from localllm.engine.forks import create_lock
from localllm.engine.options import EngineOptions
from localllm.engine.vision_encoder import TracedProgram, VisionProgram, trace_program
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.reference import dequantize

if TYPE_CHECKING:
    from localllm.arch.vision.resizing import ResizableImage


Forward = Callable[..., Activation]


class ClipEncoder:
    """The image encoder and the text encoder of a CLIP model. Calls from several threads are serialized.

    Attributes:
        width: length of a vector.  context: maximum number of tokens in a text.
        vocab_size: size of the vocabulary.
    """

    def __init__(self, file: GGUFFile, options: EngineOptions):
        """Open a CLIP file. Raises ModelError if it is damaged or not a CLIP file."""
        self._path, self._options, self.lock = file.path, options, create_lock(self)
        self._pair, self._weights = clip.read_clip(file), Weights(file.tensors)
        self._parts = trace_programs(file, self._pair)
        self.width, self.context = self._pair.text.out, self._pair.text.context
        self.vocab_size = self._weights.get_submodel("t.").token_embd.shape[0]
        self._programs: dict[int, VisionProgram] = {}

    def encode_image(self, picture: "ResizableImage") -> np.ndarray:
        """Embed an RGB image as float32 [width]. Raises ModelError if the vector is not finite."""
        h = self._pair.vision
        rows = h.compute_rows(clip.prepare(h, picture), self._weights)
        with self.lock:
            return self._run(1, self._run(0, rows)[:1])[0]

    def encode_text(self, ids: Sequence[int]) -> np.ndarray:
        """Embed at most `context` token ids as float32 [width]. Raises ModelError if the vector is not finite."""
        t = self._weights.get_submodel("t.")
        tokens, places = np.asarray(ids, np.int64), np.arange(len(ids))
        rows = dequantize_rows(t.token_embd, tokens) + dequantize_rows(t.position_embd, places)
        with self.lock:
            return self._run(3, self._run(2, rows)[-1:])[0]

    def _run(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Run one of four programs: 0, 1 for images and their projection, 2, 3 for texts and theirs."""
        if number not in self._programs:
            h = self._pair[number // 2]
            self._programs[number] = VisionProgram(self._parts[number], h, self._options)
        try:
            return self._programs[number].run(rows)
        except ModelError as error:
            raise ModelError(f"{self._path}: {error}") from None

    def close(self) -> None:
        with self.lock:
            for program in self._programs.values():
                program.close()


def trace_programs(file: GGUFFile, pair: clip.ClipEncoders) -> list[TracedProgram]:
    """Trace the image transformer, its projection, the text transformer and its projection. Raises ModelError."""
    traced: list[TracedProgram] = []
    parts: list[tuple[Forward, Forward, clip.ClipVisionHyperparameters | clip.ClipTextHyperparameters]] = [
        (clip.encode_image, clip.project_image, pair.vision), (clip.encode_text, clip.project_text, pair.text),
    ]  # fmt: skip
    try:
        for tower, vector, h in parts:
            traced += [
                trace_program(tower, file, h, h.max_patches, h.input_width),
                trace_program(vector, file, h, 1, h.width),
            ]
            if traced[-1].width != h.out:
                raise ModelError(f"vectors must have the length projection_dim, {h.out} (found {traced[-1].width})")
        for part in traced[:-1]:
            traced[-1].recorder.use(part.recorder)
        traced[-1].recorder.require_all_used(file.tensors)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    return traced


def dequantize_rows(table: Weight, numbers: np.ndarray) -> np.ndarray:
    """Return the rows of a table at these indices, float32 [indices, columns]."""
    tensor = table.tensor
    data = tensor.data.reshape(tensor.shape[0], -1)[numbers]
    return dequantize(replace(tensor, shape=(len(numbers), tensor.shape[1]), data=data))
