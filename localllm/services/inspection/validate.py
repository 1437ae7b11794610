"""Check that a model file is consistent without running it.

GGUFFile.open has already checked counts, lengths and offsets. This module checks the hyperparameters, the tensors that
they require, and the vocabulary. `require_finite_weights` also reads every weight.
"""

from typing import TYPE_CHECKING

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.vision import CLIP, load_projector
from localllm.arch.vision.clip import is_clip, read_clip
from localllm.arch.vision.hyperparameters import VisionHyperparameters
from localllm.arch.weights import Weights
from localllm.engine.clip_encoder import trace_programs as trace_pair
from localllm.engine.trace.recorder import trace_model
from localllm.engine.vision_encoder import trace_programs
from localllm.errors import ModelError, UnsupportedError
from localllm.files.cache.checksummed_cache import is_recorded, record_check
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.gguf.kinds import get_kind
from localllm.files.gguf.tensor_source import SourceTensor
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.kernels.dequantize_rows import RowDequantizer

VOCABULARY = "tokenizer.ggml."
CHUNK = 1 << 20  # weights checked at a time


@frozen
class ValidationResult:
    """The result of a check.

    Attributes:
        hyperparameters: None if they cannot be read, or if the file is no language model.  vision: of a projector.
        problem: why the file cannot run, None if it can.  is_valid: False if the file itself is damaged.
    """

    hyperparameters: Hyperparameters | None
    problem: ModelError | None
    vision: VisionHyperparameters | None = None

    @property
    def is_valid(self) -> bool:
        return self.problem is None or isinstance(self.problem, UnsupportedError)


def check_validity(file: GGUFFile) -> ValidationResult:
    """Check everything except the values of weights. A file without vocabulary or tensors is valid."""
    hyperparameters = None
    arch = file.metadata.get("general.architecture")
    if isinstance(arch, str) and arch == CLIP:
        return check_projector(file)
    if get_kind(file.metadata):
        return check_adapter(file)
    try:
        if any(key.startswith(VOCABULARY) for key in file.metadata):
            require_vocabulary(file)
        module, hyperparameters = load_architecture(file)
        if file.tensors:
            trace_model(file, module.forward, Weights(file.tensors), hyperparameters, hyperparameters.context)
    except ModelError as error:
        return ValidationResult(hyperparameters, error)
    return ValidationResult(hyperparameters, None)


def check_adapter(file: GGUFFile) -> ValidationResult:
    """Check an adapter or a control vector without its model."""
    from localllm.services.inspection.adapters import describe_adapter  # seldom needed

    try:
        describe_adapter(file)
    except ModelError as error:
        return ValidationResult(None, error)
    return ValidationResult(None, None)


def check_projector(file: GGUFFile) -> ValidationResult:
    vision = None
    try:
        if is_clip(file):
            return check_pair(file)
        family, vision = load_projector(file)
        trace_programs(file, family, vision)
    except ModelError as error:
        return ValidationResult(None, error, vision)
    return ValidationResult(None, None, vision)


def check_pair(file: GGUFFile) -> ValidationResult:
    """Check a CLIP model of images and texts. Raises ModelError."""
    from localllm.text.clip_words import ClipTokenizer  # seldom needed

    ClipTokenizer(file.metadata, file.path)
    pair = read_clip(file)
    trace_pair(file, pair)
    return ValidationResult(None, None, pair.vision)


def require_valid(file: GGUFFile) -> None:
    """Raise ModelError for an invalid file; accept a valid file that is not supported."""
    validity = check_validity(file)
    if validity.problem and not validity.is_valid:
        raise validity.problem


def require_vocabulary(file: GGUFFile) -> None:
    """Raise ModelError for an invalid vocabulary; cache the result for valid metadata."""
    mark, known_oddities = file.metadata.compute_fingerprint(*file.metadata), len(file.oddities)
    if mark and is_recorded("vocabulary", mark):
        return
    from localllm.text.tokenizer import Tokenizer  # slow to import

    try:
        Tokenizer.from_metadata(file.metadata, file.oddities)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    if mark and len(file.oddities) == known_oddities:  # warnings are repeated each time
        record_check("vocabulary", mark)


def require_finite_weights(file: GGUFFile) -> None:
    """Read every weight. Raises ModelError, with the position, for a weight that is not finite."""
    from localllm.files.gguf.tensor_source import GGUFTensor, count_rows
    from localllm.kernels.dequantize_rows import RowDequantizer, can_dequantize

    tensors = [GGUFTensor(tensor) for tensor in file.tensors.values() if can_dequantize(tensor.format)]
    widener = RowDequantizer({tensor.format for tensor in tensors})
    try:
        for tensor in tensors:
            rows, step = count_rows(tensor.shape), max(1, CHUNK // tensor.shape[-1])
            for first in range(0, rows, step):
                dequantize_finite(widener, tensor, first, min(first + step, rows))
                tensor.release_rows(first, min(first + step, rows))
    except ModelError as error:
        raise ModelError(f"{file.path}: {error}") from None


def dequantize_finite(widener: "RowDequantizer", tensor: SourceTensor, first: int, last: int) -> np.ndarray:
    """Dequantize rows [first, last) to float32 [rows, columns]. Raises ModelError for a non-finite weight."""
    weights = widener.dequantize(tensor.format, tensor.read_rows(first, last), tensor.shape[-1])
    if not (np.isfinite(weights.max()) and np.isfinite(weights.min())):
        check_finite(tensor, weights, first)
    return weights


def check_finite(tensor: SourceTensor, weights: np.ndarray, first: int) -> None:
    """Raise ModelError for the first weight that is NaN or infinite; first: row index of the first row."""
    positions = np.argwhere(~np.isfinite(weights))
    if len(positions):
        row, column = positions[0]
        value = weights[row, column]
        raise ModelError(
            f"tensor {printable(tensor.name)}: the weight in row {first + row}, column {column} is {value}"
        )
