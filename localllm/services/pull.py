"""Brings models from the Hugging Face hub into the folder of models: the service behind `localllm pull`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.arch import architecture
from localllm.errors import LocalllmError, UsageError
from localllm.files.download import Download, find_partials, sha256_of
from localllm.files.gguf.file import GGUFFile, open_part
from localllm.files.gguf.header_only import open_header_only
from localllm.files.gguf.projectors import choose_projector
from localllm.files.models_folder import models_folder, remove_empty_folders, size_of
from localllm.frozen import frozen
from localllm.services.catalogue import HubReference, chosen
from localllm.services.hub import RemoteFile, Repository
from localllm.system.files import free_bytes, name_problem

SPARE = 1 << 20  # bytes of the disk that stay free


class Watcher:
    """Is told how a pull goes on; this one does not listen."""

    def looking(self, what: str) -> None:
        """At what is told of the model, before anything is kept."""

    def checking(self, file: str, done: int, total: int) -> None:
        """So many bytes of what is on the disk were read."""

    def receiving(self, file: str, done: int, total: int) -> None:
        """So many bytes of all files are there."""

    def interrupted(self, reason: str) -> None:
        """The connection broke; there will be another try."""


@frozen
class Pulled:
    """What a pull has brought. path: of the first file; received: bytes that came over the network; size: of all."""

    path: Path
    size: int
    received: int


def pull(reference: HubReference, watcher: Watcher | None = None) -> Pulled:
    """Bring the files of a model and its projector, if it has one, or what is missing of them, and check all of it.

    A file appears under its name when it is complete, has the size and SHA-256 that the hub says, and a header that
    makes sense. Before the first byte is fetched the architecture and the disk's free space are looked at. Raises
    ModelError for a model that the hub does not have or give, that is damaged or not supported, LocalllmError for a
    network or a disk that fails, UsageError if another process is pulling it, or no file can have its name here.
    """
    watcher = watcher or Watcher()
    watcher.looking("what there is")
    repository = Repository(reference.repository, watcher.interrupted)
    files = (own := files_of(repository, reference)) + projectors_of(repository, own)
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
        with remote_model(repository, own) as (model, _):
            architecture(model)
    size, received = sum(file.size for file in files), 0
    done = size - sum(file.size for file, _ in missing)
    for file, target in missing:
        try:
            received += fetch(repository, file, target, watcher, done, size)
        finally:
            remove_empty_folders(target.parent)
        done += file.size
    GGUFFile.open(targets[0], needed=()).close()  # files of a split model that belong together
    return Pulled(targets[0], size, received)


def files_of(repository: Repository, reference: HubReference) -> list[RemoteFile]:
    """Of a model. Raises ModelError."""
    return [repository.files[name] for name in chosen(repository.files, reference)]


def projectors_of(repository: Repository, files: list[RemoteFile]) -> list[RemoteFile]:
    """What the model of these files sees by: one file, or none."""
    name = choose_projector(repository.files, files[0].name)
    return [repository.files[name]] if name else []


def is_here(file: RemoteFile, target: Path, watcher: Watcher) -> bool:
    """Whether this very file was pulled before."""
    try:
        if target.stat().st_size != file.size:
            return False
        return sha256_of(target, lambda done: watcher.checking(file.name, done, file.size)) == file.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LocalllmError(f"{target}: cannot be read: {error.strerror or error}") from None


def require_space(folder: Path, missing: list[tuple[RemoteFile, Path]]) -> None:
    """Raise LocalllmError if the disk has not enough room for what is to come."""
    there = sum(size_of(path) for _, target in missing for path in find_partials(target))
    needed = sum(file.size for file, _ in missing) - there + SPARE
    disk = folder
    while not disk.exists():
        disk = disk.parent
    free = free_bytes(disk)
    if free < needed:
        raise LocalllmError(f"{disk}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free on this disk")


@contextmanager
def remote_model(repository: Repository, files: list[RemoteFile]) -> Iterator[tuple[GGUFFile, int]]:
    """A model on the hub, as far as its header goes, and how many bytes were fetched for it.

    Raises as Repository.receive and open_header_only.
    """
    by_name = {f"hf:{repository.name}/{file.name}": file for file in files}

    def fetch(name: str, start: int, end: int) -> bytes:
        return repository.read(by_name[name], start, end)

    with open_header_only({name: file.size for name, file in by_name.items()}, fetch) as (model, fetched):
        yield model, fetched


def fetch(repository: Repository, file: RemoteFile, target: Path, watcher: Watcher, before: int, total: int) -> int:
    """Bring one file; how many bytes were received. `before` bytes of `total` are there of all files.

    What an earlier process has left and proves to be wrong in the end is fetched again, once.
    """
    received = 0

    def reading(done: int) -> None:
        watcher.checking(file.name, done, file.size)

    with Download(target, file.size, file.sha256, reading) as partial:

        def take(piece: bytes) -> None:
            nonlocal received
            partial.write(piece)
            received += len(piece)
            watcher.receiving(file.name, before + partial.position, total)

        left = partial.position
        repository.receive(file, left, file.size, take)
        if left and not partial.is_right:
            partial.restart()
            repository.receive(file, 0, file.size, take)
        partial.finish(open_part)
    return received
