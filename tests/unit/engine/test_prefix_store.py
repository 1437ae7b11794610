"""Test the prefix cache: prompts of this process or another do not run again, and answers keep every bit."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from models import DECLARATIONS
from pooled import acquire, restored
from project import ROOT
from signals import apart, ctrl_c
from tiny_hybrid import write_tiny_hybrid
from tiny_model import write_tiny_model

import localllm
from localllm.arch.layer_state import SLACK, KVType
from localllm.engine import prefix_store
from localllm.engine import prefix_store as prefixes
from localllm.engine.lower.activation import ALL, WANTED, Activation
from localllm.engine.operations.elementwise import Elementwise
from localllm.engine.prefix_store import PrefixStore, describe_operations, describe_value, sample_bytes
from localllm.engine.runs import BATCH, DEEP_POSITION, FIRST_RUN, RunPlan
from localllm.errors import LocalllmError
from localllm.files.cache import ngram_cache_file as written_file
from localllm.files.cache import prefix_files
from localllm.files.safe_file import SafeFile
from localllm.generation.chunked_prefill import prefill_prompt
from localllm.generation.prefix_cache import PrefixCache
from localllm.kernels.table import PAGE
from localllm.system.files import get_cache_folder

CONTEXT = 3000
FEW_POSITIONS = {"gpt2", "starcoder"}  # fewer than the prompts here have tokens
KINDS = ["llama", "gemma3", "gemma4", "deepseek2_v3", "dots3note", "llama_moe", "llama4", "qwen35", "mamba2",
         "deepseek4", "qwen4exp_blocks"]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return an empty folder for the prefix cache."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path / "prefixes")
    return tmp_path / "prefixes"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("models") / "hybrid.gguf", context=CONTEXT)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def open_model(path: Path, **options) -> localllm.Model:
    return localllm.open(path, **{"threads": 2, "context": CONTEXT, **options})


def read(model: localllm.Model, ids: list[int]) -> tuple[int, np.ndarray]:
    """Return the number of cached tokens, and the logits behind the prompt and behind each of three more tokens."""
    sequences = model.session.cache
    with acquire(sequences, ids) as (sequence, logits):
        known = len(sequence.tokens)
        if logits is None:
            logits = prefill_prompt(sequence, ids, None)
            sequences.record_prefill(sequence, known, logits)
        rows = [logits, *(sequence.append([token]) for token in (5, 6, 7))]
    return known, np.concatenate(rows)


def in_new_process(path: Path, ids: list[int], **options) -> tuple[int, np.ndarray]:
    """Do as `read`, with a model that has only the files, which hold the prompt afterwards."""
    with open_model(path, **options) as model:
        return read(model, ids)


def check(path: Path, length: int, known: int | None = None, **options) -> None:
    """Check a prompt twice and others that share its beginning: the logits are those without files.


    Known tokens are whole runs, or all.
    """
    ids = tokens(length)
    whole = length // BATCH * BATCH if known is None else known
    prompts = [(ids, 0), (ids, length), ([*ids[:-3], 9, 9, 9], (length - 3) // BATCH * BATCH)]
    prompts += [([*ids, 8, 8], whole), ([*ids[: BATCH + 50], 4], BATCH if known is None else None)]
    for prompt, expected in prompts:
        _, anew = in_new_process(path, prompt, cache=False, **options)
        cached, logits = in_new_process(path, prompt, **options)
        assert expected is None or cached == expected
        np.testing.assert_array_equal(logits, anew)


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_another_process_finds_the_prefix_for_every_type_of_layer(model_path, name: str):
    """Store windows only at the end, and recurrent states at snapshots."""
    known = (
        2 * BATCH
        if name in ("gemma3", "gemma4", "llama4", "dots3note", "qwen35", "mamba2", "deepseek4", "qwen4exp_blocks")
        else None
    )
    check(model_path(name), 2 * BATCH + 100, known)


@pytest.mark.sampled(every=6)
@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "k=q8_0,v=q4_0"])
@pytest.mark.parametrize("name", [name for name in DECLARATIONS if name not in FEW_POSITIONS])
def test_every_architecture_gives_the_same_bits_from_the_cache(model_path, name: str, kv_type: str):
    path = model_path(name)
    ids = tokens(2 * BATCH + 200)
    for prompt in (ids, ids, [*ids[: 2 * BATCH + 40], 3, 4, 5], [*ids, 9]):
        _, anew = in_new_process(path, prompt, cache=False, kv_type=kv_type)
        _, logits = in_new_process(path, prompt, kv_type=kv_type)
        np.testing.assert_array_equal(logits, anew)


@pytest.mark.parametrize("length", [BATCH + 1, 2 * BATCH, 2 * BATCH + 1, 2 * BATCH + PAGE])
def test_prompts_of_every_length_give_the_same_bits_from_the_cache(tiny: Path, length: int):
    check(tiny, length, (length if length % BATCH == 0 else length // BATCH * BATCH))


@pytest.mark.sampled
@pytest.mark.slow
def test_a_real_model_answers_the_same_from_the_cache(shared):
    """Cover long runs, which round activations to 8 bits, and short ones, which round to 16."""
    path = shared / "models" / "smollm2-135m-instruct-q4_1.gguf"
    text = (shared / "text" / "tinyshakespeare.txt").read_text()[:2200]
    answers = []
    for cache in (False, True, True):
        with open_model(path, cache=cache) as model:
            answer = model.generate(text, max_tokens=8, temperature=0)
            answers.append("".join(answer))
    assert answer.cached_tokens == len(answer.prompt) > BATCH
    assert answers[0] == answers[1] == answers[2]
    with open_model(path) as model:
        other = model.generate(text + " What", max_tokens=8, temperature=0)
        from_cache = "".join(other)
    with open_model(path, cache=False, threads=1) as model:
        assert from_cache == "".join(model.generate(text + " What", max_tokens=8, temperature=0))
    assert other.cached_tokens == len(other.prompt) // BATCH * BATCH


@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_a_long_prompt_continues_where_a_whole_run_ended(model: str, request):
    path = request.getfixturevalue(model)
    ids = tokens(1300)
    prompts = [(ids, 0), (ids, 1300), ([*ids[:1290], 9], 1024), (ids[:700], 512), (tokens(600, seed=1), 0)]
    with open_model(path, cache=False) as one:
        for prompt, known in prompts:
            cached, logits = read(one, prompt)
            assert cached == known
            np.testing.assert_array_equal(logits, in_new_process(path, prompt, cache=False)[1])


def test_a_turn_continues_where_the_last_one_ended(tiny: Path):
    ids = tokens(1300)
    with open_model(tiny) as model:
        read(model, ids)
        cached, _ = read(model, [*ids, 5, 6, 7, 8, 9])
        assert cached == 1303
    assert in_new_process(tiny, [*ids, 5, 6, 7, 8, 9])[0] == 1024


def test_windows_are_stored_at_the_end_of_long_prompts(model_path):
    """Store them although windowed layers have given back most pages by then."""
    path = model_path("gemma3")
    ids = tokens(5 * BATCH + 10)
    in_new_process(path, ids)
    parts = {entry.about.end: set(prefix_files.open_prefix(entry.key).parts) for entry in prefix_files.list_entries()}
    assert parts == {
        **{key: {"pages"} for key in (512, 1024, 1536)},
        **{key: {"pages", "windows"} for key in (2048, 2304, 2560)},
        5 * BATCH + 10: {"pages", "windows", "logits"},
    }
    for prompt, known in ((ids, 5 * BATCH + 10), ([*ids, 3], 5 * BATCH), ([*ids[: 2 * BATCH], 3], 0)):
        cached, logits = in_new_process(path, prompt)
        assert cached == known
        np.testing.assert_array_equal(logits, in_new_process(path, prompt, cache=False)[1])
    assert in_new_process(path, [*ids[: 2 * BATCH], 4])[0] == 2 * BATCH, "it has been written with its windows now"


def test_runs_behind_deep_positions_are_shorter(tiny: Path):
    ids = tokens(2700)
    in_new_process(tiny, ids)
    for prompt, known in ((ids, 2700), ([*ids[:2600], 3], 2560), ([*ids[:2500], 3], 2304), ([*ids[:2000], 3], 1536)):
        cached, logits = in_new_process(tiny, prompt)
        assert cached == known
        np.testing.assert_array_equal(logits, in_new_process(tiny, prompt, cache=False)[1])


def test_the_slack_of_windows_covers_a_whole_run():
    assert SLACK >= BATCH


# ---- another model is another key -----------------------------------------------------------------------------------


def test_only_the_same_model_and_cache_type_find_a_prefix(tiny: Path, tmp_path: Path):
    ids = tokens(600)
    path = tmp_path / "model.gguf"
    shutil.copy(tiny, path)
    in_new_process(path, ids)
    assert in_new_process(path, ids)[0] == 600
    assert in_new_process(path, ids, kv_type="q8_0")[0] == 0
    assert in_new_process(path, ids, threads=1)[0] == 600
    assert in_new_process(path, [*ids[:100], 9, *ids[101:]])[0] == 0
    state, data = path.stat(), bytearray(path.read_bytes())
    data[-1000] ^= 1  # one weight, a little, and the time of change put back
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert in_new_process(path, ids)[0] == 0


def test_fingerprints_differ_by_weights_operations_and_cache_type(tiny: Path, model_path):
    prints = set()
    for path in (tiny, model_path("llama"), model_path("llama_yarn")):
        with open_model(path, cache=False) as model:
            f16 = KVType.parse("f16")
            for kv_type in (f16, KVType.parse("k=f16,v=q8_0")):
                prints.add(prefix_store.compute_fingerprint(model.file, [], model.engine.operations, kv_type))
            same = [prefix_store.compute_fingerprint(model.file, [], model.engine.operations, f16) for _ in range(2)]
            assert same[0] == same[1]
            prints.add(prefix_store.compute_fingerprint(model.file, [], model.engine.operations[:-1], f16))
            tensor = next(iter(model.file.tensors.values()))
            changed = tensor.data.copy()
            changed.reshape(-1)[-1] ^= 1
            object.__setattr__(tensor, "data", changed)
            prints.add(prefix_store.compute_fingerprint(model.file, [], model.engine.operations, f16))
    assert len(prints) == 12


def test_a_model_that_changes_while_open_is_not_cached(tiny: Path, tmp_path: Path, folder: Path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny, path)
    with open_model(path) as model:
        os.utime(path)
        read(model, tokens(600))
    assert not folder.exists()


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "swap", "longer", "folder"])
@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_damaged_files_are_never_used(model: str, harm: str, request, folder: Path):
    """Flip bits, cut files off, or swap them: the answer is as without them."""
    path, ids, random_ = request.getfixturevalue(model), tokens(1100), random.Random(harm)
    _, expected = in_new_process(path, ids)
    for _ in range(12 if harm == "flip" else 2):
        files = sorted(folder.iterdir())
        assert len(files) == 3
        file, data = random_.choice(files), None
        data = bytearray(file.read_bytes())
        if harm == "flip":
            place = random_.randrange(len(data)) if random_.random() < 0.5 else random_.randrange(300)
            data[place] ^= 1 << random_.randrange(8)
        elif harm == "swap":
            data = bytearray(random_.choice([other for other in files if other != file]).read_bytes())
        else:
            data = {"cut": data[: random_.randrange(len(data))], "empty": b"", "longer": data + b"x"}.get(harm, b"")
        file.unlink()
        if harm == "folder":
            file.mkdir()
        else:
            file.write_bytes(data)
        cached, logits = in_new_process(path, ids)
        assert cached < len(ids) or (harm, model) == ("flip", "hybrid"), "states in the middle are not read"
        np.testing.assert_array_equal(logits, expected)
        if harm == "folder":
            file.rmdir()
            in_new_process(path, ids)
        assert in_new_process(path, ids)[0] == len(ids), "it was written again"


def test_a_damaged_file_that_cannot_be_removed_is_ignored(tiny: Path, folder: Path, monkeypatch):
    with open_model(tiny) as model:
        _, logits = read(model, tokens(600))
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with open_model(tiny) as model:
        assert restored(model.prefixes, tokens(600)) is None
        assert model.prefixes.load(model.prefixes.find_prefix(tokens(600))) is None
        np.testing.assert_array_equal(read(model, tokens(600))[1], logits)


def test_without_another_thread_nothing_is_written(tiny: Path, folder: Path, monkeypatch):
    """As when the interpreter ends: the answer comes, and nobody waits for a thread that never started."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with open_model(tiny) as model, monkeypatch.context() as context:
        context.setattr(prefixes.threading.Thread, "start", refuse)
        _, logits = read(model, tokens(600))
        model.prefixes.close()
    assert not folder.exists() or not list(folder.iterdir())
    with open_model(tiny, cache=False) as model:
        np.testing.assert_array_equal(read(model, tokens(600))[1], logits)


def test_a_folder_that_cannot_be_written_gives_one_warning(tiny: Path, folder: Path, monkeypatch):
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    with open_model(tiny) as model:
        _, logits = read(model, tokens(600))
        model.close()
        assert (
            f"cannot write the prefix cache: {folder}: cannot be created: " in model.prefixes.warning
        )  # then the system's message
    folder.unlink()

    def refuse(self, data):
        raise self.make_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(SafeFile, "write", refuse)
    with open_model(tiny) as model:
        np.testing.assert_array_equal(read(model, tokens(600))[1], logits)
        model.close()
        assert "No space left on device" in model.prefixes.warning
    assert list(folder.iterdir()) == []


def test_the_least_recently_used_prefix_is_pruned_first(tiny: Path, folder: Path, monkeypatch):
    prompts = [tokens(600, seed) for seed in range(4)]
    for number, prompt in enumerate(prompts[:3]):
        in_new_process(tiny, prompt)
        for file in folder.iterdir():
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 1000 + number))
    in_new_process(tiny, prompts[0])  # used again
    one = sum(entry.size for entry in prefix_files.list_entries()) / 3
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, str(3.2 * one / 1e9))
    in_new_process(tiny, prompts[3])
    sizes = sum(entry.size for entry in prefix_files.list_entries())
    assert sizes <= 3.2 * one
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "1")
    with open_model(tiny) as model:
        held = [restored(model.prefixes, prompt) for prompt in prompts]
        assert [len(prefix.sequence.tokens) if prefix else 0 for prefix in held] == [600, 0, 600, 600]


@pytest.mark.parametrize("is_found", [False, True])
def test_the_end_of_a_prompt_is_pruned_first(tiny: Path, folder: Path, monkeypatch, is_found: bool):
    """Without its beginning the rest is useless. All of it was written, or found, in the same moment."""
    ids = tokens(3 * BATCH + 100)
    in_new_process(tiny, ids)
    if is_found:
        assert in_new_process(tiny, ids)[0] == len(ids)
    with open_model(tiny) as model:
        for left in (3, 2, 1):
            most = sum(sorted(file.stat().st_size for file in folder.iterdir())[-left:])
            monkeypatch.setenv(prefix_files.SIZE_VARIABLE, str((most + 500) / 1e9))
            prefix_files.prune()
            prefix = restored(model.prefixes, ids)
            assert prefix and len(prefix.sequence.tokens) == left * BATCH
            prefix.sequence.close()


def test_a_limit_of_0_writes_nothing(tiny: Path, folder: Path, monkeypatch):
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "0")
    in_new_process(tiny, tokens(600))
    assert not folder.exists()


def test_a_limit_of_0_finds_nothing(tiny: Path, folder: Path, monkeypatch):
    ids = tokens(600)
    assert [in_new_process(tiny, ids)[0] for _ in range(2)] == [0, 600]
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "0")
    with open_model(tiny) as model:
        assert read(model, ids)[0] == 0
        assert restored(model.prefixes, ids) is None and model.prefixes.find_prefix(ids, is_conversation=True) is None


def test_short_prompts_are_not_stored(tiny: Path, folder: Path):
    in_new_process(tiny, tokens(BATCH))
    assert not folder.exists()
    in_new_process(tiny, tokens(BATCH + 1))
    assert len(list(folder.iterdir())) == 2
    assert os.name != "posix" or folder.stat().st_mode & 0o077 == 0, "prompts are private"


def test_prompts_share_the_files_of_their_common_prefix(tiny: Path, folder: Path):
    ids = tokens(1500)
    in_new_process(tiny, ids)
    assert len(list(folder.iterdir())) == 3
    in_new_process(tiny, [*ids[:1400], 3])
    assert len(list(folder.iterdir())) == 4


def test_nothing_is_written_to_a_full_disk(tiny: Path, folder: Path, monkeypatch):
    monkeypatch.setattr(prefix_files, "DISK_SHARE", 1 << 60)
    in_new_process(tiny, tokens(2900))
    assert list(folder.iterdir()) == []


# ---- which runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [256, 512])
def test_runs_end_at_the_same_positions_for_all_prompts(later: int):
    """Expect them at most BATCH tokens apart."""
    runs, ends = RunPlan(later), [0]
    while ends[-1] < 4000:
        ends.append(runs.find_next_end(ends[-1]))
    assert ends == [*range(0, DEEP_POSITION, FIRST_RUN), *range(DEEP_POSITION, 4097, later)]
    assert max(np.diff(ends)) <= BATCH
    for length in range(4000):
        assert runs.find_last_end(length) == max(end for end in ends if end <= length)
        assert runs.find_next_end(length) == min(end for end in ends if end > length)


def test_long_prompts_run_from_multiples_of_512_or_a_turns_end():
    """Never reuse tokens computed in 8 bits for a prompt that runs in 16."""
    fake = FakeEngine(300, lambda tokens: 1, 5000)
    sequences = PrefixCache(fake)

    def calls(ids: list[int]) -> list[tuple[int, int]]:
        fake.calls.clear()
        with acquire(sequences, ids) as (sequence, logits):
            if logits is None:
                known = len(sequence.tokens)
                sequences.record_prefill(sequence, known, prefill_prompt(sequence, ids, None))
        return fake.calls[:]

    ids = tokens(1200)
    assert calls(ids) == [(0, 512), (512, 512), (1024, 176)]
    assert calls(ids) == []
    assert calls([*ids[:900], 1, 1]) == [(512, 390)]
    assert calls([*ids[:900], 1, 1, 2, 2]) == [(902, 2)]
    assert calls([*ids[:900], 1, 1, 3, 3]) == [(902, 2)], "another turn instead of the last one"
    assert calls([*ids[:900], 1, 4]) == [(512, 390)]
    assert calls(ids[:100]) == [(0, 100)], "what was read in 8 bits does not begin what is read in 16"
    assert calls([*ids[:90], 1, 2]) == [(90, 2)]
    assert calls(ids[:170]) == [(0, 170)]
    assert calls(ids[:170]) == []
    assert calls([*ids[:160], 1, 2]) == [(0, 162)]


# ---- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm(tiny: Path) -> Path:
    """Return the model, with kernels compiled."""
    localllm.open(tiny, threads=2).close()
    return tiny


@pytest.fixture
def environment(tmp_path: Path, warm: Path) -> Iterator[dict[str, str]]:
    """Return an environment with its own cache, but the common kernels."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(get_cache_folder() / "kernels")
    yield {**os.environ, "PYTHONPATH": str(ROOT), "LOCALLLM_CACHE": str(cache)}


def command(model: Path, *more: str) -> list[str]:
    options = ["--raw", "--temp", "0", "-n", "8", "-c", "3000", "-p", "hello world " * 400]
    return [sys.executable, "-m", "localllm", "run", str(model), *options, *more]


def answer(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(arguments, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def test_run_stores_prompts_that_cache_lists_and_clears(warm: Path, environment, cli, monkeypatch, folder):
    kept = Path(environment["LOCALLLM_CACHE"]) / "prefixes"
    anew = answer(command(warm, "--no-cache", "--stats"), environment)
    assert not kept.exists()
    first = answer(command(warm, "--stats"), environment)
    assert len(list(kept.iterdir())) > 1
    second = answer(command(warm, "--stats"), environment)
    assert anew.stdout == first.stdout == second.stdout
    assert b"cached" not in anew.stderr + first.stderr and b"1200 cached" in second.stderr
    monkeypatch.setattr(prefix_files, "get_folder", lambda: kept)
    monkeypatch.setattr(written_file, "get_folder", lambda: kept.parent / "written")
    code, out, err = cli("cache")
    assert (code, err, len(out.splitlines())) == (0, "", 4)
    assert out.splitlines()[1].startswith(warm.name) and out.splitlines()[2].startswith("texts")
    assert cli("cache", "clear") == (0, "", "")
    assert list(kept.iterdir()) == list((kept.parent / "written").iterdir()) == []
    assert cli("cache") == (0, "", "")
    code, _, err = cli("cache", "empty")
    assert code == 2 and "empty" in err


def test_the_answer_ends_before_the_prefix_is_written(warm: Path, environment, tmp_path):
    """Close stdout before the first file exists, however slow the disk; let Ctrl-C end the writing."""
    slow = "import time\nfrom localllm.files import safe_file\nsync = safe_file.SafeFile.sync\n"
    slow += "def slowly(self):\n    time.sleep(90)\n    sync(self)\nsafe_file.SafeFile.sync = slowly\n"
    slow += "from localllm.cli.main import main\nmain()"
    arguments = [sys.executable, "-c", slow, *command(warm)[3:]]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(arguments, env=environment, **pipes, **apart())
    assert process.stdout.read()
    ended = time.monotonic()
    assert process.poll() is None
    ctrl_c(process)
    assert process.wait(120) == 0, "the answer was printed"
    assert time.monotonic() - ended < 60, "Ctrl-C ends the writing"
    assert not list((Path(environment["LOCALLLM_CACHE"]) / "prefixes").glob(".*"))


@pytest.mark.slow
def test_killing_a_process_while_it_writes_loses_no_answer(warm: Path, environment):
    """Kill it three times; scripts/fuzz/kill_test.py does it as often as wanted."""
    expected = answer(command(warm, "--no-cache"), environment).stdout
    started = time.monotonic()
    answer(command(warm), environment)
    took, random_ = time.monotonic() - started, random.Random(5)
    kept = Path(environment["LOCALLLM_CACHE"]) / "prefixes"
    assert len(list(kept.iterdir())) > 1
    for _ in range(3):
        if random_.random() < 0.5:
            shutil.rmtree(kept, ignore_errors=True)
        arguments = command(warm)
        process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        process.stdout.read()  # the answer is there, files are being written
        time.sleep(random_.random() * took / 20)
        process.kill()
        process.wait()
        assert answer(command(warm), environment).stdout == expected


@pytest.mark.slow
def test_several_processes_share_the_prefix_cache(warm: Path, environment):
    expected = answer(command(warm, "--no-cache"), environment).stdout
    for _ in range(2):
        processes = [
            subprocess.Popen(command(warm), env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            for _ in range(4)
        ]
        for process in processes:
            assert process.communicate(timeout=120)[0] == expected
            assert process.returncode == 0


def test_several_candidates_share_their_prompts_prefix(tiny: Path):
    ids, options = tokens(1100), {"n": 2, "beams": 2, "max_tokens": 5}
    with open_model(tiny, cache=False) as model:
        anew = model.candidates(ids, **options)
    with open_model(tiny) as model:
        assert model.candidates(ids, **options) == anew
    with open_model(tiny) as model:
        assert len(restored(model.prefixes, ids).sequence.tokens) == 1100
        assert model.candidates(ids, **options) == anew
        other = model.candidates([*ids[:1050], 3], **options)
    with open_model(tiny, cache=False) as model:
        assert model.candidates([*ids[:1050], 3], **options) == other


def test_restored_sequences_can_be_forked_and_continued(tiny: Path):
    ids = tokens(1100)
    in_new_process(tiny, ids)
    with open_model(tiny) as model:
        assert isinstance(model.prefixes, PrefixStore)
        assert restored(model.prefixes, tokens(1100, seed=9)) is None
        whole = restored(model.prefixes, ids)
        assert whole is not None
        sequence, logits = whole
        assert sequence.tokens == ids and logits.shape == (1, model.engine.vocab_size)
        assert sequence.fork().aligned == 1024
        aligned = restored(model.prefixes, [*ids, 3])
        assert aligned is not None
        sequence, logits = aligned
        assert sequence.tokens == ids[:1024] and logits is None


class Written:
    """A PrefixStore whose writes wait for a signal, and which counts closed sequences."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.continue_with, self.written = threading.Semaphore(0), threading.Semaphore(0), list[str]()
        self.closed, self.pruned, self.error = list[str](), 0, None
        self.kept = prefixes.PrefixStore(
            SimpleNamespace(hyperparameters=SimpleNamespace(list_states=list)),
            SimpleNamespace(path="name.gguf", stat_files=list),
        )
        monkeypatch.setattr(self.kept, "_write_chunks", self.write)
        monkeypatch.setattr(prefixes, "prune", lambda: setattr(self, "pruned", self.pruned + 1))

    def write(self, read: prefixes.PendingWrite) -> None:
        self.begun.release()
        assert self.continue_with.acquire(timeout=60)
        if self.error:
            raise self.error
        self.written.append(read.sequence.name)

    def keep(self, name: str) -> None:
        self.kept.keep(SimpleNamespace(name=name, close=lambda: self.closed.append(name)), None)

    def wait(self) -> None:
        """Wait until the thread has ended."""
        thread = self.kept._thread
        self.continue_with.release()
        if thread:
            thread.join(60)


def test_a_waiting_prefix_is_replaced_by_a_later_one(monkeypatch):
    """Write one prefix at a time in one thread, and close all sequences in the end."""
    store = Written(monkeypatch)
    assert not store.kept.is_writing
    store.keep("a")
    assert store.begun.acquire(timeout=60) and store.kept.is_writing
    store.keep("b")
    store.keep("c")
    assert (store.closed, store.written) == (["b"], [])
    store.continue_with.release()
    store.wait()
    assert (store.closed, store.written, store.pruned) == (["b", "a", "c"], ["a", "c"], 2)
    assert not store.kept.is_writing
    store.keep("d")
    store.wait()
    assert (store.closed[3:], store.written[2:], store.kept.warning) == (["d"], ["d"], None)
    store.kept.close()
    store.keep("e")
    assert (store.closed[4:], store.written[3:], store.kept.is_writing) == (["e"], [], False)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space"), "No space"), (MemoryError(), "not enough memory"),
        (LocalllmError("as it is"), "as it is"),
    ],
)  # fmt: skip
def test_nothing_is_written_after_a_failure(monkeypatch, error: Exception, reason: str):
    store = Written(monkeypatch)
    store.error = error
    store.keep("a")
    store.wait()
    assert (store.closed, store.pruned, store.kept.is_writing) == (["a"], 0, False)
    assert store.kept.warning == f"cannot write the prefix cache: {reason}"
    store.keep("b")
    assert (store.closed, store.written, store.kept.is_writing) == (["a", "b"], [], False)


def test_samples_of_a_tensor_cover_its_beginning_middle_and_end():
    data = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    assert sample_bytes(data[:512]) == data[:512].tobytes()
    for size in (513, 5000):
        taken = sample_bytes(data[:size])
        assert (len(taken), taken[:64], taken[-64:]) == (512, data[:64].tobytes(), data[size - 64 : size].tobytes())
    assert taken[64:128] == data[705:769].tobytes()


def test_descriptions_are_equal_for_equal_operations_only():
    """Ignore the order of arguments, but neither values, types nor shapes."""
    x, y = Activation(ALL, 4), Activation(WANTED, 6)
    operations = [Elementwise((), x, "embed", {"b": 2, "a": 1}), Elementwise((x, x), y, "add", {})]
    assert describe_operations(operations) == [
        ("embed", [], "all", 4, [("function", "'embed'"), ("numbers", [("a", "1"), ("b", "2")])]),
        ("add", [0, 0], "wanted", 6, [("function", "'add'"), ("numbers", [])]),
    ]
    row = np.arange(4, dtype=np.float32)
    others = [row + 1, row.astype(np.float64), row.reshape(2, 2)]
    assert describe_value(row) == describe_value(row.copy())
    assert not any(describe_value(row) == describe_value(other) for other in others)
