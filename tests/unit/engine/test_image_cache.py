"""Test images in the prefix cache: later processes neither encode nor prefill them again, nor confuse them."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from models import write
from models.projectors import projector, seeing, write_projector
from pooled import acquire

import localllm
from localllm import images
from localllm.arch import vision
from localllm.engine import image_cache as seen_rows
from localllm.engine import prefix_store as fingerprints
from localllm.engine.image_cache import EncodedImageCache, compute_file_key
from localllm.engine.image_tokens import find_last_end, is_worth_caching, list_chunk_ends
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.operations.operation import Operation
from localllm.engine.runs import RunPlan
from localllm.errors import LocalllmError, UsageError
from localllm.files.cache import prefix_files
from localllm.generation import image_encoder as eye
from localllm.generation.chunked_prefill import prefill_prompt
from localllm.generation.image_encoder import ImageEncoder
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from tests.unit.engine.test_vision_encoder import picture

GREEDY = GenerationOptions(8, sampling=SamplingOptions(temperature=0))
ONE, TWO, THREE = (picture(size, seed) for seed, size in ((1, (640, 480)), (2, (320, 480)), (3, (640, 480))))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return an empty folder for the prefix cache."""
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    monkeypatch.setattr(prefix_files, "get_folder", lambda: tmp_path / "kept")
    return tmp_path / "kept"


def written(folder: Path, name: str) -> Path:
    """Write a model and its projector; Gemma's images have 144 rows, which see each other."""
    write_projector(projector(name, **({"side": 336} if name == "gemma3" else {})), folder / "mmproj.gguf")
    return write(seeing(name, context=4096), folder / "tiny.gguf")


def build_messages(question: str, *images: object, before: int = 0) -> list[dict]:
    parts = [{"type": "text", "text": "Look. " * before}, *({"type": "image", "image": image} for image in images)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


class Read:
    """A prompt as a process runs it: the next logits, its cached tokens, and how many images it encoded."""

    def __init__(self, path: Path, messages: list[dict], cache: bool = True, pan_and_scan: bool = False):
        with localllm.open(path, threads=2, cache=cache, pan_and_scan=pan_and_scan) as model:
            sequences = model.session.cache
            request = model.session.request(messages)
            self.prompt = request.prompt
            with acquire(sequences, self.prompt) as (sequence, logits):
                self.cached_logits = len(sequence.tokens)
                if logits is None:
                    logits = prefill_prompt(sequence, self.prompt, None)
                    sequences.record_prefill(sequence, self.cached_logits, logits)
                self.logits = np.concatenate([logits, *(sequence.append([token]) for token in (5, 6, 7))])
            self.encoded = model.vision.encoder.encoded

    @property
    def image_end(self) -> int:
        return max(place for place, token in enumerate(self.prompt) if token < 0) + 1


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 450])
@pytest.mark.parametrize("name", ["gemma3", "idefics3", "qwen25vl", "qwen35", "lfm2", "llava16"])
def test_another_process_neither_encodes_nor_prefills_an_image_again(tmp_path, name, before):
    """Of another question only the question runs, to the same bits; with recurrent layers, all behind the last
    snapshot.
    """
    path = written(tmp_path, name)
    first = Read(path, build_messages("What is it? " * 20, ONE, TWO, before=before))
    assert (first.cached_logits, first.encoded) == (0, 2) and is_worth_caching(first.prompt)
    again = Read(path, build_messages("What is it? " * 20, ONE, TWO, before=before))
    assert (again.cached_logits, again.encoded) == (len(first.prompt), 0)
    assert np.array_equal(again.logits, first.logits)
    question = build_messages("And the colour? " * 9, ONE, TWO, before=before)
    other = Read(path, question)
    assert other.encoded == 0 and other.cached_logits >= other.image_end - (512 if name in ("lfm2", "qwen35") else 0)
    anew = Read(path, question, cache=False)
    assert anew.encoded == 2 and np.array_equal(other.logits, anew.logits)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gemma3", "qwen25vl"])
def test_another_image_of_the_same_size_is_not_taken_from_the_cache(tmp_path, name):
    path = written(tmp_path, name)
    first = Read(path, build_messages("What? " * 20, ONE))
    other = Read(path, build_messages("What? " * 20, THREE))
    assert len(first.prompt) == len(other.prompt) and (other.cached_logits, other.encoded) == (0, 1)
    assert not np.array_equal(first.logits, other.logits)
    assert np.array_equal(other.logits, Read(path, build_messages("What? " * 20, THREE), cache=False).logits)
    both = Read(path, build_messages("What? " * 20, ONE, THREE))
    assert both.encoded == 0 and both.cached_logits < both.image_end
    assert np.array_equal(both.logits, Read(path, build_messages("What? " * 20, ONE, THREE), cache=False).logits)


def test_another_projector_at_the_same_path_encodes_again(tmp_path):
    path, question = written(tmp_path, "gemma3"), build_messages("What? " * 20, ONE)
    first = Read(path, question)
    write_projector(projector("gemma3", seed=1, side=336), tmp_path / "mmproj.gguf")
    other = Read(path, question)
    assert other.encoded == 1 and other.cached_logits == 0 and first.prompt != other.prompt
    assert np.array_equal(other.logits, Read(path, question, cache=False).logits)


def test_images_with_and_without_crops_are_cached_apart(tmp_path):
    path, question = written(tmp_path, "gemma3"), build_messages("What? " * 20, ONE)
    whole = Read(path, question)
    cut = Read(path, question, pan_and_scan=True)
    assert cut.encoded == 1 and not set(cut.prompt) & {token for token in whole.prompt if token < 0}
    assert np.array_equal(cut.logits, Read(path, question, cache=False, pan_and_scan=True).logits)
    for pan_and_scan, first in ((False, whole), (True, cut)):
        again = Read(path, question, pan_and_scan=pan_and_scan)
        assert again.encoded == 0 and again.prompt == first.prompt and np.array_equal(again.logits, first.logits)


def test_damaged_cache_files_cost_only_time(tmp_path, folder):
    path, question = written(tmp_path, "gemma3"), build_messages("What? " * 20, ONE)
    first = Read(path, question)
    for file in folder.iterdir():
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    again = Read(path, question)
    assert again.encoded == 1 and np.array_equal(again.logits, first.logits)
    assert Read(path, question).encoded == 0


def test_a_disabled_cache_writes_nothing(tmp_path, folder, monkeypatch):
    path = written(tmp_path, "gemma3")
    Read(path, build_messages("What? " * 20, ONE), cache=False)
    assert not folder.exists()
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "0")
    Read(path, build_messages("What? " * 20, ONE))
    assert not folder.exists()


def test_an_image_in_a_short_prompt_is_not_encoded_again(tmp_path, cli):
    """Check also that `cache` lists it."""
    path = write(seeing("gemma3", context=2048), tmp_path / "tiny.gguf")
    write_projector(projector("gemma3"), tmp_path / "mmproj-tiny.gguf")
    assert Read(path, build_messages("What?", ONE)).encoded == 1
    assert Read(path, build_messages("And what else?", ONE)).encoded == 0
    _, out, _ = cli("cache")
    assert "mmproj-tiny.gguf" in out and "tiny.gguf" in out


@pytest.mark.parametrize("name", ["gemma3", "qwen25vl", "qwen35"])
def test_a_conversation_with_an_image_continues_in_another_process(tmp_path, name):
    """Run only the new question, even though answers were decoded token by token."""
    path, question, said = written(tmp_path, name), build_messages("What is this? " * 9, ONE), [5, 6, 7, 8]

    def goes_on(prompt: list[int], earlier: int, model: localllm.Model) -> tuple[int, np.ndarray]:
        with acquire(model.session.cache, prompt, earlier=earlier) as (sequence, _):
            known = len(sequence.tokens)
            return known, prefill_prompt(sequence, prompt, None)

    with localllm.open(path, threads=2) as model:
        request, sequences = model.session.request(question), model.session.cache
        with acquire(sequences, request.prompt) as (sequence, _):
            sequences.record_prefill(sequence, 0, prefill_prompt(sequence, request.prompt, None))
            for token in said:
                sequence.append([token])
        model.session.leave()
        held = [*request.prompt, *said]
        _, expected = goes_on([*held, 9, 10, 11], 0, model)
    with localllm.open(path, threads=2) as model:
        again = model.session.request(question)
        assert again.prompt == request.prompt
        known, logits = goes_on([*held, 9, 10, 11], len(held), model)
        assert known == len(held) and model.vision.encoder.encoded == 0
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_session_whose_image_is_missing_or_replaced_runs_it_again(tmp_path, is_there):
    path, image = written(tmp_path, "gemma3"), tmp_path / "one.png"
    ONE.save(image)
    with localllm.open(path, threads=2) as model:
        list(model.session.ask("What?", GREEDY, [str(image)]))
        history = model.session.messages
        held = len(model.session._answer.prompt) + len(model.session._answer.tokens)
        model.session.leave()
    THREE.save(image)
    if not is_there:
        image.unlink()
    with localllm.open(path, threads=2) as model:
        model.session.messages, model.session.earlier = history, held
        if not is_there:
            with pytest.raises(UsageError, match="cannot read the image"):
                model.session.ask("And now?", GREEDY)
            return
        answer = model.session.ask("And now?", GREEDY)
        list(answer)
        assert answer.cached_tokens < 20 and model.vision.encoder.encoded == 1


def test_chunks_end_where_runs_end_and_after_the_last_tile():
    rng, runs = np.random.default_rng(0), RunPlan()
    for _ in range(200):
        tokens = list[int]()
        while len(tokens) < 1500:
            count, key = int(rng.integers(1, 700)), int(rng.integers(1, 3))
            tokens += [5] * count if rng.random() < 0.5 else [-1 - (key << 15 | row) for row in range(count)]
        if tokens[-1] < 0:
            tokens.append(5)
        ends = list_chunk_ends(tokens, runs)
        assert ends == sorted(set(ends)) and all(find_last_end(tokens, end, runs) == end for end in ends)
        assert not tokens[0] or ends[-1] > len(tokens) - 700
    tiles = [token for key in range(1, 7) for token in (7, 7, *(-1 - (key << 15 | row) for row in range(40)))]
    assert list_chunk_ends([*tiles, *[5] * 90], runs) == [len(tiles)]
    assert list_chunk_ends([5] * 3000, runs) == [512, 1024, 1536, 2048, 2304, 2560, 2816]


def test_projector_fingerprints_cover_weights_pillow_and_modules(tmp_path, monkeypatch):
    """List modules in another order, which must not matter."""
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    known = {"fingerprint": b"projector", "state": "state"}
    file = SimpleNamespace(stat_files=lambda: known["state"])
    monkeypatch.setattr(seen_rows, "compute_fingerprint", lambda file, state, operations, kept: (
        f"{state} {operations} {kept.keys} {kept.values}".encode() + known["fingerprint"]))  # fmt: skip
    others, modules = [], [SimpleNamespace(__path__=[str(tmp_path)])]

    def made() -> bytes:
        return seen_rows.compute_projector_fingerprint(file, "operations", modules)

    first = made()
    glob = Path.glob
    with monkeypatch.context() as other:
        other.setattr(Path, "glob", lambda folder, pattern: reversed(sorted(glob(folder, pattern))))
        assert made() == first and len(first) == 32
    (tmp_path / "c.txt").write_text("changed", encoding="utf-8")
    assert made() == first
    (tmp_path / "b.py").write_text("changed", encoding="utf-8")
    others.append(made())
    monkeypatch.setattr("PIL.__version__", "0")
    others.append(made())
    known["state"] = "changed"
    others.append(made())
    modules.clear()
    others.append(made())
    assert len({first, *others}) == 5


def test_model_fingerprints_cover_weights_operations_and_code(monkeypatch):
    """List files in another order, which must not matter."""
    tensor = SimpleNamespace(format=SimpleNamespace(name="F32"), shape=(2,), data=np.arange(8, dtype=np.uint8))
    file, known = SimpleNamespace(tensors={"a": tensor}), {"folder": "code", "tiles": False}
    monkeypatch.setattr(fingerprints, "get_object_folder", lambda: SimpleNamespace(name=known["folder"]))
    monkeypatch.setattr(fingerprints, "has_tiles", lambda: known["tiles"])

    def made(state="state", operations=(), kv_type="f16") -> bytes:
        return fingerprints.compute_fingerprint(file, state, operations, kv_type)

    first, rglob = made(), Path.rglob
    with monkeypatch.context() as other:
        other.setattr(Path, "rglob", lambda folder, pattern: reversed(sorted(rglob(folder, pattern))))
        assert made() == first and len(first) == 32
        other.setattr(Path, "rglob", lambda folder, pattern: sorted(rglob(folder, pattern))[:-1])
        others = [made()]
    others += [made("other"), made(operations=[Operation((), Activation(ALL, 4))]), made(kv_type="f32")]
    for change in ({"folder": "other"}, {"tiles": True}):
        known |= change
        others.append(made())
    tensor.data = tensor.data + 1
    others.append(made())
    file.tensors = {"b": tensor}
    others.append(made())
    tensor.shape = (1, 2)
    others.append(made())
    assert len({first, *others}) == 10


def test_encoded_rows_are_cached_and_invalid_files_removed(folder, monkeypatch):
    kept, lots = (
        EncodedImageCache("name", 3),
        [np.arange(9.0).reshape(3, 3), np.zeros((0, 3)), np.ones((1, 3), np.float32)],
    )
    assert kept.find(b"a") is None
    kept.keep(b"a", lots)
    file = folder / compute_file_key(b"a")
    os.utime(file, (0, 0))
    opened, opens = [], seen_rows.open_prefix
    with monkeypatch.context() as watched:
        watched.setattr(seen_rows, "open_prefix", lambda key: opened.append(opens(key)) or opened[-1])
        loaded = kept.find(b"a")
    assert [one._file.closed for one in opened] == [True]
    assert [lot.tolist() for lot in loaded] == [lot.tolist() for lot in lots]
    assert {lot.dtype for lot in loaded} == {np.dtype(np.float32)}
    assert file.stat().st_mtime > 1e9
    assert [(one.about.model, one.about.end, one.about.before) for one in prefix_files.list_entries()] == [
        ("name", 4, "")
    ]
    assert kept.find(b"b") is None
    monkeypatch.setenv(prefix_files.SIZE_VARIABLE, "0")
    kept.keep(b"b", lots)
    assert kept.find(b"a") is None and not (folder / compute_file_key(b"b")).exists()
    monkeypatch.delenv(prefix_files.SIZE_VARIABLE)
    counts, about = np.array([4, -1]), prefix_files.PrefixChunkInfo("name", 3, "")
    parts = {"counts": counts.view(np.uint8), "rows": np.zeros(9, np.float32).view(np.uint8)}
    prefix_files.write_prefix(compute_file_key(b"c"), about, parts)
    assert kept.find(b"c") is None and not (folder / compute_file_key(b"c")).exists()
    assert EncodedImageCache("name", 4).find(b"a") is None and not file.exists()
    for failure in (OSError(), LocalllmError()):
        full = Mock(side_effect=failure)
        monkeypatch.setattr(seen_rows, "prune", full)
        kept.keep(b"a", lots)  # it costs only time
        full.assert_called_once()


def test_a_projector_whose_file_is_gone_is_not_cached(monkeypatch):
    seeing, calls = ImageEncoder.__new__(ImageEncoder), []
    seeing.path, seeing._file, seeing._files = "/p.gguf", "file", "files"
    seeing._reader = SimpleNamespace(operations="operations")
    monkeypatch.setattr(eye, "compute_projector_fingerprint", lambda *what: calls.append(what) or b"digest")
    assert (seeing._compute_fingerprint(), seeing._files, calls) == (
        b"digest",
        "files",
        [("file", "operations", (vision, images))],
    )

    def gone(*_: object) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(eye, "compute_projector_fingerprint", gone)
    assert (seeing._compute_fingerprint(), seeing._files) == (b"/p.gguf", None)
