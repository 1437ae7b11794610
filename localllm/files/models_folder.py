"""List the downloaded models: OWNER/REPOSITORY/FILE.gguf in a folder that other programs can use, too.

GGUF files that the user copies there are models as well. A download in progress has the extension .partial (see
localllm.files.download). The vision projector (mmproj) of a model is a separate file next to it, as llama.cpp writes
it.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from localllm.errors import LocalllmError, UsageError
from localllm.frozen import frozen
from localllm.system.files import get_folder_variable, get_user_folder

FOLDER_VARIABLE = "LOCALLLM_MODELS"  # in the environment: the folder
ENDING, PARTIAL = ".gguf", ".partial"
CREATED = ".modelfile"  # ending of the files of created names
LATEST = ":latest"  # Ollama's tag of a name without a tag
SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
OTHER_FILE_MARKS = "mmproj", "imatrix"  # in the names of vision projectors and importance matrices
DRAFT_HEADS = "mtp-", "eagle3-", "dflash-"  # in the names of draft heads, which belong to another model
WEIGHTED = "I1-"  # before a quantization: made with an importance matrix (a naming habit of some publishers)
# The type within a file name: Q4_K_M, IQ4_XS, UD-Q4_K_XL, BF16, MXFP4, ..., with no letter or digit next to it.
QUANTIZATION = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?I?Q[0-9](?:_[A-Z0-9]+)+|TQ[0-9]_[0-9]|B?F16|F32|FP16|FP32|MXFP4(?:_MOE)?|NVFP4)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)


@frozen
class ModelFile:
    """A model in a repository or in the folder: a file, or all files of a split model.

    Attributes:
        name: path with slashes, without the index of a split and the extension.
        files: names of the files, in order.
        is_whole: no file of a split model is missing.
    """

    name: str
    files: tuple[str, ...]
    is_whole: bool

    @property
    def quantization(self) -> str:
        """The quantization in the file's name, such as Q4_K_M, or ""."""
        for part in reversed(PurePosixPath(self.name).parts):
            if matches := QUANTIZATION.findall(part):
                return normalize_quantization(matches[-1])
        return ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Names that select this file: Q4_K_M, and I1-Q4_K_M if the file's name has that prefix."""
        kind = self.quantization
        is_weighted = kind and f"{WEIGHTED}{kind}" in self.name.upper().replace("FP", "F")
        return (kind, f"{WEIGHTED}{kind}") if is_weighted else (kind,)


def normalize_quantization(quantization: str) -> str:
    """Return the usual spelling of a quantization: q4_k_m as Q4_K_M, fp16 as F16."""
    return quantization.upper().replace("FP", "F") if "MXFP" not in quantization.upper() else quantization.upper()


def group_models(names: Iterable[str]) -> list[ModelFile]:
    """Group file names into models, sorted by name.

    Omits projectors, importance matrices, and draft heads unless there is no other model.
    """
    names = [name for name in names if is_model(name)]
    names = [name for name in names if not is_draft_head(name)] or names
    groups: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        split = SPLIT.fullmatch(name)
        stem, count = (split["stem"], int(split["count"])) if split else (name[: -len(ENDING)], 0)
        groups.setdefault((stem, count), []).append(name)
    return [
        ModelFile(stem, tuple(files), len(files) == max(count, 1)) for (stem, count), files in sorted(groups.items())
    ]


def is_model(name: str) -> bool:
    """Return whether a file name is that of a model or of one of its splits."""
    base = PurePosixPath(name).name.lower()
    return base.endswith(ENDING) and not base.startswith(".") and not any(mark in base for mark in OTHER_FILE_MARKS)


def is_draft_head(name: str) -> bool:
    """Return whether a file name is that of a draft head for another model, by llama.cpp's prefixes."""
    return any(mark in PurePosixPath(name).name.lower() for mark in DRAFT_HEADS)


def get_models_folder() -> Path:
    """Return the folder of models. Raises UsageError if LOCALLLM_MODELS is relative."""
    return find_models_folder()[0]


def find_models_folder() -> tuple[Path, str]:
    """Return the folder of models, and the environment variable that sets it, or "".

    LOCALLLM_MODELS names the folder itself, XDG_DATA_HOME its parent. A relative XDG_DATA_HOME is ignored, as the XDG
    specification asks. Raises UsageError if LOCALLLM_MODELS is relative.
    """
    if folder := os.path.expanduser(os.environ.get(FOLDER_VARIABLE, "")):
        if not os.path.isabs(folder):
            raise UsageError(f"{FOLDER_VARIABLE} must be an absolute path (found {folder!r})")
        return Path(folder), FOLDER_VARIABLE
    return get_user_folder("data") / "models", get_folder_variable("data")


def get_created_path(name: str) -> Path:
    """Return the path of a created name's Modelfile, which may not exist."""
    return get_models_folder() / f"{quote(name.removesuffix(LATEST).lower(), safe='')[:250]}{CREATED}"


def is_path(model: str) -> bool:
    """Return whether a MODEL is an existing path; a created name has priority over a file in the working folder."""
    if not os.path.lexists(model):
        return False
    return os.path.basename(model) != model or model.endswith(ENDING) or not os.path.isfile(get_created_path(model))


def list_created_names() -> list[str]:
    """List the names in the models folder that stand for a model with settings of its own."""
    try:
        names = os.listdir(get_models_folder())
    except OSError:
        return []
    return sorted(unquote(name.removesuffix(CREATED)) for name in names if name.endswith(CREATED))


def list_files(folder: Path) -> list[str]:
    """List the files in a folder and its subfolders as paths with slashes; empty if the folder does not exist."""
    return list_readable(folder)[0]


def list_own_files(folder: Path) -> list[str]:
    """List files like list_files. Raises LocalllmError if the folder exists but cannot be read."""
    names, errors = list_readable(folder)
    if str(folder) in errors:
        raise LocalllmError(f"{folder}: the folder of models cannot be read: {errors[str(folder)]}")
    return names


def list_readable(folder: Path) -> tuple[list[str], dict[str, str]]:
    """List the files in a folder and its subfolders, and by path the reason why a folder cannot be read."""
    errors: dict[str, str] = {}

    def note(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            errors[str(error.filename)] = error.strerror or str(error)

    walk = os.walk(folder, onerror=note)
    return [(Path(place) / name).relative_to(folder).as_posix() for place, _, names in walk for name in names], errors


def get_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def get_split_size(path: str) -> int:
    """Return the size in bytes of a model: its file, or all files of the split model."""
    split = SPLIT.fullmatch(path)
    if split is None:
        return get_size(Path(path))
    names = (f"{split['stem']}-{number:05d}-of-{split['count']}.gguf" for number in range(1, int(split["count"]) + 1))
    return sum(get_size(Path(name)) for name in names)


def remove_empty_folders(folder: Path) -> None:
    """Remove a folder and its parents within the models folder, as long as they are empty."""
    while get_models_folder() in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # not empty
            return
        folder = folder.parent


PROJECTOR_FORMATS = (
    "F16",
    "BF16",
    "Q8_0",
    "F32",
)  # in order of preference, for the projector that is downloaded with a model


def find_projector(path: str) -> str:
    """Return the path of the only file with "mmproj" in its name in a model's folder.

    Raises UsageError if there is none or more than one.
    """
    folder = os.path.dirname(os.path.abspath(path))
    names = sorted(list_projectors(folder))
    if len(names) > 1:
        same_stem = [name for name in names if get_stem(path).startswith(get_stem(name))]
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


def get_projector_size(path: str) -> int:
    """Return the size in bytes of the projector that find_projector returns; 0 if it raises."""
    try:
        return os.stat(find_projector(path)).st_size
    except (UsageError, OSError):
        return 0


def list_projectors(folder: str) -> Iterator[str]:
    """Yield the file names of projectors in a folder."""
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if is_projector(entry.name))


def is_projector(name: str) -> bool:
    """Return whether a file name is that of a vision projector."""
    return "mmproj" in name.lower() and name.lower().endswith(".gguf")


def choose_projector(names: Iterable[str], model: str) -> str | None:
    """Choose a model's projector among the files of its repository.

    Prefers the model's folder, then its name, then the formats in PROJECTOR_FORMATS. None if there is no projector.
    """
    folder = PurePosixPath(model).parent
    candidates_here = [name for name in sorted(names) if is_projector(name) and PurePosixPath(name).parent == folder]
    same_stem = [
        name
        for name in candidates_here
        if get_stem(PurePosixPath(model).name).startswith(get_stem(PurePosixPath(name).name))
    ]

    def rank(name: str) -> int:
        format = ModelFile(name, (name,), True).quantization
        return PROJECTOR_FORMATS.index(format) if format in PROJECTOR_FORMATS else len(PROJECTOR_FORMATS)

    return min(same_stem or candidates_here, key=rank, default=None)


def get_stem(path: str) -> str:
    """Return a file name in lower case, without extension, quantization and "mmproj"."""
    name = os.path.basename(path).lower().removesuffix(".gguf").replace("mmproj", "").strip("-_.")
    stem, _, end = name.rpartition("-")
    is_format = end.startswith(("f16", "f32", "bf16", "q", "iq")) and end[-1:].isalnum()
    return (stem if stem and is_format else name).strip("-_.")
