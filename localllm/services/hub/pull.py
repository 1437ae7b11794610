"""Download models from the Hugging Face hub into the models folder. Implements `localllm pull`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.arch import load_architecture
from localllm.errors import LocalllmError, ModelError, UsageError
from localllm.files.download import Download, compute_sha256, find_partials
from localllm.files.gguf.file import GGUFFile, map_split
from localllm.files.gguf.header_only import open_header_only
from localllm.files.gguf.kinds import get_kind
from localllm.files.models_folder import ENDING, choose_projector, get_models_folder, get_size, remove_empty_folders
from localllm.frozen import frozen
from localllm.services.hub.catalogue import HubReference, select_files
from localllm.services.hub.huggingface import HubRepository, RemoteFile
from localllm.system.files import find_name_problem, get_free_bytes

PEFT_WEIGHTS = "adapter_model.safetensors"
RESERVED_BYTES = 1 << 20  # bytes of the disk to leave free


class PullProgress:
    """Receives the progress of a pull; this base class ignores it."""

    def report_lookup(self, subject: str) -> None:
        """Report which metadata is being fetched."""

    def report_check(self, file: str, done: int, total: int) -> None:
        """Report how many bytes on disk have been verified."""

    def report_download(self, file: str, done: int, total: int) -> None:
        """Report how many bytes of all files have arrived."""

    def report_interruption(self, reason: str) -> None:
        """Report a broken connection, before the next attempt."""


@frozen
class PullResult:
    """The result of a pull.

    Attributes:
        path: path of the first file.  size: of all files.  received: downloaded bytes.
    """

    path: Path
    size: int
    received: int


def pull_model(reference: HubReference, watcher: PullProgress | None = None) -> PullResult:
    """Download and verify the missing files of a model and its projector.

    A file gets its final name when it is complete and has the hub's size and SHA-256, and a valid header. The
    architecture and the free disk space are checked before the download. Raises ModelError for a model that is not
    available, damaged or not supported, LocalllmError for a failing network or disk, UsageError if another process is
    pulling it, or if the operating system does not allow the file name.
    """
    watcher = watcher or PullProgress()
    watcher.report_lookup("the list of files")
    repository = HubRepository(reference.repository, watcher.report_interruption)
    files = (files_named := list_model_files(repository, reference)) + list_projectors(repository, files_named)
    for name in (*reference.repository.split("/"), *(part for file in files for part in file.name.split("/"))):
        if problem := find_name_problem(name):
            raise UsageError(f"{reference.repository}: {name}: {problem}")
    folder = get_models_folder() / reference.repository
    targets = [folder / file.name for file in files]
    missing = [
        (file, target) for file, target in zip(files, targets, strict=True) if not is_downloaded(file, target, watcher)
    ]
    if missing:
        require_space(folder, missing)
        watcher.report_lookup("the header")
        with open_remote_model(repository, files_named) as (model, _):
            require_usable(model)
    size, received = sum(file.size for file in files), 0
    bytes_done = size - sum(file.size for file, _ in missing)
    for file, target in missing:
        try:
            received += download_file(repository, file, target, watcher, bytes_done, size)
        finally:
            remove_empty_folders(target.parent)
        bytes_done += file.size
    GGUFFile.open(targets[0], needed=()).close()  # checks that the splits belong together
    return PullResult(targets[0], size, received)


def require_usable(model: GGUFFile) -> None:
    """Raise ModelError for a model that is not supported; accept adapters and control vectors."""
    if not get_kind(model.metadata):
        load_architecture(model)


def list_model_files(repository: HubRepository, reference: HubReference) -> list[RemoteFile]:
    """Return the files of a model or an adapter. Raises ModelError."""
    if PEFT_WEIGHTS in repository.files and not any(name.endswith(ENDING) for name in repository.files):
        whose, name = f"{reference.text} is a PEFT adapter, not a GGUF file", repository.name.partition("@")[0]
        raise ModelError(f"{whose}: download it with `hf download {name} --local-dir FOLDER`, then use --lora FOLDER")
    return [repository.files[name] for name in select_files(repository.files, reference)]


def list_projectors(repository: HubRepository, files: list[RemoteFile]) -> list[RemoteFile]:
    """Return a model's projector file, as a list that may be empty."""
    name = choose_projector(repository.files, files[0].name)
    return [repository.files[name]] if name else []


def is_downloaded(file: RemoteFile, target: Path, watcher: PullProgress) -> bool:
    """Return whether the file is on disk with the right size and SHA-256. Raises LocalllmError."""
    try:
        if target.stat().st_size != file.size:
            return False
        return compute_sha256(target, lambda done: watcher.report_check(file.name, done, file.size)) == file.sha256
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LocalllmError(
            f"{target}: cannot be read: {error.strerror or error}; make it readable, or remove it"
        ) from None


def require_space(folder: Path, missing: list[tuple[RemoteFile, Path]]) -> None:
    """Raise LocalllmError if the disk has too little free space."""
    partial = sum(get_size(path) for _, target in missing for path in find_partials(target))
    nbytes = sum(file.size for file, _ in missing) - partial + RESERVED_BYTES
    disk = folder
    while not disk.exists():
        disk = disk.parent
    free = get_free_bytes(disk)
    if free < nbytes:
        raise LocalllmError(
            f"{disk}: the download needs {nbytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on this disk"
        )


@contextmanager
def open_remote_model(repository: HubRepository, files: list[RemoteFile]) -> Iterator[tuple[GGUFFile, int]]:
    """Open a model on the hub by its header; yield it and the count of bytes fetched.

    Raises the errors of HubRepository.receive and open_header_only.
    """
    by_name = {f"hf:{repository.name}/{file.name}": file for file in files}

    def fetch(name: str, start: int, end: int) -> bytes:
        return repository.read(by_name[name], start, end)

    with open_header_only({name: file.size for name, file in by_name.items()}, fetch) as (model, fetched):
        yield model, fetched


def download_file(
    repository: HubRepository, file: RemoteFile, target: Path, watcher: PullProgress, bytes_before: int, total: int
) -> int:
    """Download one file; return the count of bytes received.

    bytes_before: bytes of the files downloaded before.  total: bytes of all files. A resumed file that fails
    verification is downloaded again from the start, once.
    """
    received = 0

    def reading(done: int) -> None:
        watcher.report_check(file.name, done, file.size)

    with Download(target, file.size, file.sha256, reading) as partial:

        def take(piece: bytes) -> None:
            nonlocal received
            partial.write(piece)
            received += len(piece)
            watcher.report_download(file.name, bytes_before + partial.position, total)

        resumed = partial.position
        repository.receive(file, resumed, file.size, take)
        if resumed and not partial.is_verified:
            partial.restart()
            repository.receive(file, 0, file.size, take)
        partial.finish(map_split)
    return received
