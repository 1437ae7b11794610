"""Test the hub's client: refusals, retries, and each byte once and in order."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors, utils

from localllm.errors import LocalllmError, ModelError
from localllm.services.hub import huggingface
from localllm.services.hub.huggingface import ConnectionBrokenError, HubRepository, RemoteFile, parse_first_byte

SHA = "0123456789abcdef" * 4
DATA = bytes(range(100))
FILE = RemoteFile("folder/a model.gguf", len(DATA), SHA)


@pytest.fixture
def repository(monkeypatch) -> HubRepository:
    """Return a repository whose list was not fetched; it records its waits and their reasons."""
    repository_made = HubRepository.__new__(HubRepository)
    repository_made.name, repository_made._commit, repository_made.told, repository_made.waits = (
        "tiny/Tiny",
        "c0ffee",
        [],
        [],
    )
    repository_made._on_break = repository_made.told.append
    monkeypatch.setattr(huggingface.time, "sleep", repository_made.waits.append)
    return repository_made


def http_error(status: int, kind: Callable[..., Exception] = errors.HfHubHTTPError) -> Exception:
    """Return the client's exception for a status."""
    return kind("it said so", response=SimpleNamespace(status_code=status, headers={}, request=None))


class Asked:
    """An action that fails with these exceptions, then works, and counts its calls."""

    def __init__(self, *failures: Exception):
        self.failures, self.tries = [*failures], 0

    def __call__(self) -> str:
        self.tries += 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"


# ---- refusals


PRIVATE = "the repository does not exist, or is private: set HF_TOKEN to a token with access"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(403, errors.GatedRepoError), "the repository is gated: accept its conditions on "
        "https://huggingface.co/tiny/Tiny, and"
         " set HF_TOKEN to your token"),
        (http_error(404, errors.RemoteEntryNotFoundError), "the hub lists a file that does not exist; try again"),
        (http_error(404, errors.RepositoryNotFoundError), "the repository does not exist on the hub"),
        (http_error(404), "the repository does not exist on the hub"),
        (http_error(401, errors.RepositoryNotFoundError), PRIVATE),
        (http_error(403, errors.RepositoryNotFoundError), PRIVATE),
        (http_error(401), PRIVATE),
        (http_error(403), "the hub denies access: set HF_TOKEN to a token that may read this repository"),
        (http_error(418), "the hub responded with HTTP status 418; check the name, or try again later"),
        (errors.HFValidationError("a//b"), "a repository's name must be OWNER/REPOSITORY; correct the name"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)  # fmt: skip
def test_permanent_refusals_are_raised_at_once(repository: Any, error: Exception, message: str):
    action = Asked(error)
    with pytest.raises(ModelError) as failure:
        repository._retry(action)
    assert (str(failure.value), action.tries) == (f"tiny/Tiny: {message}", 1)


def test_offline_mode_raises_at_once(repository: Any):
    action = Asked(errors.OfflineModeIsEnabled("offline"))
    with pytest.raises(LocalllmError, match="tiny/Tiny: HF_HUB_OFFLINE is set; unset it to download") as failure:
        repository._retry(action)
    assert (type(failure.value), action.tries, repository.waits) == (LocalllmError, 1, [])


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_temporary_errors_are_retried_three_times(repository: Any, status: int):
    """Retry the statuses that RFC 9110 (6585 for 429, 8470 for 425) calls temporary, with growing waits."""
    action = Asked(http_error(status), http_error(status))
    assert (repository._retry(action), action.tries) == ("done", 3)
    assert repository.told == [f"the hub responded with HTTP status {status}"] * 2
    assert repository.waits == [1, 2]
    action = Asked(*[http_error(status)] * 3)
    with pytest.raises(LocalllmError, match=f"tiny/Tiny: the hub responded with HTTP status {status}") as failure:
        repository._retry(action)
    assert type(failure.value) is LocalllmError and (action.tries, repository.waits) == (3, [1, 2, 1, 2])


@pytest.mark.parametrize("status", [400, 402, 405, 410, 416, 451, 501, 505])
def test_other_statuses_are_not_retried(repository: Any, status: int):
    action = Asked(http_error(status))
    with pytest.raises(ModelError, match=f"status {status}"):
        repository._retry(action)
    assert (action.tries, repository.waits) == (1, [])


def test_network_errors_are_retried_and_explained(repository: Any):
    action = Asked(errors.HTTPError("[Errno 111] Connection refused"))
    assert repository._retry(action) == "done"
    assert repository.told == ["the hub cannot be reached: Connection refused"]
    action = Asked(*[errors.HTTPError("[Errno -2] Name or service not known")] * 3)
    with pytest.raises(LocalllmError, match=r"cannot be reached: no network connection, or unknown host name$"):
        repository._retry(action)


# ---- what is listed


def entry(name: str, size: int | None, checksum: str = SHA) -> Any:
    large = None if size is None else SimpleNamespace(size=size, sha256=checksum)
    return SimpleNamespace(rfilename=name, lfs=large)


@pytest.mark.parametrize(
    ("info", "commit", "names"),
    [
        (SimpleNamespace(sha="c0", siblings=[entry("a", 1), entry("README.md", None), entry("../b", 1), entry("c", 2)]),
         "c0", ["a", "c"]),
        (SimpleNamespace(sha=None, siblings=None), "main", []),
    ],
)  # fmt: skip
def test_only_large_files_of_a_repository_are_listed(monkeypatch, info: Any, commit: str, names: list[str]):
    """Ask for sizes and checksums, with the user's timeout."""
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 12)
    api = SimpleNamespace(model_info=lambda *arguments, **named: asked.append((arguments, named)) or info)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    listed = HubRepository("tiny/Tiny")
    assert (listed._commit, [*listed.files]) == (commit, names)
    assert [file.name for file in listed.files.values()] == names
    HubRepository("tiny/Tiny@refs%2Fpr%2F1")
    assert asked == [
        (("tiny/Tiny",), {"revision": revision, "files_metadata": True, "timeout": 12})
        for revision in (None, "refs/pr/1")
    ]


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, AttributeError])
def test_a_server_that_is_no_hub_is_refused(monkeypatch, error: type[Exception]):
    def model_info(*arguments: object, **named: object) -> None:
        raise error("x")

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=model_info))
    monkeypatch.setattr(constants, "ENDPOINT", "http://else")
    with pytest.raises(LocalllmError, match=r"^tiny/Tiny: http://else does not respond like the Hugging Face hub$"):
        HubRepository("tiny/Tiny")


@pytest.mark.parametrize(
    ("name", "size", "checksum"),
    [
        ("../x.gguf", 1, SHA), ("a/../x.gguf", 1, SHA), ("/x.gguf", 1, SHA), ("a//x.gguf", 1, SHA),
        ("./x.gguf", 1, SHA),
        ("a\\x.gguf", 1, SHA), ("x\n.gguf", 1, SHA), ("x\x1b.gguf", 1, SHA), ("", 1, SHA), ("x.gguf", 0, SHA),
        ("x.gguf", -1, SHA), ("x.gguf", 1, SHA[1:]), ("x.gguf", 1, SHA + "0"), ("x.gguf", 1, SHA.upper()),
        ("x.gguf", 1, "../" + SHA[3:]),
    ],
)  # fmt: skip
def test_invalid_file_names_sizes_and_checksums_are_refused(name: str, size: int, checksum: str):
    assert not RemoteFile(name, size, checksum).is_safe
    assert RemoteFile("a.b/..x/ä x..gguf", 1, SHA).is_safe


# ---- bytes


@pytest.mark.parametrize(
    ("status", "headers", "first"),
    [
        (206, {"Content-Range": "bytes 5-99/100"}, 5),
        (206, {"Content-Range": "bytes 0-9/*"}, 0),
        (206, {"Content-Range": "bytes 70-99/*", "Content-Length": "30"}, 70),
        (200, {"Content-Length": "100"}, 0),
        (200, {}, 0),
        (200, {"Content-Range": "bytes 5-99/100", "Content-Length": "100"}, 0),
        (206, {"Content-Range": "bytes 5-99/101"}, 101),
        (200, {"Content-Length": "99"}, 99),
    ],
)
def test_the_first_byte_of_a_reply_is_parsed(status: int, headers: dict[str, str], first: int):
    """Follow RFC 9110, 14.4; another total size means another file."""
    answer = SimpleNamespace(status_code=status, headers=headers)
    if first >= 99:
        message = (
            f"folder/a model.gguf: the hub lists 100 bytes, but sent a file of {first}; run the same command again"
        )
        with pytest.raises(ModelError, match=message):
            parse_first_byte(answer, FILE)
    else:
        assert parse_first_byte(answer, FILE) == first


class Server:
    """A client session whose replies break off after given numbers of bytes."""

    def __init__(self, *cuts: int, piece: int = 7, has_ranges: bool = True):
        self.cuts, self.piece, self.has_ranges, self.asked, self.open = [*cuts], piece, has_ranges, list[Any](), 0

    @contextmanager
    def stream(self, method: str, url: str, headers: dict[str, str], timeout: float) -> Iterator[Any]:
        self.asked.append((method, url, headers["Range"], headers["Accept-Encoding"], timeout))
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", headers["Range"]).groups()
        begin, end = (int(first), int(last or 99) + 1) if self.has_ranges else (0, 100)
        reply_headers = (
            {"Content-Range": f"bytes {begin}-{end - 1}/100"} if self.has_ranges else {"Content-Length": "100"}
        )
        body, cut = DATA[begin:end], self.cuts.pop(0) if self.cuts else 100

        def raw() -> Iterator[bytes]:
            for start in range(0, min(cut, len(body)), self.piece):
                yield body[start : min(start + self.piece, cut)]
            if 0 <= cut < len(body):
                raise errors.HTTPError("it hung up")

        self.open += 1
        yield SimpleNamespace(status_code=206 if self.has_ranges else 200, headers=reply_headers, iter_raw=raw)
        self.open -= 1


@pytest.fixture
def serve(monkeypatch):
    """Return a function that replaces the hub's server."""
    monkeypatch.setattr(utils, "hf_raise_for_status", lambda answer: None)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 12)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "https://hub/{repo_id}/resolve/{revision}/{filename}")

    def put(server: Server) -> Server:
        monkeypatch.setattr(utils, "get_session", lambda: server)
        return server

    return put


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize(("start", "end"), [(0, 100), (0, 1), (99, 100), (7, 14), (13, 50), (40, 100), (5, 5)])
def test_read_requests_exactly_its_bytes(repository: Any, serve, start: int, end: int, has_ranges: bool):
    server = serve(Server(has_ranges=has_ranges))
    assert repository.read(FILE, start, end) == DATA[start:end]
    last = "" if end == 100 else str(end - 1)
    url = "https://hub/tiny/Tiny/resolve/c0ffee/folder/a%20model.gguf"
    assert server.asked == ([("GET", url, f"bytes={start}-{last}", "identity", 12)] if start < end else [])
    assert (server.open, repository.waits) == (0, [])


def test_a_broken_download_continues_where_it_stopped(repository: Any, serve):
    """Allow any number of breaks as long as bytes arrive, each byte once."""
    server = serve(Server(10, 0, 1, 20, 3, 0, 0, 5, piece=4))
    assert repository.read(FILE, 20, 90) == DATA[20:90]
    assert [asked[2] for asked in server.asked] == [
        f"bytes={start}-89" for start in (20, 30, 30, 31, 51, 54, 54, 54, 59)
    ]
    assert repository.told == ["the hub cannot be reached: it hung up"] * 8
    assert repository.waits == [0.5, 1, 0.5, 0.5, 0.5, 1, 2, 0.5], "a new byte begins the waits anew"


def test_six_tries_without_a_byte_give_up(repository: Any, serve):
    server, received = serve(Server(3, *[0] * 6)), []
    with pytest.raises(LocalllmError) as failure:
        repository.receive(FILE, 0, 100, received.append)
    assert str(failure.value) == (
        "tiny/Tiny: folder/a model.gguf: the hub cannot be reached: it hung up; run the same command again to resume"
    )
    assert (b"".join(received), len(server.asked), server.cuts) == (DATA[:3], 7, [])
    assert repository.waits == [0.5, 1, 2, 4, 8, 16]


def test_a_short_reply_is_retried(repository: Any, monkeypatch):
    """Detect a reply that ends early without an error."""
    parts = [DATA[:30], b"", DATA[30:]]
    monkeypatch.setattr(repository, "_stream_range", lambda file, start, end: iter([parts.pop(0)]))
    assert repository.read(FILE, 0, 100) == DATA
    assert repository.told == ["the hub sent fewer bytes than it announced"] * 2


def test_an_error_of_the_receiver_is_not_retried(repository: Any, serve):
    """Raise it at once, as for a full disk."""
    server = serve(Server())

    def full(piece: bytes) -> None:
        raise LocalllmError("full")

    with pytest.raises(LocalllmError, match=r"^full$"):
        repository.receive(FILE, 0, 100, full)
    assert len(server.asked) == 1 and issubclass(ConnectionBrokenError, Exception)
