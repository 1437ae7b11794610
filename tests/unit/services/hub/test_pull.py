"""Test pulling models from a server with the hub's protocol, whatever fails on the way."""

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
from localllm.cli.terminal.render import format_size
from localllm.errors import LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files import download as partial_file
from localllm.files.download import Download
from localllm.files.gguf import header_only as hollow
from localllm.files.gguf.file import GGUFFile
from localllm.files.models_folder import choose_projector, find_projector, get_models_folder, list_files
from localllm.services.hub import huggingface as hub_service
from localllm.services.hub import pull as service
from localllm.services.hub.catalogue import (
    HubReference,
    MissingError,
    list_models_on_disk,
    parse_reference,
    resolve_model,
)
from localllm.services.hub.huggingface import RemoteFile
from localllm.services.hub.pull import PullProgress, PullResult, pull_model
from localllm.services.inspection.fit import describe_fit

REPOSITORY = "tiny/Tiny-GGUF"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[bytes, bytes]:
    """Return two versions of a model."""
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_tiny_model(folder / f"{seed}.gguf", seed=seed).read_bytes() for seed in (0, 1))
    return first, second


@pytest.fixture
def hub(monkeypatch, tmp_path, models) -> Iterator[Hub]:
    """Run a hub with one repository; waits are short, and the models folder does not exist yet."""
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


def reference_to(text: str) -> HubReference:
    reference = parse_reference(text)
    assert reference
    return reference


def pull_tiny(quantization: str = ":Q4_K_M", watcher: PullProgress | None = None) -> PullResult:
    return pull_model(reference_to(f"hf:{REPOSITORY}{quantization}"), watcher)


def stored_files() -> dict[str, bytes]:
    """Return all files in the models folder and their bytes."""
    return {name: (get_models_folder() / name).read_bytes() for name in list_files(get_models_folder())}


def write_partial(data: bytes, length: int, quantization: str = "Q4_K_M") -> Path:
    """Write the first bytes of a file, as a killed process leaves them."""
    target = get_models_folder() / REPOSITORY / f"Tiny-{quantization}.gguf"
    path = Download(target, len(data), hashlib.sha256(data).hexdigest()).path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:length])
    return path


def test_pull_stores_a_model_in_a_plain_folder(hub, models):
    done = pull_tiny()
    assert done == PullResult(get_models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf", len(models[0]), len(models[0]))
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    assert not done.path.is_symlink()
    assert resolve_model(f"hf:{REPOSITORY}") == resolve_model(f"hf:{REPOSITORY}:q4_k_m") == str(done.path)
    assert any(f"/resolve/{COMMIT}/" in path for _, path, _, _ in hub.requests)


@pytest.mark.parametrize(("address", "revision"), [
    ("resolve/v1.0/Tiny-Q4_K_M.gguf", "v1.0"), ("resolve/v1.0/Tiny-Q4_K_M.gguf?download=true", "v1.0"),
    ("blob/v1.0/Tiny-Q4_K_M.gguf", "v1.0"), ("tree/v1.0", "v1.0"), ("tree/refs%2Fpr%2F1", "refs/pr/1"),
    ("tree/refs/pr/1", "refs/pr/1"), ("resolve/refs%2Fpr%2F1/Tiny-Q4_K_M.gguf", "refs/pr/1"),
])  # fmt: skip
def test_another_revision_is_stored_apart_from_main(hub, models, cli, address: str, revision: str):
    hub.repositories[f"{REPOSITORY}@{revision}"] = {"Tiny-Q4_K_M.gguf": models[1]}
    main = pull_tiny().path
    url = f"https://huggingface.co/{REPOSITORY}/{address}"
    with pytest.raises(MissingError):
        resolve_model(url)
    path = pull_model(reference_to(url)).path
    assert path.read_bytes() == models[1] and main.read_bytes() == models[0] and path != main
    assert resolve_model(url) == str(path) and resolve_model(f"hf:{REPOSITORY}") == str(main)
    assert resolve_model(f"hf:{REPOSITORY}@{revision.replace('/', '%2F')}:Q4_K_M") == str(path)
    names = {model.name for model in list_models_on_disk()}
    assert len(names) == 2 and {resolve_model(name) for name in names} == {str(path), str(main)}


def test_a_missing_revision_is_refused(hub):
    with pytest.raises(ModelError, match=r"tiny/Tiny-GGUF@v9: the repository has no revision v9"):
        pull_model(reference_to(f"https://huggingface.co/{REPOSITORY}/tree/v9"))


@pytest.mark.parametrize("address", ["tree/main", "blob/main/Tiny-Q4_K_M.gguf", "resolve/main/Tiny-Q4_K_M.gguf", ""])
def test_addresses_of_main_mean_the_repository(hub, address: str):
    assert reference_to(f"https://huggingface.co/{REPOSITORY}/{address}").repository == REPOSITORY


def test_a_stored_model_is_verified_and_not_fetched_again(hub, models):
    path = pull_tiny().path
    hub.requests.clear()
    assert pull_tiny().received == 0
    assert [path for _, path, _, _ in hub.requests if "resolve" in path] == []
    path.write_bytes(models[1][:-1] + b"!")  # as long as the right one
    assert pull_tiny().received == len(models[0])
    assert path.read_bytes() == models[0]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_broken_connections_are_resumed(hub, models, has_ranges):
    hub.has_ranges = has_ranges
    length = len(models[0])
    # Without ranges the server starts anew each time, so only what comes later than before is new.
    hub.cuts = [length, 1000, 0, 70_000, 200_001, length - 1] if has_ranges else [length, 1000, 0, 70_000, 200_001]
    reasons: list[str] = []
    watcher = PullProgress()
    watcher.report_interruption = reasons.append
    assert pull_tiny(watcher=watcher).received == length
    assert len(reasons) >= 4
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for _, _, text, _ in hub.requests if text]
    assert {1000, 71_000} <= set(starts) if has_ranges else {1000, 70_000} <= set(starts)


def test_a_connection_that_breaks_often_but_advances_succeeds(hub, models):
    """Count only consecutive tries without a new byte."""
    hub.cuts = [len(models[0]), *[3000] * 8, *[0, 0, 3000] * 4]
    assert pull_tiny().received == len(models[0])
    hub.cuts = [len(models[1]), *[0] * 6]
    with pytest.raises(LocalllmError, match="same command again to resume"):
        pull_tiny(":Q8_0")
    assert not hub.cuts, "six tries"


def test_a_download_is_synced_before_it_gets_its_name(hub, models, monkeypatch):
    write_partial(models[0], 1000)
    calls = SystemCalls(monkeypatch)
    assert calls.of(pull_tiny().path) == SAFE


def test_a_busy_server_is_retried(hub, models):
    hub.api_statuses, hub.statuses = [503, 429], [0, 503, 500, 429]
    assert pull_tiny().received == len(models[0])


def test_a_connection_that_never_succeeds_gives_up(hub, models):
    hub.cuts = [len(models[0]), 1000, *[0] * 50]
    with pytest.raises(LocalllmError, match="run the same command again to resume") as failure:
        pull_tiny()
    assert failure.value.exit_code == 1
    ((name, begun),) = stored_files().items()
    assert name.endswith(".partial") and begun == models[0][:1000]
    hub.cuts = []
    assert pull_tiny().received == len(models[0]) - 1000
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_an_unreachable_server_is_an_error(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LocalllmError, match="cannot be reached") as failure:
        pull_tiny()
    assert (failure.value.exit_code, stored_files()) == (1, {})


def test_a_slow_download_times_out_and_is_resumed(hub, models, monkeypatch):
    from huggingface_hub import constants

    hub.pause = 0.01
    assert pull_tiny().received == len(models[0])
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(hub_service, "MAX_ATTEMPTS", 2)
    hub.pause = 0.2
    with pytest.raises(LocalllmError, match="cannot be reached"):
        pull_tiny(":Q8_0")


@pytest.mark.parametrize("wrong", ["checksum", "size", "body", "header"])
def test_a_wrong_download_leaves_nothing(hub, models, wrong):
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
        pull_tiny()
    assert "\n" not in str(failure.value) and failure.value.exit_code == 3
    assert not get_models_folder().exists() or list(get_models_folder().iterdir()) == []


def test_an_earlier_file_stays_until_the_new_one_is_verified(hub, models):
    path = pull_tiny().path
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = models[1]
    hub.bodies["Tiny-Q4_K_M.gguf"] = models[1][:-1] + bytes([models[1][-1] ^ 1])
    with pytest.raises(ModelError, match="SHA-256"):
        pull_tiny()
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}
    hub.bodies = {}
    pull_tiny()
    assert path.read_bytes() == models[1]


def test_a_wrong_partial_file_is_fetched_again(hub, models):
    write_partial(bytes(len(models[0])), 100_000).replace(write_partial(models[0], 0))
    assert pull_tiny().received == len(models[0]) - 100_000 + len(models[0])
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_a_partial_file_of_another_version_is_removed(hub, models):
    write_partial(models[1], 1000)
    assert pull_tiny().received == len(models[0])
    assert stored_files() == {f"{REPOSITORY}/Tiny-Q4_K_M.gguf": models[0]}


def test_only_one_process_pulls_a_file(hub, models):
    path = write_partial(models[0], 1000)
    with (
        Download(
            get_models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf", len(models[0]), hashlib.sha256(models[0]).hexdigest()
        ),
        pytest.raises(UsageError, match="another localllm is pulling this file"),
    ):
        pull_tiny()
    assert path.read_bytes() == models[0][:1000]


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_a_partial_file_finished_by_another_process_is_started_anew(tmp_path, monkeypatch, models, is_begun_again):
    """Write to a new file, also if another process has begun one already."""
    target, lock = tmp_path / "model.gguf", partial_file.lock_file
    begun = Download(target, len(models[0]), hashlib.sha256(models[0]).hexdigest())
    begun.path.write_bytes(models[0])

    def late(descriptor: int) -> bool:
        if not target.exists():
            begun.path.replace(target)
            if is_begun_again:
                begun.path.write_bytes(models[0][:7])
        return lock(descriptor)

    monkeypatch.setattr(partial_file, "lock_file", late)
    with begun:
        assert begun.position == (7 if is_begun_again else 0)
        begun.write(b"something else")
    assert target.read_bytes() == models[0]
    assert begun.path.read_bytes().endswith(b"something else")


def test_tokens_are_sent_to_the_hub_only(hub, monkeypatch):
    hub.gated.add(REPOSITORY)
    with pytest.raises(
        ModelError, match=f"the repository is gated: accept its conditions on https://huggingface.co/{REPOSITORY}"
    ):
        pull_tiny()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match="gated"):
        pull_tiny()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    pull_tiny()
    for _, path, _, authorization in hub.requests[-5:]:
        assert authorization == (None if "signature" in path else f"Bearer {hub.token}")


def test_missing_repositories_files_and_quantizations_are_named(hub, monkeypatch):
    for text, message in (
        ("hf:tiny/none", "the repository does not exist, or is private"),
        (f"hf:{REPOSITORY}:Q5_0", "no Q5_0; available: Q4_K_M, Q8_0"),
        (f"hf:{REPOSITORY}/Tiny-Q5_0.gguf", "no matching GGUF file"),
    ):
        with pytest.raises(ModelError, match=message) as failure:
            pull_model(reference_to(text))
        assert failure.value.exit_code == 3
    monkeypatch.setenv("HF_TOKEN", hub.token)
    with pytest.raises(ModelError, match=r"the repository does not exist on the hub$"):
        pull_model(reference_to("hf:tiny/none"))
    with pytest.raises(UsageError, match="expected hf:OWNER/REPOSITORY"):
        parse_reference("hf:nothing")
    assert stored_files() == {}


def test_offline_mode_refuses_to_pull(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LocalllmError, match="HF_HUB_OFFLINE is set"):
        pull_tiny()
    assert hub.requests == []


def test_a_disk_too_small_is_reported_before_the_download(hub, monkeypatch):
    monkeypatch.setattr(service, "RESERVED_BYTES", 1 << 60)
    with pytest.raises(LocalllmError, match=r"GB, but only .* GB are free on this disk"):
        pull_tiny()
    assert hub.sent == 0


@pytest.mark.parametrize("spare", [0, -1])
def test_bytes_already_on_the_disk_need_no_room(hub, monkeypatch, models, spare):
    """Count this version's partial file and an earlier one's, which is removed."""
    write_partial(models[0], 100_000)
    write_partial(models[1], 50_000)
    free = len(models[0]) - 150_000 + (1 << 20) + spare  # a megabyte stays free
    monkeypatch.setattr(service, "get_free_bytes", lambda folder: free)
    if spare < 0:
        with pytest.raises(LocalllmError, match="the download needs"):
            pull_tiny()
        assert hub.sent == 0
    else:
        assert pull_tiny().received == len(models[0]) - 100_000


def test_a_disk_that_fills_up_keeps_the_partial_file(hub, monkeypatch, models):
    def full(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(28, "No space left on device")

    write_partial(models[0], 1000)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LocalllmError, match="cannot be written: No space left on device"):
        pull_tiny()
    assert list(stored_files().values()) == [models[0][:1000]]


def test_an_unsupported_model_is_refused_by_its_header(hub, models):
    strange = models[0].replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lamal")
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = strange + bytes(16 << 20)
    with pytest.raises(ModelError):
        pull_tiny()
    hub.repositories[REPOSITORY]["Tiny-Q4_K_M.gguf"] = strange
    with pytest.raises(UnsupportedError, match="architecture lamal is not supported"):
        pull_tiny()
    assert stored_files() == {}


def split_model(path: Path, parts: int) -> dict[str, bytes]:
    """Split a model into files, by name."""
    from localllm.files.gguf.writer import OutputTensor, PackedValue, write_gguf

    files = {}
    with GGUFFile.open(path) as file:
        packed = {key: PackedValue(value) for key, value in file.packed.items()}
        tensors = list(file.tensors.values())
        for number in range(parts):
            mine = tensors[number::parts]
            numbers = {"split.no": number, "split.count": parts, "split.tensors.count": len(tensors)}
            metadata = (packed if number == 0 else {}) | numbers
            name = f"Tiny-Q6_K-{number + 1:05d}-of-{parts:05d}.gguf"
            write_gguf(
                path.with_name(name), metadata, [OutputTensor(t.name, t.format, t.shape, (t.data,)) for t in mine]
            )
            files[name] = path.with_name(name).read_bytes()
    return files


def test_all_files_of_a_split_model_are_pulled(hub, models, tmp_path):
    path = tmp_path / "whole.gguf"
    path.write_bytes(models[0])
    parts = split_model(path, 3)
    hub.repositories[REPOSITORY] |= parts
    done = pull_tiny(":Q6_K")
    assert stored_files() == {f"{REPOSITORY}/{name}": data for name, data in parts.items()}
    assert resolve_model(f"hf:{REPOSITORY}:Q6_K") == str(done.path)
    (get_models_folder() / REPOSITORY / list(parts)[1]).unlink()
    with pytest.raises(ModelError, match="localllm pull"):
        resolve_model(f"hf:{REPOSITORY}:Q6_K")
    assert pull_tiny(":Q6_K").received == len(list(parts.values())[1])
    del hub.repositories[REPOSITORY][list(parts)[2]]
    with pytest.raises(ModelError, match="lacks splits of Tiny-Q6_K"):
        pull_tiny(":Q6_K")


@pytest.fixture
def projectors(hub, tmp_path) -> dict[str, bytes]:
    """Add projectors to the repository."""
    path = write_projector(projector("llava"), tmp_path / "mmproj.gguf")
    files = {f"mmproj-Tiny-{format}.gguf": path.read_bytes() for format in ("BF16", "F32", "f16", "Q8_0")}
    hub.repositories[REPOSITORY] |= files
    return files


def test_a_projector_is_pulled_with_its_model(hub, models, projectors):
    """Choose one whatever the quantization, not another folder's, and fetch it once."""
    whole = len(models[0]) + len(projectors["mmproj-Tiny-f16.gguf"])
    done = pull_tiny()
    assert (done.path.name, done.size, done.received) == ("Tiny-Q4_K_M.gguf", whole, whole)
    assert sorted(stored_files()) == [f"{REPOSITORY}/{name}" for name in ("Tiny-Q4_K_M.gguf", "mmproj-Tiny-f16.gguf")]
    assert find_projector(str(done.path)).endswith("mmproj-Tiny-f16.gguf")
    assert pull_tiny().received == 0 and pull_tiny(":Q8_0").received == len(models[1])
    find_projector(str(done.path))
    (get_models_folder() / REPOSITORY / "mmproj-Tiny-f16.gguf").unlink()
    del hub.repositories[REPOSITORY]["mmproj-Tiny-f16.gguf"]
    assert pull_tiny().received == len(projectors["mmproj-Tiny-BF16.gguf"])


def test_the_projector_of_the_models_folder_and_name_is_chosen():
    names = ["a/mmproj-F16.gguf", "mmproj-other-F16.gguf", "mmproj-one-Q8_0.gguf", "README.md", "mmproj-one-F32.gguf"]
    assert choose_projector(names, "one-Q4_K_M.gguf") == "mmproj-one-Q8_0.gguf"
    assert choose_projector(names, "b/one-Q4_K_M.gguf") is None
    assert choose_projector(names, "a/one-Q4_K_M.gguf") == "a/mmproj-F16.gguf"


def test_a_damaged_projector_is_not_kept(hub, models):
    hub.repositories[REPOSITORY]["mmproj-Tiny-F16.gguf"] = b"GGUF"
    with pytest.raises(ModelError, match="mmproj-Tiny-F16"):
        pull_tiny()
    assert list(stored_files()) == [f"{REPOSITORY}/Tiny-Q4_K_M.gguf"]


def test_fit_and_rm_count_a_projector(cli, hub, models, projectors, monkeypatch):
    """Count the same before and after the pull; the last model of the folder takes it along."""
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    facts, name = describe_fit(f"hf:{REPOSITORY}:Q4_K_M"), f"hf:{REPOSITORY}:Q4_K_M"
    assert facts["projector_bytes"] == len(projectors["mmproj-Tiny-f16.gguf"]) and stored_files() == {}
    pull_tiny(), pull_tiny(":Q8_0")
    assert describe_fit(name)["projector_bytes"] == facts["projector_bytes"]
    assert cli("rm", name, "--force")[0] == 0
    assert sorted(stored_files()) == [f"{REPOSITORY}/{name}" for name in ("Tiny-Q8_0.gguf", "mmproj-Tiny-f16.gguf")]
    (get_models_folder() / REPOSITORY / "mmproj-Tiny-BF16.gguf.0123456789abcdef.partial").write_bytes(b"GG")
    assert cli("rm", f"hf:{REPOSITORY}:Q8_0", "--force")[0] == 0 and stored_files() == {}


def test_hostile_file_names_and_checksums_are_refused(hub, models):
    hub.repositories["tiny/evil"] = {"../../../evil-Q4_K_M.gguf": models[0], "/tmp/a-Q8_0.gguf": models[0]}
    with pytest.raises(ModelError, match="no matching GGUF file"):
        pull_model(reference_to("hf:tiny/evil"))
    for checksum in ("../../../../evil" + "0" * 48, "0" * 63, "é" * 64):
        hub.checksums["Tiny-Q4_K_M.gguf"] = checksum
        with pytest.raises(ModelError, match="no Q4_K_M; available: Q8_0"):
            pull_tiny()
    assert stored_files() == {}


@pytest.mark.parametrize("answer", [b"<html>log in to this network</html>", b"[]", b'{"id": 3}', b'{"siblings": [{}]}'])
def test_a_server_that_is_no_hub_is_refused(hub, answer):
    hub.api_answer = answer
    with pytest.raises(LocalllmError) as failure:
        pull_tiny()
    assert "\n" not in str(failure.value)
    assert stored_files() == {}


def test_waits_double_up_to_a_limit(monkeypatch):
    waits, reasons = [], []
    monkeypatch.setattr(hub_service, "WAIT", 0.5)
    monkeypatch.setattr(hub_service.time, "sleep", waits.append)
    repository = SimpleNamespace(_on_break=reasons.append)
    for failures in range(1, 8):
        hub_service.HubRepository._wait(repository, hub_service.ConnectionBrokenError("it hung up"), failures)
    assert waits == [1, 2, 4, 8, 16, 16, 16] and reasons == ["it hung up"] * 7


def test_fit_of_a_model_on_the_hub_fetches_its_header_only(hub, models, monkeypatch):
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    monkeypatch.setattr(hollow, "FIRST_BYTES", 1 << 12)
    facts = describe_fit(f"hf:{REPOSITORY}:Q4_K_M")
    assert stored_files() == {}
    assert facts["fetched_bytes"] == hub.sent < len(models[0]) / 4
    assert len([path for _, path, _, _ in hub.requests if "signature" in path]) > 1  # so many pieces
    local = describe_fit(str(pull_tiny().path))
    assert {**facts, **dict.fromkeys(("model", "path", "fetched_bytes", "available_bytes"))} == {
        **local,
        **dict.fromkeys(("model", "path", "fetched_bytes", "available_bytes")),
    }


# Forks a process for each line of stdin, which it kills after so many seconds: it has imported everything before.
KILLER = """
import os, sys, time
import huggingface_hub.hf_api, localllm.arch.families.llama
from localllm.services.hub.catalogue import parse_reference
from localllm.services.hub.pull import pull_model
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        pull_model(parse_reference(sys.argv[1]))
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
def test_a_pull_killed_at_any_moment_is_resumed(hub, models, tmp_path):
    """Kill with SIGKILL again and again: each start continues and completes, leaves nothing over and loses no file.

    After each finished pull the repository has another version of the file.
    """
    command = [sys.executable, "-c", KILLER, f"hf:{REPOSITORY}:Q4_K_M"]
    (tmp_path / "temporary").mkdir()
    places = {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    least = 200 if everything() else 20
    generator, versions, kills, finished, begun = random.Random(least), list(models), 0, 0, 0
    target = get_models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf"
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
            begun += any(name.endswith(".partial") for name in stored_files())
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
    pull_tiny()
    assert stored_files() == {f"{REPOSITORY}/{target.name}": wanted}


# ---- what is done in which order, without a hub


@pytest.fixture
def steps(monkeypatch, tmp_path) -> list[object]:
    """Record the steps of pulling three files, of which the second is stored; fetch and open nothing."""
    done = list[object]()
    files = {name: RemoteFile(name, size, "0" * 64) for name, size in (("a/1.gguf", 10), ("2.gguf", 20), ("p.gguf", 5))}

    class Opened:
        @contextmanager
        def model(self, repository: object, own: list[RemoteFile]) -> Iterator[tuple[str, int]]:
            done.append(("header", [file.name for file in own]))
            yield "model", 0

    monkeypatch.setattr(
        service, "HubRepository", lambda name, on_break: done.append(name) or SimpleNamespace(files=files)
    )
    monkeypatch.setattr(service, "list_model_files", lambda repository, reference: [*files.values()][:2])
    monkeypatch.setattr(service, "list_projectors", lambda repository, own: [files["p.gguf"]])
    monkeypatch.setattr(service, "is_downloaded", lambda file, target, watcher: file.name == "2.gguf")
    monkeypatch.setattr(service, "require_space", lambda folder, missing: done.append([f.name for f, _ in missing]))
    monkeypatch.setattr(service, "open_remote_model", Opened().model)
    monkeypatch.setattr(service, "require_usable", lambda model: done.append(f"may {model}"))
    monkeypatch.setattr(service, "remove_empty_folders", lambda folder: done.append(("tidied", folder.name)))
    monkeypatch.setattr(service, "get_models_folder", lambda: tmp_path)

    def fetch(
        repository: object, file: RemoteFile, target: Path, watcher: PullProgress, before: int, total: int
    ) -> int:
        done.append((target.relative_to(tmp_path).as_posix(), before, total))
        return file.size - 1

    def opened(path: Path, needed: object) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: done.append((path.name, needed)))

    monkeypatch.setattr(service, "download_file", fetch)
    monkeypatch.setattr(service.GGUFFile, "open", opened)
    return done


def test_pull_fetches_the_header_then_the_missing_files(steps, tmp_path):
    watcher = PullProgress()
    watcher.report_lookup = lambda what: steps.append(f"looking at {what}")
    result = pull_model(reference_to("hf:tiny/T:x"), watcher)
    assert result == PullResult(tmp_path / "tiny/T/a/1.gguf", 35, 13)
    assert steps == [
        "looking at the list of files", "tiny/T", ["a/1.gguf", "p.gguf"], "looking at the header",
        ("header", ["a/1.gguf", "2.gguf"]), "may model", ("tiny/T/a/1.gguf", 20, 35), ("tidied", "a"),
        ("tiny/T/p.gguf", 30, 35), ("tidied", "T"), ("1.gguf", ()),
    ]  # fmt: skip


def test_a_pull_of_a_stored_model_fetches_no_bytes(steps, monkeypatch):
    monkeypatch.setattr(service, "is_downloaded", lambda *arguments: True)
    assert pull_model(reference_to("hf:tiny/T:x")).received == 0 and steps == ["tiny/T", ("1.gguf", ())]


def test_file_names_impossible_here_are_refused_first(steps, monkeypatch):
    """Name the file."""
    monkeypatch.setattr(service, "find_name_problem", lambda name: "is odd" if name == "p.gguf" else None)
    with pytest.raises(UsageError, match=r"^tiny/T: p\.gguf: is odd$"):
        pull_model(reference_to("hf:tiny/T:x"))
    assert steps == ["tiny/T"]


def test_a_failure_leaves_no_empty_folder(steps, monkeypatch):
    def fails(*arguments: object) -> int:
        raise LocalllmError("broken")

    monkeypatch.setattr(service, "download_file", fails)
    with pytest.raises(LocalllmError, match="broken"):
        pull_model(reference_to("hf:tiny/T:x"))
    assert steps[-1] == ("tidied", "a")


def test_a_stored_file_is_recognized_by_size_and_hash(tmp_path):
    """Do not read a file of another size."""
    target, heard = tmp_path / "x", list[object]()
    watcher = PullProgress()
    watcher.report_check = lambda *checks: heard.append(checks)
    file = RemoteFile("folder/x", 3, hashlib.sha256(b"abc").hexdigest())
    assert not service.is_downloaded(file, target, watcher)
    for data, stored, checks in ((b"ab", False, 0), (b"abcd", False, 0), (b"abd", False, 1), (b"abc", True, 1)):
        heard.clear()
        target.write_bytes(data)
        assert service.is_downloaded(file, target, watcher) is stored and heard == [("folder/x", 3, 3)] * checks
    with pytest.raises(LocalllmError, match="cannot be read") if os.name == "posix" else nullcontext():
        service.is_downloaded(file, target / "y", watcher)


@pytest.mark.parametrize(("free", "fits"), [(35 - 4 + 100, True), (35 - 4 + 99, False)])
def test_room_is_needed_for_the_missing_bytes(monkeypatch, tmp_path, free: int, fits: bool):
    """Subtract partial files, and leave some room on the disk of the first existing folder."""
    asked = list[Path]()
    monkeypatch.setattr(service, "RESERVED_BYTES", 100)
    monkeypatch.setattr(service, "get_free_bytes", lambda disk: asked.append(disk) or free)
    monkeypatch.setattr(service, "find_partials", lambda target: [target] if target.name == "a" else [])
    monkeypatch.setattr(service, "get_size", lambda path: 4)
    missing = [(RemoteFile(name, size, "0" * 64), tmp_path / name) for name, size in (("a", 10), ("b", 25))]
    if fits:
        service.require_space(tmp_path / "none" / "deeper", missing)
    else:
        with pytest.raises(
            LocalllmError, match=rf"{re.escape(str(tmp_path))}: the download needs 0\.00 GB, but only 0\.00 GB are free"
        ):
            service.require_space(tmp_path / "none" / "deeper", missing)
    assert asked == [tmp_path]


# ---- the command line


def test_pull_list_run_and_rm_share_the_name_of_a_model(cli, hub, models):
    name, path = f"hf:{REPOSITORY}:Q4_K_M", get_models_folder() / REPOSITORY / "Tiny-Q4_K_M.gguf"
    assert cli("pull", name) == (0, f"{path}\n", "")
    assert cli("pull", name) == (0, f"{path}\n", "")
    code, out, _ = cli("list", "--json")
    (listed,) = json.loads(out)["models"]
    assert (code, listed["name"], listed["path"], listed["quantization"]) == (0, name, str(path), "Q4_K_M")
    assert (listed["bytes"], listed["complete"], listed["files"]) == (len(models[0]), True, [str(path)])
    code, out, _ = cli("list")
    assert out.splitlines()[1].split() == [name, *format_size(len(models[0])).split(), "F32", str(path)]
    _, by_name, _ = cli("run", name, "-p", "hello", "--temp", "0", "-n", "3")
    assert by_name and cli("run", path, "-p", "hello", "--temp", "0", "-n", "3")[1] == by_name
    assert cli("inspect", name, "--json")[:2] == cli("inspect", path, "--json")[:2]
    assert cli("tokenize", name, "hello")[1] == cli("tokenize", path, "hello")[1]
    code, _, err = cli("rm", name)
    assert (code, path.exists()) == (2, True) and "--force" in err
    assert cli("rm", name, "--force")[0] == 0
    assert stored_files() == {} and not path.parent.parent.exists()
    code, _, err = cli("run", name, "-p", "hello")
    assert (code, err) == (
        3,
        f"localllm: error: {name}: not on this computer; download it with `localllm pull {name}`\n",
    )


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 3), (b"\n", 3), (b"", 3)])
def test_a_missing_model_can_be_pulled_from_a_terminal(cli, hub, monkeypatch, answer, code):
    monkeypatch.setattr(pulling, "is_terminal", lambda stream: True)
    exit_code, _, err = cli("inspect", f"hf:{REPOSITORY}:Q4_K_M", stdin=answer)
    assert exit_code == code
    assert f"hf:{REPOSITORY}:Q4_K_M is not on this computer. Download it? [y/N] " in err
    assert bool(stored_files()) == (code == 0)


@pytest.mark.parametrize(("answer", "stays"), [(b"yes\n", False), (b"no\n", True), (b"", True)])
def test_rm_asks_on_a_terminal(cli, hub, models, monkeypatch, answer, stays):
    monkeypatch.setattr(rm, "is_terminal", lambda stream: True)
    pull_tiny()
    code, out, err = cli("rm", f"hf:{REPOSITORY}", stdin=answer)
    assert (code, out, bool(stored_files())) == (0, "", stays)
    assert f"Remove hf:{REPOSITORY}:Q4_K_M ({format_size(len(models[0]))}, " in err


def test_fit_of_a_model_on_the_hub_prints_its_memory(cli, hub, monkeypatch):
    from localllm.services.inspection import fit as fit_service

    monkeypatch.setattr(fit_service, "measure_bandwidth", lambda: 1e9)
    name = f"hf:{REPOSITORY}:Q8_0"
    facts = json.loads(cli("fit", name, "--json")[1])
    code, out, err = cli("fit", name)
    assert (code, err, stored_files()) == (0, "", {})
    assert out.endswith("It fits, with its whole context of 512 tokens.\n")
    assert facts["path"] == f"hf:{REPOSITORY}/Tiny-Q8_0.gguf" and facts["longest"] == dict.fromkeys(
        fit_service.TYPES, 512
    )
    monkeypatch.setattr(fit_service, "get_available_memory", lambda mapped=0: 1000)
    out = cli("fit", name)[1]
    assert "too much" in out and "\nThis model does not fit into memory: choose a smaller file" in out
    needed = fit_service.WORKING_BYTES + facts["weight_bytes"] - facts["table_bytes"]
    monkeypatch.setattr(fit_service, "get_available_memory", lambda mapped=0: needed + 100 * (2 * 2 * 2 * 16 * 2))
    assert "It fits with 100 tokens (f16), " in cli("fit", name)[1]


def test_errors_of_pull_are_one_line(cli, hub, monkeypatch):
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
        exit_code, out, err = cli(*arguments)
        assert (exit_code, out, err.count("\n")) == (code, "", 1), err
    monkeypatch.setattr(service, "RESERVED_BYTES", 1 << 60)
    hub.gated.clear()
    assert cli("pull", f"hf:{REPOSITORY}")[0] == 1


def test_progress_is_shown_on_a_terminal_only(cli, hub, monkeypatch, models):
    write_partial(models[0], 1000)
    monkeypatch.setattr(terminal, "is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setattr(pulling, "UPDATE_SECONDS", 0)
    hub.cuts = [len(models[0]), 200_000]
    code, _, err = cli("pull", f"hf:{REPOSITORY}")
    assert code == 0
    whole = format_size(len(models[0]))
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
    """Run the program on a terminal: spawn(columns, arguments...)."""

    def start(columns: int, *arguments: str) -> pexpect.spawn:
        environment = os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "localllm", *arguments]
        size = (24, columns)
        child = pexpect.spawn(command[0], command[1:], env=environment, dimensions=size, encoding="utf-8", timeout=90)
        child.delaybeforesend = None
        return child

    return start


def test_a_terminal_offers_to_pull_a_missing_model(spawn, models):
    child = spawn(120, "run", f"hf:{REPOSITORY}", "-p", "hi", "--temp", "0", "-n", "2")
    child.expect_exact("[y/N] ")
    child.sendline("y")
    child.expect_exact(f"hf:{REPOSITORY}: {format_size(len(models[0]))}\r\n")
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, list(stored_files())) == (0, [f"{REPOSITORY}/Tiny-Q4_K_M.gguf"]), child.before


@pytest.mark.slow
def test_ctrl_c_keeps_the_partial_file(spawn, hub, models):
    hub.pause = 0.1
    child = spawn(40, "pull", f"hf:{REPOSITORY}:Q8_0")
    child.expect("[0-9.]+ kB of [0-9.]+ kB, [^\r]*\r")
    assert all(len(line) < 40 for line in (child.before + child.after).replace("\x1b[K", "").split("\r"))
    child.sendintr()
    child.expect("the partial download is kept; run the\\s+same command again to resume")
    child.expect(pexpect.EOF)
    child.close()
    ((name, begun),) = stored_files().items()
    assert child.exitstatus == 130 and name.endswith(".partial") and models[1].startswith(begun)


def test_partial_files_are_recognized_by_their_full_name(tmp_path: Path):
    for name in ("a.gguf.01ab.partial", "b.gguf.01ab.partial", "a.gguf.txt", "a.gguf", "a.ggufx.01ab.partial"):
        (tmp_path / name).touch()
    assert partial_file.find_partials(tmp_path / "a.gguf") == [tmp_path / "a.gguf.01ab.partial"]
    assert partial_file.find_partials(tmp_path / "none" / "a.gguf") == []
