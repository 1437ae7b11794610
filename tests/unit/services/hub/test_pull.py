"""Pulling models from a server that speaks the hub's protocol, whatever happens on the way."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pexpect
import pytest
from hub_server import COMMIT, Hub
from models.projectors import projector, write_projector
from project import ROOT
from selection import everything
from system_calls import SAFE, SystemCalls
from tiny_model import write_tiny_model

from localllm.cli import open_model as pulling
from localllm.cli.commands import rm
from localllm.cli.terminal import output as terminal
from localllm.cli.terminal.render import size
from localllm.errors import LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files import download as partial_file
from localllm.files.download import Download
from localllm.files.gguf import header_only as hollow
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import choose_projector, find_projector, list_files, models_folder
from localllm.services.hub import huggingface as hub_service
from localllm.services.hub import pull as service
from localllm.services.hub.catalogue import HubReference, MissingError, models_on_disk, parse_reference, resolve
from localllm.services.hub.huggingface import RemoteFile
from localllm.services.hub.pull import Pulled, Watcher, pull
from localllm.services.inspection.fit import fit

REPOSITORY = "tiny/Tiny-GGUF"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[bytes, bytes]:
    """Two versions of a model."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_tiny_model(folder / f"{seed}.gguf", seed=seed).read_bytes() for seed in (0, 1))
    return first, second


@pytest.fixture
def hub(monkeypatch, tmp_path, models) -> Iterator[Hub]:
    """The hub, with one repository; waiting is short, and models are in a folder that is not there yet."""
    from huggingface_hub import constants

    with Hub().serving() as hub:
        hub.repositories[REPOSITORY] = {
            "README.md": b"# Tiny",
            "Tiny-Q4_K_M.gguf": models[0],
            "Tiny-Q8_0.gguf": models[1],
        }
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("LOCALLLM_MODELS", str(tmp_path / "models"))
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf/token"))
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
        monkeypatch.setattr(hub_service, "WAIT", 0.0)
        yield hub


def of(text: str) -> HubReference:
    reference = parse_reference(text)
    assert reference
    return reference


def pulled(quantization: str = ":Q4_K_M", watcher: Watcher | None = None) -> Pulled:
    return pull(of(f"hf:{REPOSITORY}{quantization}"), watcher)


def there() -> dict[str, bytes]:
    """All files in the folder of models, and their bytes."""
    return {name: (models_folder() / name).read_bytes() for name in list_files(models_folder())}


def partial_of(data: bytes, length: int, quantization: str = "Q4_K_M") -> Path:
    """What a killed process has left of a file: its first bytes."""
    target = models_folder() / REPOSITORY / f"Tiny-{quantization}.gguf"
    path = Download(target, len(data), hashlib.sha256(data).hexdigest()).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:length])
    return path


def test_a_plain_readable_folder(hub, models):
    done = pulled()
    assert done == Pulled(models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf", len(models[0]), len(models[0]))
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    assert not done.path.is_symlink()
    assert resolve(f"hf:{REPOSITORY}") == resolve(f"hf:{REPOSITORY}:q4_k_m") == str(done.path)
    assert any(f"/resolve/{COMMIT}/" in path for _, path, _, _ in hub.requests)


@pytest.mark.parametrize(("address", "revision"), [
    ("resolve/v1.0/Tiny-Q4_K_M.gguf", "v1.0"), ("resolve/v1.0/Tiny-Q4_K_M.gguf?download=true", "v1.0"),
    ("blob/v1.0/Tiny-Q4_K_M.gguf", "v1.0"), ("tree/v1.0", "v1.0"), ("tree/refs%2Fpr%2F1", "refs/pr/1"),
    ("tree/refs/pr/1", "refs/pr/1"), ("resolve/refs%2Fpr%2F1/Tiny-Q4_K_M.gguf", "refs/pr/1"),
])  # fmt: skip
def test_another_revision(hub, models, cli, address: str, revision: str):
    """An address means the revision in it; its files do not get in the way of main's."""
    hub.repositories[f"{REPOSITORY}@{revision}"] = {"Tiny-Q4_K_M.gguf": models[1]}
    main = pulled().path
    url = f"https://huggingface.co/{REPOSITORY}/{address}"
    with pytest.raises(MissingError):
        resolve(url)
    path = pull(of(url)).path
    assert path.read_bytes() == models[1] and main.read_bytes() == models[0] and path != main
    assert resolve(url) == str(path) and resolve(f"hf:{REPOSITORY}") == str(main)
    assert resolve(f"hf:{REPOSITORY}@{revision.replace('/', '%2F')}:Q4_K_M") == str(path)
    names = {model.name for model in models_on_disk()}
    assert len(names) == 2 and {resolve(name) for name in names} == {str(path), str(main)}


def test_a_revision_that_there_is_not(hub):
    with pytest.raises(ModelError, match=r"tiny/Tiny-GGUF@v9: the repository has no revision v9"):
        pull(of(f"https://huggingface.co/{REPOSITORY}/tree/v9"))


@pytest.mark.parametrize("address", ["tree/main", "blob/main/Tiny-Q4_K_M.gguf", "resolve/main/Tiny-Q4_K_M.gguf", ""])
def test_addresses_of_main(hub, address: str):
    assert of(f"https://huggingface.co/{REPOSITORY}/{address}").repository == REPOSITORY


def test_what_is_there_is_checked_and_not_fetched_again(hub, models):
    path = pulled().path
    hub.requests.clear()
    assert pulled().received == 0
    assert [path for _, path, _, _ in hub.requests if "resolve" in path] == []
    path.write_bytes(models[1][:-1] + b"!")  # as long as the right one
    assert pulled().received == len(models[0])
    assert path.read_bytes() == models[0]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_broken_connections(hub, models, has_ranges):
    hub.has_ranges = has_ranges
    length = len(models[0])
    # Without ranges the server starts anew each time, so only what comes later than before is new.
    hub.cuts = [length, 1000, 0, 70_000, 200_001, length - 1] if has_ranges else [length, 1000, 0, 70_000, 200_001]
    reasons: list[str] = []
    watcher = Watcher()
    watcher.interrupted = reasons.append
    assert pulled(watcher=watcher).received == length
    assert len(reasons) >= 4
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for _, _, text, _ in hub.requests if text]
    assert {1000, 71_000} <= set(starts) if has_ranges else {1000, 70_000} <= set(starts)


def test_a_connection_that_breaks_often_but_gets_on(hub, models):
    """Only tries without a new byte count, and only those in a row."""
    hub.cuts = [len(models[0]), *[3000] * 8, *[0, 0, 3000] * 4]
    assert pulled().received == len(models[0])
    hub.cuts = [len(models[1]), *[0] * 6]
    with pytest.raises(LocalllmError, match="same command again to resume"):
        pulled(":Q8_0")
    assert not hub.cuts, "six tries"


def test_what_came_is_on_the_disk_before_the_file_has_its_name(hub, models, monkeypatch):
    partial_of(models[0], 1000)
    calls = SystemCalls(monkeypatch)
    assert calls.of(pulled().path) == SAFE


def test_a_server_that_is_busy(hub, models):
    hub.api_statuses, hub.statuses = [503, 429], [0, 503, 500, 429]
    assert pulled().received == len(models[0])


def test_a_connection_that_never_gets_through(hub, models):
    hub.cuts = [len(models[0]), 1000, *[0] * 50]
    with pytest.raises(LocalllmError, match="run the same command again to resume") as failure:
        pulled()
    assert failure.value.exit_code == 1
    ((name, begun),) = there().items()
    assert name.endswith(".partial") and begun == models[0][:1000]
    hub.cuts = []
    assert pulled().received == len(models[0]) - 1000
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_no_server(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LocalllmError, match="cannot be reached") as failure:
        pulled()
    assert (failure.value.exit_code, there()) == (1, {})


def test_slow_bytes_and_a_timeout(hub, models, monkeypatch):
    from huggingface_hub import constants

    hub.pause = 0.01
    assert pulled().received == len(models[0])
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(hub_service, "TRIES", 2)
    hub.pause = 0.2
    with pytest.raises(LocalllmError, match="cannot be reached"):
        pulled(":Q8_0")


@pytest.mark.parametrize("wrong", ["checksum", "size", "body", "header"])
def test_what_is_wrong_leaves_nothing(hub, models, wrong):
    name, data = "Tiny-Q4_K_M.gguf", models[0]
    if wrong == "checksum":
        hub.checksums[name] = "0" * 64
    elif wrong == "size":
        hub.sizes[name] = len(data) + 1
    elif wrong == "body":
        hub.bodies[name] = data[:-1] + bytes([data[-1] ^ 1])
    else:
        hub.repositories[REPOSITORY][name] = b"<!doctype html>" + data[15:]
    with pytest.raises(ModelError) as failure:
        pulled()
    assert "\n" not in str(failure.value) and failure.value.exit_code == 3
    assert not models_folder().exists() or list(models_folder().iterdir()) == []


def test_an_earlier_file_stays_until_the_new_one_is_whole_and_right(hub, models):
    path = pulled().path
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = models[1]
    hub.bodies["Tiny-Q4_K_M.gguf"] = models[1][:-1] + bytes([models[1][-1] ^ 1])
    with pytest.raises(ModelError, match="SHA-256"):
        pulled()
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    hub.bodies = {}
    pulled()
    assert path.read_bytes() == models[1]


def test_what_was_left_and_is_wrong_is_fetched_again(hub, models):
    partial_of(bytes(len(models[0])), 100_000).replace(partial_of(models[0], 0))
    assert pulled().received == len(models[0]) - 100_000 + len(models[0])
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_what_was_left_of_another_version_goes(hub, models):
    partial_of(models[1], 1000)
    assert pulled().received == len(models[0])
    assert there() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_only_one_process_pulls_a_file(hub, models):
    path = partial_of(models[0], 1000)
    with (
        Download(
            models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf", len(models[0]), hashlib.sha256(models[0]).hexdigest()
        ),
        pytest.raises(UsageError, match="another localllm is pulling this file"),
    ):
        pulled()
    assert path.read_bytes() == models[0][:1000]


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_a_file_that_another_process_finishes_while_it_is_opened(tmp_path, monkeypatch, models, is_begun_again):
    """It has its name then: what this one writes goes to a new file. Perhaps somebody has begun that already."""
    target, lock = tmp_path / "model.gguf", partial_file.lock
    begun = Download(target, len(models[0]), hashlib.sha256(models[0]).hexdigest())
    begun.path.write_bytes(models[0])

    def late(descriptor: int) -> bool:
        if not target.exists():
            begun.path.replace(target)
            if is_begun_again:
                begun.path.write_bytes(models[0][:7])
        return lock(descriptor)

    monkeypatch.setattr(partial_file, "lock", late)
    with begun:
        assert begun.position == (7 if is_begun_again else 0)
        begun.write(b"something else")
    assert target.read_bytes() == models[0]
    assert begun.path.read_bytes().endswith(b"something else")


def test_tokens_go_to_the_hub_only(hub, monkeypatch):
    hub.gated.add(REPOSITORY)
    with pytest.raises(ModelError, match=f"gated: accept its conditions on https://huggingface.co/{REPOSITORY}"):
        pulled()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="gated"):
        pulled()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pulled()
    for _, path, _, authorization in hub.requests[-5:]:
        assert authorization == (None if "signature" in path else f"Bearer {hub.token}")


def test_missing_repositories_files_and_quantizations(hub, monkeypatch):
    for text, message in (
        ("hf:tiny/none", "no such repository, or it is private"),
        (f"hf:{REPOSITORY}:Q5_0", "no Q5_0; available: Q4_K_M, Q8_0"),
        (f"hf:{REPOSITORY}/Tiny-Q5_0.gguf", "no matching GGUF file"),
    ):
        with pytest.raises(ModelError, match=message) as failure:
            pull(of(text))
        assert failure.value.exit_code == 3
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(ModelError, match=r"the hub has no such repository$"):
        pull(of("hf:tiny/none"))
    with pytest.raises(UsageError, match="expected hf:OWNER/REPOSITORY"):
        parse_reference("hf:nothing")
    assert there() == {}


def test_offline(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocalllmError, match="HF_HUB_OFFLINE is set"):
        pulled()
    assert hub.requests == []


def test_a_disk_that_is_too_small_is_found_before(hub, monkeypatch):
    monkeypatch.setattr(service, "SPARE", 1 << 60)
    with pytest.raises(LocalllmError, match=r"GB needed, but only .* GB free on this disk"):
        pulled()
    assert hub.sent == 0


@pytest.mark.parametrize("spare", [0, -1])
def test_what_has_come_already_needs_no_room(hub, monkeypatch, models, spare):
    """Of this version of the file or of an earlier one, which goes."""
    partial_of(models[0], 100_000)
    partial_of(models[1], 50_000)
    free = len(models[0]) - 150_000 + (1 << 20) + spare  # a megabyte stays free
    monkeypatch.setattr(service, "free_bytes", lambda folder: free)
    if spare < 0:
        with pytest.raises(LocalllmError, match="GB needed"):
            pulled()
        assert hub.sent == 0
    else:
        assert pulled().received == len(models[0]) - 100_000


def test_a_disk_that_fills_up(hub, monkeypatch, models):
    def full(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(28, "No space left on device")

    partial_of(models[0], 1000)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LocalllmError, match="cannot be written: No space left on device"):
        pulled()
    assert list(there().values()) == [models[0][:1000]]


def test_what_is_not_supported_is_found_by_its_header(hub, models):
    strange = models[0].replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lamal")
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = strange + bytes(16 << 20)
    with pytest.raises(ModelError):
        pulled()
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = strange
    with pytest.raises(UnsupportedError, match="architecture lamal is not supported"):
        pulled()
    assert there() == {}


def split(path: Path, parts: int) -> dict[str, bytes]:
    """A model as several files, by name."""
    from localllm.files.gguf.writer import OutputTensor, Packed, write_gguf

    found = {}
    with GGUFFile.open(path) as file:
        packed = {key: Packed(value) for key, value in file.packed.items()}
        tensors = list(file.tensors.values())
        for number in range(parts):
            mine = tensors[number::parts]
            numbers = {"split.no": number, "split.count": parts, "split.tensors.count": len(tensors)}
            metadata = (packed if number == 0 else {}) | numbers
            name = f"Tiny-Q6_K-{number + 1:05d}-of-{parts:05d}.gguf"
            write_gguf(
                path.with_name(name), metadata, [OutputTensor(t.name, t.format, t.shape, (t.data,)) for t in mine]
            )
            found[name] = path.with_name(name).read_bytes()
    return found


def test_a_split_model(hub, models, tmp_path):
    path = tmp_path / "whole.gguf"
    path.write_bytes(models[0])
    parts = split(path, 3)
    hub.repositories[REPOSITORY] |= parts
    done = pulled(":Q6_K")
    assert there() == {f"{REPOSITORY}/{name}": data for name, data in parts.items()}
    assert resolve(f"hf:{REPOSITORY}:Q6_K") == str(done.path)
    (models_folder() / REPOSITORY / list(parts)[1]).unlink()
    with pytest.raises(ModelError, match="localllm pull"):
        resolve(f"hf:{REPOSITORY}:Q6_K")
    assert pulled(":Q6_K").received == len(list(parts.values())[1])
    del hub.repositories[REPOSITORY][list(parts)[2]]
    with pytest.raises(ModelError, match="lacks parts of Tiny-Q6_K"):
        pulled(":Q6_K")


@pytest.fixture
def seen(hub, tmp_path) -> dict[str, bytes]:
    """Projectors that the repository has, too."""
    path = write_projector(projector("llava"), tmp_path / "mmproj.gguf")
    found = {f"mmproj-Tiny-{format}.gguf": path.read_bytes() for format in ("BF16", "F32", "f16", "Q8_0")}
    hub.repositories[REPOSITORY] |= found
    return found


def test_a_projector_comes_with_a_model(hub, models, seen):
    """One of several, whatever the quantization; not that of another folder, and not again."""
    whole = len(models[0]) + len(seen["mmproj-Tiny-f16.gguf"])
    done = pulled()
    assert (done.path.name, done.size, done.received) == ("Tiny-Q4_K_M.gguf", whole, whole)
    assert sorted(there()) == [f"{REPOSITORY}/{name}" for name in ("Tiny-Q4_K_M.gguf", "mmproj-Tiny-f16.gguf")]
    assert find_projector(str(done.path)).endswith("mmproj-Tiny-f16.gguf")
    assert pulled().received == 0 and pulled(":Q8_0").received == len(models[1])
    find_projector(str(done.path))
    (models_folder() / REPOSITORY / "mmproj-Tiny-f16.gguf").unlink()
    del hub.repositories[REPOSITORY]["mmproj-Tiny-f16.gguf"]
    assert pulled().received == len(seen["mmproj-Tiny-BF16.gguf"])


def test_which_projector_is_brought():
    names = ["a/mmproj-F16.gguf", "mmproj-other-F16.gguf", "mmproj-one-Q8_0.gguf", "README.md", "mmproj-one-F32.gguf"]
    assert choose_projector(names, "one-Q4_K_M.gguf") == "mmproj-one-Q8_0.gguf"
    assert choose_projector(names, "b/one-Q4_K_M.gguf") is None
    assert choose_projector(names, "a/one-Q4_K_M.gguf") == "a/mmproj-F16.gguf"


def test_a_damaged_projector_is_not_kept(hub, models):
    hub.repositories[REPOSITORY]["mmproj-Tiny-F16.gguf"] = b"GGUF"
    with pytest.raises(ModelError, match="mmproj-Tiny-F16"):
        pulled()
    assert list(there()) == [f"{REPOSITORY}/Tiny-Q4_K_M.gguf"]


def test_fit_and_rm_count_a_projector(cli, hub, models, seen, monkeypatch):
    """As much before it is here as behind; the last model of the folder takes it along."""
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    facts, name = fit(f"hf:{REPOSITORY}:Q4_K_M"), f"hf:{REPOSITORY}:Q4_K_M"
    assert facts["projector_bytes"] == len(seen["mmproj-Tiny-f16.gguf"]) and there() == {}
    pulled(), pulled(":Q8_0")
    assert fit(name)["projector_bytes"] == facts["projector_bytes"]
    assert cli("rm", name, "--force")[0] == 0
    assert sorted(there()) == [f"{REPOSITORY}/{name}" for name in ("Tiny-Q8_0.gguf", "mmproj-Tiny-f16.gguf")]
    (models_folder() / REPOSITORY / "mmproj-Tiny-BF16.gguf.0123456789abcdef.partial").write_bytes(b"GG")
    assert cli("rm", f"hf:{REPOSITORY}:Q8_0", "--force")[0] == 0 and there() == {}


def test_hostile_names_lead_nowhere(hub, models):
    hub.repositories["tiny/evil"] = {"../../../evil-Q4_K_M.gguf": models[0], "/tmp/a-Q8_0.gguf": models[0]}
    with pytest.raises(ModelError, match="no matching GGUF file"):
        pull(of("hf:tiny/evil"))
    for checksum in ("../../../../evil" + "0" * 48, "0" * 63, "é" * 64):
        hub.checksums["Tiny-Q4_K_M.gguf"] = checksum
        with pytest.raises(ModelError, match="no Q4_K_M; available: Q8_0"):
            pulled()
    assert there() == {}


@pytest.mark.parametrize("answer", [b"<html>log in to this network</html>", b"[]", b'{"id": 3}', b'{"siblings": [{}]}'])
def test_a_server_that_is_no_hub(hub, answer):
    hub.api_answer = answer
    with pytest.raises(LocalllmError) as failure:
        pulled()
    assert "\n" not in str(failure.value)
    assert there() == {}


def test_waits_are_doubled_up_to_a_limit(monkeypatch):
    waits, reasons = [], []
    monkeypatch.setattr(hub_service, "WAIT", 0.5)
    monkeypatch.setattr(hub_service.time, "sleep", waits.append)
    repository = SimpleNamespace(_on_break=reasons.append)
    for failures in range(1, 8):
        hub_service.Repository._wait(repository, hub_service.BrokenError("it hung up"), failures)
    assert waits == [1, 2, 4, 8, 16, 16, 16] and reasons == ["it hung up"] * 7


def test_fit_of_a_model_on_the_hub_reads_the_header_only(hub, models, monkeypatch):
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    monkeypatch.setattr(hollow, "FIRST", 1 << 12)
    facts = fit(f"hf:{REPOSITORY}:Q4_K_M")
    assert there() == {}
    assert facts["fetched_bytes"] == hub.sent < len(models[0]) / 4
    assert len([path for _, path, _, _ in hub.requests if "signature" in path]) > 1  # so many pieces
    local = fit(str(pulled().path))
    assert {**facts, **dict.fromkeys(("model", "path", "fetched_bytes", "available_bytes"))} == {
        **local,
        **dict.fromkeys(("model", "path", "fetched_bytes", "available_bytes")),
    }


# Forks a process for each line of stdin, which it kills after so many seconds: it has imported everything before.
KILLER = """
import os, sys, time
import huggingface_hub.hf_api, localllm.arch.families.llama
from localllm.services.hub.catalogue import parse_reference
from localllm.services.hub.pull import pull
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        pull(parse_reference(sys.argv[1]))
        os._exit(0)
    end, ended = time.monotonic() + float(line), False
    while not ended and time.monotonic() < end:
        time.sleep(0.001)
        ended = os.waitpid(child, os.WNOHANG)[0] == child
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    print("killed", flush=True)
"""


@pytest.mark.sampled
@pytest.mark.slow
def test_kill_at_any_moment(hub, models, tmp_path):
    """kill -9, again and again: a new start goes on and completes, nothing is left over, nothing earlier is lost.

    Every time that a pull was finished there is another version of the file to be pulled.
    """
    command = [sys.executable, "-c", KILLER, f"hf:{REPOSITORY}:Q4_K_M"]
    (tmp_path / "temporary").mkdir()
    places = {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    least = 200 if everything() else 20
    generator, versions, kills, finished, begun = random.Random(least), list(models), 0, 0, 0
    target = models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf"
    hub.pause, longest = 0.02, 0.2
    with subprocess.Popen(command, env=os.environ | places, stdin=-1, stdout=-1, text=True, bufsize=1) as killer:
        assert killer.stdin and killer.stdout
        while kills < least or not (finished and begun):  # how much a process does in a moment nobody knows
            kills += 1
            assert kills < 10 * least
            longest *= 1 + (kills % least == 0)  # on a busy machine nothing may have come so far
            hub.repositories[REPOSITORY][target.name] = versions[0]
            killer.stdin.write(f"{generator.uniform(0, longest) * (1 + kills % 4)}\n")
            assert killer.stdout.readline() == "killed\n"
            begun += any(name.endswith(".partial") for name in there())
            if finished or target.exists():
                assert target.read_bytes() in versions
                if target.read_bytes() == versions[0]:
                    finished += 1
                    versions.reverse()
        killer.stdin.close()
    print(f"{kills} kills: {finished} after the end, {begun} when something had come")
    left = [path.read_bytes() for path in (tmp_path / "temporary").iterdir()]
    assert all(content in (b"", b"blat") for content in left), left  # Python tries its folder by such a file, once
    hub.pause = 0
    wanted = hub.repositories[REPOSITORY][target.name]
    pulled()
    assert there() == {f"{REPOSITORY}/{target.name}": wanted}


# ---- what is done in which order, without a hub


@pytest.fixture
def steps(monkeypatch, tmp_path) -> list[object]:
    """What is done of a pull of three files, of which the second is here; nothing is fetched or opened."""
    done = list[object]()
    files = {name: RemoteFile(name, size, "0" * 64) for name, size in (("a/1.gguf", 10), ("2.gguf", 20), ("p.gguf", 5))}

    class Opened:
        @contextmanager
        def model(self, repository: object, own: list[RemoteFile]) -> Iterator[tuple[str, int]]:
            done.append(("header", [file.name for file in own]))
            yield "model", 0

    monkeypatch.setattr(service, "Repository", lambda name, on_break: done.append(name) or SimpleNamespace(files=files))
    monkeypatch.setattr(service, "files_of", lambda repository, reference: [*files.values()][:2])
    monkeypatch.setattr(service, "projectors_of", lambda repository, own: [files["p.gguf"]])
    monkeypatch.setattr(service, "is_here", lambda file, target, watcher: file.name == "2.gguf")
    monkeypatch.setattr(service, "require_space", lambda folder, missing: done.append([f.name for f, _ in missing]))
    monkeypatch.setattr(service, "remote_model", Opened().model)
    monkeypatch.setattr(service, "architecture", lambda model: done.append(f"may {model}"))
    monkeypatch.setattr(service, "remove_empty_folders", lambda folder: done.append(("tidied", folder.name)))
    monkeypatch.setattr(service, "models_folder", lambda: tmp_path)

    def fetch(repository: object, file: RemoteFile, target: Path, watcher: Watcher, before: int, total: int) -> int:
        done.append((target.relative_to(tmp_path).as_posix(), before, total))
        return file.size - 1

    def opened(path: Path, needed: object) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: done.append((path.name, needed)))

    monkeypatch.setattr(service, "fetch", fetch)
    monkeypatch.setattr(service.GGUFFile, "open", opened)
    return done


def test_what_a_pull_does(steps, tmp_path):
    watcher = Watcher()
    watcher.looking = lambda what: steps.append(f"looking at {what}")  # type: ignore[method-assign]
    found = pull(of("hf:tiny/T:x"), watcher)
    assert found == Pulled(tmp_path / "tiny/T/a/1.gguf", 35, 13)
    assert steps == [
        "looking at what there is", "tiny/T", ["a/1.gguf", "p.gguf"], "looking at the header",
        ("header", ["a/1.gguf", "2.gguf"]), "may model", ("tiny/T/a/1.gguf", 20, 35), ("tidied", "a"),
        ("tiny/T/p.gguf", 30, 35), ("tidied", "T"), ("1.gguf", ()),
    ]  # fmt: skip


def test_a_pull_of_what_is_here_asks_for_no_bytes(steps, monkeypatch):
    monkeypatch.setattr(service, "is_here", lambda *given: True)
    assert pull(of("hf:tiny/T:x")).received == 0 and steps == ["tiny/T", ("1.gguf", ())]


def test_names_that_no_file_can_have_here(steps, monkeypatch):
    """Before anything is fetched, which of them it is."""
    monkeypatch.setattr(service, "name_problem", lambda name: "is odd" if name == "p.gguf" else None)
    with pytest.raises(UsageError, match=r"^tiny/T: p\.gguf: is odd$"):
        pull(of("hf:tiny/T:x"))
    assert steps == ["tiny/T"]


def test_a_failure_leaves_no_empty_folder(steps, monkeypatch):
    def fails(*given: object) -> int:
        raise LocalllmError("broken")

    monkeypatch.setattr(service, "fetch", fails)
    with pytest.raises(LocalllmError, match="broken"):
        pull(of("hf:tiny/T:x"))
    assert steps[-1] == ("tidied", "a")


def test_what_is_here(tmp_path):
    """By size and hash; a file of another size is not read."""
    target, heard = tmp_path / "x", list[object]()
    watcher = Watcher()
    watcher.checking = lambda *told: heard.append(told)  # type: ignore[method-assign]
    file = RemoteFile("folder/x", 3, hashlib.sha256(b"abc").hexdigest())
    assert not service.is_here(file, target, watcher)
    for data, found, told in ((b"ab", False, 0), (b"abcd", False, 0), (b"abd", False, 1), (b"abc", True, 1)):
        heard.clear()
        target.write_bytes(data)
        assert service.is_here(file, target, watcher) is found and heard == [("folder/x", 3, 3)] * told
    with pytest.raises(LocalllmError, match="cannot be read") if os.name == "posix" else nullcontext():
        service.is_here(file, target / "y", watcher)


@pytest.mark.parametrize(("free", "fits"), [(35 - 4 + 100, True), (35 - 4 + 99, False)])
def test_room_for_what_is_to_come(monkeypatch, tmp_path, free: int, fits: bool):
    """Less what has come of it before, and something more; of the disk that the first folder is on."""
    asked = list[Path]()
    monkeypatch.setattr(service, "SPARE", 100)
    monkeypatch.setattr(service, "free_bytes", lambda disk: asked.append(disk) or free)
    monkeypatch.setattr(service, "find_partials", lambda target: [target] if target.name == "a" else [])
    monkeypatch.setattr(service, "size_of", lambda path: 4)
    missing = [(RemoteFile(name, size, "0" * 64), tmp_path / name) for name, size in (("a", 10), ("b", 25))]
    if fits:
        service.require_space(tmp_path / "none" / "deeper", missing)
    else:
        with pytest.raises(
            LocalllmError, match=rf"{re.escape(str(tmp_path))}: 0\.00 GB needed, but only 0\.00 GB free"
        ):
            service.require_space(tmp_path / "none" / "deeper", missing)
    assert asked == [tmp_path]


# ---- the command line


def test_pull_list_run_rm(cli, hub, models):
    name, path = f"hf:{REPOSITORY}:Q4_K_M", models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf"
    assert cli("pull", name) == (0, f"{path}\n", "")
    assert cli("pull", name) == (0, f"{path}\n", "")
    code, out, _ = cli("list", "--json")
    (listed,) = json.loads(out)["models"]
    assert (code, listed["name"], listed["path"], listed["quantization"]) == (0, name, str(path), "Q4_K_M")
    assert (listed["bytes"], listed["complete"], listed["files"]) == (len(models[0]), True, [str(path)])
    code, out, _ = cli("list")
    assert out.splitlines()[1].split() == [name, *size(len(models[0])).split(), "Q4_K_M", str(path)]
    _, by_name, _ = cli("run", name, "-p", "hello", "--temp", "0", "-n", "3")
    assert by_name and cli("run", path, "-p", "hello", "--temp", "0", "-n", "3")[1] == by_name
    assert cli("inspect", name, "--json")[:2] == cli("inspect", path, "--json")[:2]
    assert cli("tokenize", name, "hello")[1] == cli("tokenize", path, "hello")[1]
    code, _, err = cli("rm", name)
    assert (code, path.exists()) == (2, True) and "--force" in err
    assert cli("rm", name, "--force")[0] == 0
    assert there() == {} and not path.parent.parent.exists()
    code, _, err = cli("run", name, "-p", "hello")
    assert (code, err) == (3, f"localllm: error: {name}: not on this computer; `localllm pull {name}` gets it\n")


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 3), (b"\n", 3), (b"", 3)])
def test_on_a_terminal_a_missing_model_can_be_pulled(cli, hub, monkeypatch, answer, code):
    monkeypatch.setattr(pulling, "is_terminal", lambda stream: True)
    found, _, err = cli("inspect", f"hf:{REPOSITORY}:Q4_K_M", stdin=answer)
    assert found == code
    assert f"hf:{REPOSITORY}:Q4_K_M is not on this computer. Pull it? [y/N] " in err
    assert bool(there()) == (code == 0)


@pytest.mark.parametrize(("answer", "stays"), [(b"yes\n", False), (b"no\n", True), (b"", True)])
def test_on_a_terminal_rm_asks(cli, hub, models, monkeypatch, answer, stays):
    monkeypatch.setattr(rm, "is_terminal", lambda stream: True)
    pulled()
    code, out, err = cli("rm", f"hf:{REPOSITORY}", stdin=answer)
    assert (code, out, bool(there())) == (0, "", stays)
    assert f"Remove hf:{REPOSITORY}:Q4_K_M ({size(len(models[0]))}, " in err


def test_fit_on_the_command_line(cli, hub, monkeypatch):
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    name = f"hf:{REPOSITORY}:Q8_0"
    facts = json.loads(cli("fit", name, "--json")[1])
    code, out, err = cli("fit", name)
    assert (code, err, there()) == (0, "", {})
    assert out.endswith("It fits, with its whole context of 512 tokens.\n")
    assert facts["path"] == f"hf:{REPOSITORY}/Tiny-Q8_0.gguf" and facts["longest"] == dict.fromkeys(
        fit_service.TYPES, 512
    )
    monkeypatch.setattr(fit_service, "available_memory", lambda mapped=0: 1000)
    out = cli("fit", name)[1]
    assert "too much" in out and out.endswith("This model does not fit.\n")
    needed = fit_service.WORKING + facts["weight_bytes"]
    monkeypatch.setattr(fit_service, "available_memory", lambda mapped=0: needed + 100 * (2 * 2 * 2 * 16 * 2))
    assert "It fits with 100 tokens (f16), " in cli("fit", name)[1]


def test_errors_are_one_line(cli, hub, monkeypatch):
    hub.gated.add(REPOSITORY)
    for arguments, code in (
        (("pull", "hf:tiny/none"), 3),
        (("pull", f"hf:{REPOSITORY}:Q5_0"), 3),
        (("pull", f"hf:{REPOSITORY}:Q8_0"), 3),
        (("fit", f"hf:{REPOSITORY}:Q8_0"), 3),
        (("pull", "nothing"), 3),
        (("pull", "guide"), 2),
        (("pull", "hf:x"), 2),
        (("rm", "nothing"), 3),
        (("fit", "nothing"), 3),
    ):
        found, out, err = cli(*arguments)
        assert (found, out, err.count("\n")) == (code, "", 1), err
    monkeypatch.setattr(service, "SPARE", 1 << 60)
    hub.gated.clear()
    assert cli("pull", f"hf:{REPOSITORY}")[0] == 1


def test_progress_is_shown_on_a_terminal_only(cli, hub, monkeypatch, models):
    partial_of(models[0], 1000)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr(pulling, "LEAST", 0)
    hub.cuts = [len(models[0]), 200_000]
    code, _, err = cli("pull", f"hf:{REPOSITORY}")
    assert code == 0
    whole = size(len(models[0]))
    for text in (
        f"checking 1.0 kB of {whole}: Tiny-Q4_K_M.gguf",
        f"{whole} of {whole}, ",
        "trying again",
        "0:00 to go",
    ):
        assert text in err
    assert "\n" not in err.removesuffix("\n")


@pytest.fixture
def spawn(hub, tmp_path):
    """The program on a terminal of so many columns: spawn(columns, arguments...)."""

    def start(columns: int, *arguments: str) -> pexpect.spawn:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "localllm", *arguments]
        size = (24, columns)
        child = pexpect.spawn(command[0], command[1:], env=environment, dimensions=size, encoding="utf-8", timeout=90)
        child.delaybeforesend = None
        return child

    return start


def test_a_terminal_offers_what_is_missing(spawn, models):
    child = spawn(120, "run", f"hf:{REPOSITORY}", "-p", "hi", "--temp", "0", "-n", "2")
    child.expect_exact("[y/N] ")
    child.sendline("y")
    child.expect_exact(f"hf:{REPOSITORY}: {size(len(models[0]))}\r\n")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, list(there())) == (0, [f"{REPOSITORY}/Tiny-Q4_K_M.gguf"]), child.before


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_come(spawn, hub, models):
    hub.pause = 0.1
    child = spawn(40, "pull", f"hf:{REPOSITORY}:Q8_0")
    child.expect("[0-9.]+ kB of [0-9.]+ kB, [^\r]*\r")
    assert all(len(line) < 40 for line in (child.before + child.after).replace("\x1b[K", "").split("\r"))
    child.sendintr()
    child.expect("what was downloaded is kept; run the\\s+same command again to resume")
    child.expect(pexpect.EOF)
    child.close()
    ((name, begun),) = there().items()
    assert child.exitstatus == 130 and name.endswith(".partial") and models[1].startswith(begun)


def test_beginnings_of_a_file_are_no_other_ones(tmp_path: Path):
    for name in ("a.gguf.01ab.partial", "b.gguf.01ab.partial", "a.gguf.txt", "a.gguf", "a.ggufx.01ab.partial"):
        (tmp_path / name).touch()
    assert partial_file.find_partials(tmp_path / "a.gguf") == [tmp_path / "a.gguf.01ab.partial"]
    assert partial_file.find_partials(tmp_path / "none" / "a.gguf") == []
