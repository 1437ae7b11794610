"""Where the projector of a model is: a file of its own, as llama.cpp writes it, beside the model."""

import os
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from localllm.errors import UsageError
from localllm.files.models_folder import ModelFile

USUAL = "F16", "BF16", "Q8_0", "F32"  # of which the first one that a repository has is brought with a model


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
        yield from (entry.name for entry in entries if is_projector(entry.name))


def is_projector(name: str) -> bool:
    """Whether a file is one by its name."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def projector_among(names: Iterable[str], model: str) -> str | None:
    """The projector that goes with a model, of the files of a repository: in the same folder, of the usual format."""
    folder = PurePosixPath(model).parent
    found = [name for name in sorted(names) if is_projector(name) and PurePosixPath(name).parent == folder]
    own = [name for name in found if stem_of(PurePosixPath(model).name).startswith(stem_of(PurePosixPath(name).name))]

    def rank(name: str) -> int:
        format = ModelFile(name, (name,), True).quantization
        return USUAL.index(format) if format in USUAL else len(USUAL)

    return min(own or found, key=rank, default=None)


def stem_of(path: str) -> str:
    """A file's name without what says that it is a projector, and without its format."""
    name = os.path.basename(path).lower().removesuffix(".gguf").replace("mmproj", "").strip("-_.")
    stem, _, end = name.rpartition("-")
    is_format = end.startswith(("f16", "f32", "bf16", "q", "iq")) and end[-1:].isalnum()
    return (stem if stem and is_format else name).strip("-_.")
