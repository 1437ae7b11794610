"""Download models from the Hugging Face hub into the models folder. Implements `localllm pull`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.arch import architecture
from localllm.errors import LocalllmError, UsageError
from localllm.files.download import Download, find_partials, sha256_of
from localllm.files.gguf.file import GGUFFile, open_part
from localllm.files.gguf.header_only import open_header_only
from localllm.files.models_folder import choose_projector, models_folder, remove_empty_folders, size_of
from localllm.frozen import frozen
from localllm.services.hub.catalogue import HubReference, select_files
from localllm.services.hub.huggingface import RemoteFile, Repository
from localllm.system.files import free_bytes, name_problem

SPARE = 1 << 20  # bytes of the disk to leave free


class Watcher:
    """Receives the progress of a pull; this base class ignores it."""

    def looking(self, subject: str) -> None:
        """Report which metadata is being fetched."""

    def checking(self, file: str, done: int, total: int) -> None:
        """Report how many bytes on disk have been verified."""

    def receiving(self, file: str, done: int, total: int) -> None:
        """Report how many bytes of all files have arrived."""

    def interrupted(self, reason: str) -> None:
        """Report a broken connection, before the next attempt."""


@frozen
class Pulled:
    """The result of a pull.

    Attributes:
        path: path of the first file.  size: of all files.  received: downloaded bytes.
    """

    path: Path
    size: int
    received: int


def pull(reference: HubReference, watcher: Watcher | None = None) -> Pulled:
    """Download and verify the missing files of a model and its projector.

    A file gets its final name when it is complete and has the hub's size and SHA-256, and a valid header. The
    architecture and the free disk space are checked before the download. Raises ModelError for a model that is not
    available, damaged or not supported, LocalllmError for a failing network or disk, UsageError if another process is
    pulling it, or if the operating system does not allow the file name.
    """
    watcher = watcher or Watcher()
    watcher.looking("the list of files")
    repository = Repository(reference.repository, watcher.interrupted)
    files = (files_named := files_of(repository, reference)) + projectors_of(repository, files_named)
    for name in (*reference.repository.split("/"), *(part for file in files for part in file.name.split("/"))):
        if problem := name_problem(name):
            raise UsageError(f"{reference.repository}: {name}: {problem}")
    folder = models_folder() / reference.repository
    targets = [folder / file.name for file in files]
    missing = [
        (file, target) for file, target in zip(files, targets, strict=True) if not is_here(file, target, watcher)
    ]
    if missing:
        require_space(folder, missing)
        watcher.looking("the header")
        with remote_model(repository, files_named) as (model, _):
            architecture(model)
    size, received = sum(file.size for file in files), 0
    bytes_done = size - sum(file.size for file, _ in missing)
    for file, target in missing:
        try:
            received += fetch(repository, file, target, watcher, bytes_done, size)
        finally:
            remove_empty_folders(target.parent)
        bytes_done += file.size
    GGUFFile.open(targets[0], needed=()).close()  # checks that the splits belong together
    return Pulled(targets[0], size, received)


def files_of(repository: Repository, reference: HubReference) -> list[RemoteFile]:
    """Return the files of a model. Raises ModelError."""
    return [repository.files[name] for name in select_files(repository.files, reference)]


def projectors_of(repository: Repository, files: list[RemoteFile]) -> list[RemoteFile]:
    """Return a model's projector file, as a list that may be empty."""
    name = choose_projector(repository.files, files[0].name)
    return [repository.files[name]] if name else []


def is_here(file: RemoteFile, target: Path, watcher: Watcher) -> bool:
    """Return whether the file is on disk with the right size and SHA-256. Raises LocalllmError."""
    try:
        if target.stat().st_size != file.size:
            return False
        return sha256_of(target, lambda done: watcher.checking(file.name, done, file.size)) == file.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LocalllmError(f"{target}: cannot be read: {error.strerror or error}") from None


def require_space(folder: Path, missing: list[tuple[RemoteFile, Path]]) -> None:
    """Raise LocalllmError if the disk has too little free space."""
    partial = sum(size_of(path) for _, target in missing for path in find_partials(target))
    nbytes = sum(file.size for file, _ in missing) - partial + SPARE
    disk = folder
    while not disk.exists():
        disk = disk.parent
    free = free_bytes(disk)
    if free < nbytes:
        raise LocalllmError(
            f"{disk}: the download needs {nbytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on this disk"
        )


@contextmanager
def remote_model(repository: Repository, files: list[RemoteFile]) -> Iterator[tuple[GGUFFile, int]]:
    """Open a model on the hub by its header; yield it and the count of bytes fetched.

    Raises the errors of Repository.receive and open_header_only.
    """
    by_name = {f"hf:{repository.name}/{file.name}": file for file in files}

    def fetch(name: str, start: int, end: int) -> bytes:
        return repository.read(by_name[name], start, end)

    with open_header_only({name: file.size for name, file in by_name.items()}, fetch) as (model, fetched):
        yield model, fetched


def fetch(
    repository: Repository, file: RemoteFile, target: Path, watcher: Watcher, bytes_before: int, total: int
) -> int:
    """Download one file; return the count of bytes received.

    bytes_before: bytes of the files downloaded before.  total: bytes of all files. A resumed file that fails
    verification is
    downloaded again from the start, once.
    """
    received = 0

    def reading(done: int) -> None:
        watcher.checking(file.name, done, file.size)

    with Download(target, file.size, file.sha256, reading) as partial:

        def take(piece: bytes) -> None:
            nonlocal received
            partial.write(piece)
            received += len(piece)
            watcher.receiving(file.name, bytes_before + partial.position, total)

        resumed = partial.position
        repository.receive(file, resumed, file.size, take)
        if resumed and not partial.is_right:
            partial.restart()
            repository.receive(file, 0, file.size, take)
        partial.finish(open_part)
    return received
