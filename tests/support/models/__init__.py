"""Tiny random models of every architecture and variant, made in a moment and the same everywhere."""

from pathlib import Path
from typing import Any

from .answering import ANSWERING
from .declaration import Declaration, Model, make, write
from .dense import DENSE
from .dense2 import DENSE2
from .encoders import ENCODERS
from .experts import MOE
from .experts2 import MOE2
from .experts3 import MOE3
from .hybrids import HYBRIDS
from .latest import LATEST
from .linear import LINEAR
from .masked import MASKED
from .quantized import QUANTIZED, exact, in_blocks
from .qwen4 import PARTLY, QWEN4
from .recurrent import RECURRENT
from .sparse import SPARSE
from .unusual import UNUSUAL

__all__ = [
    "ANSWERING",
    "DECLARATIONS",
    "ENCODERS",
    "MASKED",
    "PARTLY",
    "QUANTIZED",
    "Model",
    "exact",
    "model",
    "write",
    "write_model",
]

DECLARATIONS: dict[str, Declaration] = {
    **DENSE, **DENSE2, **MOE, **MOE2, **MOE3, **RECURRENT, **HYBRIDS, **UNUSUAL, **LINEAR, **LATEST, **SPARSE,
    **QWEN4,
}  # fmt: skip


def model(name: str, seed: int = 0, **dims: Any) -> Model:
    """Return the model of a declaration, with other numbers and dimensions if wanted: model("llama", 3, width=120).

    Also of ENCODERS, MASKED, ANSWERING and PARTLY, and one of QUANTIZED: model("llama-Q4_0"), or any pair of a
    declaration and a format.
    """
    base, _, quantization = name.partition("-")
    made = make((DECLARATIONS | ENCODERS | MASKED | ANSWERING | PARTLY)[base], base, seed, **dims)
    return in_blocks(made, base, quantization, seed) if quantization else made


def write_model(name: str, path: Path, seed: int = 0, **dims: Any) -> Path:
    """Write that model and return the path."""
    return write(model(name, seed, **dims), path)
