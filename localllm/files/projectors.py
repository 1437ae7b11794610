"""Where the projector of a model is: a file of its own, as llama.cpp writes it, beside the model."""

import os
from collections.abc import Iterator

from localllm.errors import UsageError


def projector_beside(path: str) -> str:
    """The projector in a model's folder: the file that has "mmproj" in its name. Raises UsageError if there is none, or
    more than one."""
    folder = os.path.dirname(os.path.abspath(path))
    found = sorted(candidates(folder))
    if len(found) > 1:
        own = [name for name in found if stem_of(path).startswith(stem_of(name))]
        found = own or found
    if not found:
        name = os.path.basename(path)
        raise UsageError(f"{name} sees no images: there is no projector (mmproj-*.gguf) beside it, --mmproj names one")
    if len(found) > 1:
        raise UsageError(f"there are {len(found)} projectors beside {path}: choose one, as --mmproj {found[0]}")
    return os.path.join(folder, found[0])


def projector_bytes(path: str) -> int:
    """Of the projector beside a model; 0 if there is none, or nobody knows which."""
    try:
        return os.stat(projector_beside(path)).st_size
    except (UsageError, OSError):
        return 0


def candidates(folder: str) -> Iterator[str]:
    """Names of files in a folder that are projectors by their names."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if "mmproj" in entry.name.lower() and entry.name.lower().endswith(".gguf"):
                yield entry.name


def stem_of(path: str) -> str:
    """A file's name without what says that it is a projector, and without its format."""
    name = os.path.basename(path).lower().removesuffix(".gguf").replace("mmproj", "").strip("-_.")
    stem, _, end = name.rpartition("-")
    is_format = end.startswith(("f16", "f32", "bf16", "q", "iq")) and end[-1:].isalnum()
    return (stem if stem and is_format else name).strip("-_.")
