"""Access the Hugging Face hub: repositories, and downloads that resume after broken connections.

HF_ENDPOINT, HF_TOKEN (or the token stored by `hf auth login`), HF_HUB_OFFLINE and the proxy variables work as in all
programs that use huggingface_hub, since this module uses its HTTP client. That client sends no tokens to redirected
addresses. Its own download function verifies no checksums and adds folders next to the files, so hub.pull writes the
files instead. Importing huggingface_hub takes 0.2 s: import it only when the network is needed.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote

from localllm.errors import LocalllmError, ModelError
from localllm.frozen import frozen
from localllm.services.hub.proxies import require_supported_proxies

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

MAX_ATTEMPTS = 6  # a download fails after this many attempts without a new byte
MAX_LIST_ATTEMPTS = 3  # attempts to list a repository: fewer, to report a missing network soon
WAIT, MAX_WAIT = 0.5, 16.0  # seconds before the next attempt: the first wait, doubled each time, and the limit
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)  # HTTP statuses that are worth another attempt
CHECKSUM = re.compile("[0-9a-f]{64}")
RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")

OnBreak = Callable[[str], None]  # called with the reason before another attempt
T = TypeVar("T")


class HttpResponse(Protocol):
    """The attributes of an HTTP response that this module uses; huggingface_hub's client differs by version."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]: ...

    def iter_raw(self) -> Iterator[bytes]: ...


@frozen
class RemoteFile:
    """A file of a repository; size in bytes, SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str

    @property
    def is_safe(self) -> bool:
        """Return whether the fields are valid, and the untrusted name stays within the repository's folder."""
        parts = self.name.split("/")
        return (
            self.name.isprintable()
            and "\\" not in self.name
            and not any(part in ("", ".", "..") for part in parts)
            and self.size > 0
            and bool(CHECKSUM.fullmatch(self.sha256))
        )


class ConnectionBrokenError(Exception):
    """A broken connection; another attempt may succeed."""


class HubRepository:
    """A repository, pinned to its current commit.

    Attributes:
        name: OWNER/REPOSITORY, with @REVISION (percent-encoded) unless it is main.
        files: its large files (Git LFS), by name.
    """

    def __init__(self, name: str, on_break: OnBreak = lambda reason: None):
        """Look up the repository.

        Raises ModelError if it does not exist or is not accessible, LocalllmError if the hub cannot be reached.
        """
        self.name, self._on_break = name, on_break
        require_supported_proxies()
        self._commit, self.files = self._retry(self._fetch_files)

    @property
    def _repository(self) -> str:
        return self.name.partition("@")[0]

    @property
    def _revision(self) -> str | None:
        return unquote(self.name.partition("@")[2]) or None

    def _fetch_files(self) -> tuple[str, dict[str, RemoteFile]]:
        """Return the commit and its files. Raises LocalllmError for an invalid response."""
        from huggingface_hub import HfApi, constants
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            info = HfApi().model_info(self._repository, revision=self._revision, files_metadata=True, timeout=timeout)
            files = [
                RemoteFile(file.rfilename, file.lfs.size, file.lfs.sha256) for file in info.siblings or () if file.lfs
            ]
            return info.sha or self._revision or "main", {file.name: file for file in files if file.is_safe}
        except (HfHubHTTPError, HFValidationError):
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise LocalllmError(
                f"{self.name}: {constants.ENDPOINT} does not respond like the Hugging Face hub"
            ) from None

    def _retry(self, action: Callable[[], T]) -> T:
        """Call an action, again after each transient failure."""
        failures = 0
        while True:
            try:
                return self._convert_errors(action)
            except ConnectionBrokenError as error:
                failures += 1
                if failures == MAX_LIST_ATTEMPTS:
                    raise LocalllmError(f"{self.name}: {error}") from None
                self._wait(error, failures)

    def _wait(self, error: ConnectionBrokenError, failures: int) -> None:
        self._on_break(str(error))
        time.sleep(min(MAX_WAIT, WAIT * 2**failures))

    def _convert_errors(self, action: Callable[[], T]) -> T:
        """Call an action; convert huggingface_hub's errors to ConnectionBrokenError, ModelError and LocalllmError."""
        from huggingface_hub.errors import (  # type: ignore[attr-defined]
            HfHubHTTPError,
            HFValidationError,
            HTTPError,
            OfflineModeIsEnabled,
        )

        try:
            return action()
        except OfflineModeIsEnabled:
            raise LocalllmError(f"{self.name}: HF_HUB_OFFLINE is set; unset it to download") from None
        except HFValidationError:
            raise ModelError(f"{self.name}: a repository's name must be OWNER/REPOSITORY; correct the name") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in TRANSIENT:
                raise ConnectionBrokenError(f"the hub responded with HTTP status {status}") from None
            raise ModelError(f"{self.name}: {self._describe_rejection(error)}") from None
        except HTTPError as error:
            raise ConnectionBrokenError(f"the hub cannot be reached: {describe_failure(error)}") from None

    def _describe_rejection(self, error: "HfHubHTTPError") -> str:
        """Return why the hub rejected a request, and what to do about it."""
        from huggingface_hub.errors import (
            GatedRepoError,
            RemoteEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        status, page = error.response.status_code, f"https://huggingface.co/{self._repository}"
        if isinstance(error, RevisionNotFoundError):
            return f"the repository has no revision {self._revision}"
        if isinstance(error, GatedRepoError):
            return f"the repository is gated: accept its conditions on {page}, and set HF_TOKEN to your token"
        if isinstance(error, RemoteEntryNotFoundError):
            return "the hub lists a file that does not exist; try again"
        if status == 404:
            return "the repository does not exist on the hub"
        if isinstance(error, RepositoryNotFoundError) or status == 401:
            return "the repository does not exist, or is private: set HF_TOKEN to a token with access"
        if status == 403:
            return "the hub denies access: set HF_TOKEN to a token that may read this repository"
        return f"the hub responded with HTTP status {status}; check the name, or try again later"

    def receive(self, file: RemoteFile, start: int, end: int, take: Callable[[bytes], object]) -> None:
        """Pass bytes `start` to end - 1 of a file to `take` in chunks, each once and in order.

        Resumes after a broken connection. Raises LocalllmError if the hub sends no more bytes, ModelError if the file
        differs or is not accessible, and whatever `take` raises.
        """
        position, failures = start, 0
        while position < end:
            position_before, problem = position, ConnectionBrokenError("the hub sent fewer bytes than it announced")
            try:
                for piece in self._stream_range(file, position, end):
                    take(piece)
                    position += len(piece)
            except ConnectionBrokenError as error:
                problem = error
            if position == end:
                return
            failures = failures + 1 if position == position_before else 0
            if failures == MAX_ATTEMPTS:
                raise LocalllmError(f"{self.name}: {file.name}: {problem}; run the same command again to resume")
            self._wait(problem, failures)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Return bytes `start` to end - 1 of a file. Raises the errors of `receive`."""
        pieces: list[bytes] = []
        self.receive(file, start, end, pieces.append)
        return b"".join(pieces)

    def _stream_range(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of one response. Raises ConnectionBrokenError, ModelError, LocalllmError."""
        from contextlib import ExitStack

        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self._repository, file.name, revision=self._commit)
        last = "" if end == file.size else end - 1
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={start}-{last}"}
        with ExitStack() as stack:

            def request() -> HttpResponse:
                session, timeout = get_session(), constants.HF_HUB_DOWNLOAD_TIMEOUT
                response = stack.enter_context(session.stream("GET", url, headers=headers, timeout=timeout))
                hf_raise_for_status(response)
                return response

            response = self._convert_errors(request)
            skip, pieces = start - parse_first_byte(response, file), response.iter_raw()
            while start < end and (piece := self._convert_errors(lambda: next(pieces, None))) is not None:
                skipped = min(skip, len(piece))
                skip -= skipped
                if piece := piece[skipped : skipped + end - start]:
                    start += len(piece)
                    yield piece


def describe_failure(error: Exception) -> str:
    """Return why there was no response, without the operating system's error number."""
    reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    no_name = re.search("Name or service not known|name resolution|nodename nor servname|getaddrinfo failed", reason)
    return "no network connection, or unknown host name" if no_name else reason


def parse_first_byte(response: HttpResponse, file: RemoteFile) -> int:
    """Return the offset at which a response begins. Raises ModelError if the file's size differs."""
    match = RANGE.fullmatch(response.headers.get("Content-Range", "")) if response.status_code == 206 else None
    total = match[2] if match else response.headers.get("Content-Length", "*")
    if total not in ("*", str(file.size)):
        raise ModelError(
            f"{file.name}: the hub lists {file.size} bytes, but sent a file of {total}; run the same command again"
        )
    return int(match[1]) if match else 0
