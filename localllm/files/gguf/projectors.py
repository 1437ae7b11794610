"""Finds the vision projector (mmproj) of a model: a separate file next to it, as llama.cpp writes it."""

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from localllm.errors import UsageError
from localllm.files.models_folder import ModelFile

USUAL = "F16", "BF16", "Q8_0", "F32"  # in order of preference, for the projector that is downloaded with a model


def find_projector(path: str) -> str:
    """Find the file with "mmproj" in its name in a model's folder.

    Raises UsageError if there is none, or more than one.
    """
    folder = os.path.dirname(os.path.abspath(path))
    names = sorted(projector_names(folder))
    if len(names) > 1:
        same_stem = [name for name in names if stem_of(path).startswith(stem_of(name))]
        names = same_stem or names
    if not names:
        name = os.path.basename(path)
        raise UsageError(
            f"{name} cannot read images: there is no projector (mmproj-*.gguf) in its folder; give one with --mmproj"
        )
    if len(names) > 1:
        raise UsageError(
            f"there are {len(names)} projectors in the folder of {path}; choose one, as --mmproj {names[0]}"
        )
    return os.path.join(folder, names[0])


def projector_bytes(path: str) -> int:
    """Return the bytes of the projector next to a model; 0 if there is none, or more than one that fits."""
    try:
        return os.stat(find_projector(path)).st_size
    except (UsageError, OSError):
        return 0


def projector_names(folder: str) -> Iterator[str]:
    """Yield the names of files in a folder that are projectors by their names."""
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if is_projector(entry.name))


def is_projector(name: str) -> bool:
    """Return whether a file is a projector by its name."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def choose_projector(names: Iterable[str], model: str) -> str | None:
    """Choose the projector for a model among a repository's files: same folder, usual format."""
    folder = PurePosixPath(model).parent
    candidates_here = [name for name in sorted(names) if is_projector(name) and PurePosixPath(name).parent == folder]
    same_stem = [
        name
        for name in candidates_here
        if stem_of(PurePosixPath(model).name).startswith(stem_of(PurePosixPath(name).name))
    ]

    def rank(name: str) -> int:
        format = ModelFile(name, (name,), True).quantization
        return USUAL.index(format) if format in USUAL else len(USUAL)

    return min(same_stem or candidates_here, key=rank, default=None)


def stem_of(path: str) -> str:
    """Return a file's name in lower case without its ending, its format and "mmproj"."""
    name = os.path.basename(path).lower().removesuffix(".gguf").replace("mmproj", "").strip("-_.")
    stem, _, end = name.rpartition("-")
    is_format = end.startswith(("f16", "f32", "bf16", "q", "iq")) and end[-1:].isalnum()
    return (stem if stem and is_format else name).strip("-_.")
