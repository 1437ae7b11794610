"""Bring a GGUF file into the models folder. Implements `localllm import`."""

import os
from collections.abc import Callable
from pathlib import Path

from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import ENDING, SPLIT, get_created_path, get_models_folder, is_model
from localllm.files.safe_file import SafeFile
from localllm.services.hub.create_model import require_new_name

CHUNK = 1 << 24  # bytes per read


def import_model(file: str, name: str | None, moves: bool, report: Callable[[int, int], None]) -> Path:
    """Copy or move a model's files into the models folder; return the path of the first.

    report: called with the copied and all bytes. Raises UsageError for a name that is taken or invalid, ModelError for
    an invalid file, LocalllmError if it cannot be written.
    """
    split = SPLIT.fullmatch(os.path.basename(file))
    name = require_new_name(name or (split["stem"] if split else os.path.basename(file).removesuffix(ENDING)))
    if "/" in name or ":" in name or not is_model(name + ENDING):
        raise UsageError(f"{name!r} cannot be the name of a model's file: use letters, digits and . _ -")
    if os.path.isfile(get_created_path(name)):
        raise UsageError(f"{name} exists already; remove it first with `localllm rm {name}`")
    with GGUFFile.open(file, needed=()) as model:
        sources = [Path(path) for path in model.parts]
    count = len(sources)
    names = [
        f"{name}-{number:05d}-of-{count:05d}{ENDING}" if split else name + ENDING for number in range(1, count + 1)
    ]
    folder = get_models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        total, done = sum(path.stat().st_size for path in sources), 0
        for source, target in zip(sources, names, strict=True):
            if moves and move_file(source, folder / target):
                continue
            done = copy_file(source, folder / target, done, lambda done: report(done, total))
            if moves:
                source.unlink()
    except OSError as error:
        raise LocalllmError(f"{error.filename or folder}: {error.strerror or error}") from None
    return folder / names[0]


def move_file(source: Path, target: Path) -> bool:
    """Rename a file; return False if it is on another disk."""
    try:
        os.rename(source, target)
    except OSError:
        return False
    return True


def copy_file(source: Path, target: Path, done: int, report: Callable[[int], None]) -> int:
    """Copy a file; return the bytes copied so far. Raises OSError, LocalllmError."""
    with open(source, "rb") as file, SafeFile(target) as copy:
        while data := file.read(CHUNK):
            copy.write(data)
            done += len(data)
            report(done)
    return done
