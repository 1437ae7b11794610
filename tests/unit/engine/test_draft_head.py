"""Compare draft layers with NumPy: for whole prompts, token by token, after truncation, behind their own drafts."""

import json
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from types import SimpleNamespace

import numpy as np
import pytest
from engines import FAITHFUL
from models import model, write
from models.declaration import Model
from models.golden import kept
from models.guessing import GUESSES, HEADS, MADE, OWN, text, with_guess, with_head
from models.guessing import head as head_for
from step_costs import Free

from localllm import api
from localllm.arch import load_architecture
from localllm.arch.decoder import MtpOutput, get_mtp_state, has_mtp_layer
from localllm.arch.layer_state import KVType
from localllm.arch.weights import Weights
from localllm.engine import draft_head as guess_head
from localllm.engine.draft_head import DraftHead, DraftHeadSource, parse_draft_head, select_mtp_layer
from localllm.engine.engine import Engine
from localllm.engine.lower.header import SequenceSpan
from localllm.engine.operations.registry import ReferenceBuilder
from localllm.engine.options import EngineOptions
from localllm.engine.runs import LATER_RUN, RunPlan
from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.model_methods import gather_options
from localllm.generation.speculation import speculator as leaps
from localllm.generation.speculation.speculator import MAX_OTHERS, get_head_budget
from localllm.kernels.reference import ReferenceCache
from tests.unit.generation.test_prefix_cache import TakenLock

USUAL = ("qwen35", "eagle3_own")  # of a model's own layer, and of a head in a file of its own
NAMES = [*OWN, *MADE, *HEADS]


@pytest.fixture(params=[pytest.param(name, marks=[] if name in USUAL else pytest.mark.sampled) for name in NAMES])
def path(request, tmp_path) -> Path:
    """Write a model; its draft head lies beside it."""
    return written(request.param, tmp_path)


def written(name: str, folder: Path) -> Path:
    made, head = with_head(name) if name in HEADS else (with_guess(name), None)
    if head:
        write(head, head_of(folder / "model.gguf"))
    return write(made, folder / "model.gguf")


def head_of(path: Path) -> Path:
    return path.with_name("head.gguf")


@pytest.fixture
def engine(path):
    engine = Engine(GGUFFile.open(path), EngineOptions(2, 300, "f32"))
    if head_of(path).exists():
        engine.load_draft_head(GGUFFile.open(head_of(path)))
    yield engine
    engine.close()


def opened(path: Path) -> api.Model:
    model = api.open_model(path, threads=2, context=300, cache=False)
    if head_of(path).exists():
        assert model.resolve_drafter(f"draft:{head_of(path)}") == "mtp"
        assert str(head_of(path)) in model.files
    return model


class Meaning:
    """A draft layer in NumPy."""

    def __init__(self, path: Path):
        file, self.kept = GGUFFile.open(path), KVType.parse("f32")
        (self._model, self._h), self._weights = load_architecture(file), Weights(file.tensors)
        has_head = head_of(path).exists()
        source = (
            parse_draft_head(GGUFFile.open(head_of(path)), file, self._h)
            if has_head
            else select_mtp_layer(file, self._model, self._h)
        )
        self.head_source: DraftHeadSource = source

    def before(self, ids: list[int]) -> np.ndarray:
        """Return the hidden state before each token that the layer reads: that of the token before."""
        g, reads = self.head_source, self.reference(ReferenceCache(self.kept), 0, ids, 1)
        reads.reveals, reads.layer_inputs = not g.layers, dict.fromkeys(g.layers)
        self._model.forward(reads, self._weights, self._h)
        shown = np.concatenate([reads.layer_inputs[one] for one in g.layers], axis=1) if g.layers else reads.last_hidden
        rows = g.fuse(reads, g.weights, g.hyperparameters, shown) if g.fuse else shown
        return np.concatenate([np.zeros_like(rows[:1]), rows])

    def guess(self, store: ReferenceCache, place: int, ids: list[int], wanted: int, before: np.ndarray) -> MtpOutput:
        """Return the layer's output, with logits of all tokens."""
        g = self.head_source
        made, logits = g.draft(self.reference(store, place, ids, wanted), g.weights, g.hyperparameters, before)
        every = np.full((len(logits), g.hyperparameters.vocab_size), -np.inf, np.float32)
        every[:, slice(None) if g.tokens is None else g.tokens] = logits
        return MtpOutput(made, every)

    @staticmethod
    def reference(store: ReferenceCache, place: int, ids: list[int], wanted: int) -> ReferenceBuilder:
        return ReferenceBuilder([SequenceSpan(store, place, np.array(ids), wanted)], {}, 300)


def meant(path: Path, ids: list[int], guesses: int = 0) -> tuple[np.ndarray, list[int]]:
    """Return the layer's logits behind a prompt and behind some of its own drafts, and these drafts."""
    meaning = Meaning(path)
    store = ReferenceCache(meaning.kept)
    made, logits = meaning.guess(store, 0, ids, 1, meaning.before(ids[:-1]))
    rows, drafts = [logits[0]], [int(logits[0].argmax())]
    for place in range(len(ids), len(ids) + guesses):
        made, logits = meaning.guess(store, place, drafts[-1:], 1, made[-1:])
        rows.append(logits[0])
        drafts.append(int(logits[0].argmax()))
    return np.array(rows), drafts


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Compare finite logits; impossible tokens must be so in both."""
    some = np.isfinite(expected)
    assert (some == np.isfinite(got)).all() and some.any()
    got, expected = got[some], expected[some]
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def guessed(engine: Engine, sequence, ids: list[int], guesses: int = 0) -> np.ndarray:
    """Return the logits of the sequence's follower behind these tokens and behind its own drafts."""
    follower = sequence.listener
    rows = [follower.append(ids[len(follower.tokens) :])[0]]
    for _ in range(guesses):
        rows.append(follower.append([int(rows[-1].argmax())])[0])
    follower.truncate(len(follower.tokens))  # forgets what it read on guesses
    return np.array(rows)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_in_numpy_agree_with_llama_cpp(name, tmp_path):
    """Accept the measured error, 4e-12."""
    made = with_head(name)[1] if name in HEADS else with_guess(name)
    with np.load(GUESSES) as golden:
        assert str(golden[f"{name} digest"]) == made.digest(), "record it anew: scripts/record/record_guesses.py"
        expected = golden[name]
    meaning, ids = Meaning(written(name, tmp_path)), text()
    guessed = meaning.guess(ReferenceCache(meaning.kept), 0, ids, len(ids), meaning.before(ids[:-1]))
    assert nmse(kept(guessed.logits), expected) < 1e-10


@pytest.mark.parametrize("count", [2, 9, 34, 90])
def test_drafts_of_the_engine_agree_with_numpy(path, engine, count):
    ids = text(count)
    sequence = engine.sequence()
    engine.attach_draft_head(sequence)
    sequence.append(ids[:-1])
    expected, _ = meant(path, ids, guesses=2)
    assert nmse(guessed(engine, sequence, ids, guesses=2), expected) < FAITHFUL


def test_drafting_token_by_token_agrees_with_numpy(path, engine):
    ids = text(50)
    sequence = engine.sequence()
    engine.attach_draft_head(sequence)
    for number in range(1, len(ids)):
        sequence.append(ids[number - 1 : number])
        if number % 7 == 0:
            got = guessed(engine, sequence, ids[: number + 1], guesses=number % 3)
            assert nmse(got, meant(path, ids[: number + 1], number % 3)[0]) < FAITHFUL


def test_a_follower_reads_on_demand_or_when_it_lags_far_behind(path, engine, monkeypatch):
    ids = text(60)
    for late, read in ((20, 42), (100, 0)):
        monkeypatch.setattr(guess_head, "MAX_LAG", late)
        sequence = engine.sequence()
        follower = engine.attach_draft_head(sequence)
        for number in range(59):
            sequence.append(ids[number : number + 1])
        assert len(follower.tokens) == read
        assert nmse(guessed(engine, sequence, ids, guesses=1), meant(path, ids, 1)[0]) < FAITHFUL
        sequence.close()


def test_rejected_drafts_leave_no_trace(path, engine):
    """Never use hidden states of truncated tokens for other tokens at their positions."""
    ids, wrong = text(40), text(6, seed=2)
    sequence = engine.sequence()
    engine.attach_draft_head(sequence)
    sequence.append(ids[:20])
    for end in range(21, 39):
        guessed(engine, sequence, ids[:end], guesses=3)
        sequence.append([ids[end - 1], *wrong[: end % 5]], "all")
        sequence.truncate(end)
    assert nmse(guessed(engine, sequence, ids[:39], 2), meant(path, ids[:39], 2)[0]) < FAITHFUL


def test_a_follower_can_start_in_the_middle_of_a_prompt(engine):
    """Check that it starts again at a truncation before it."""
    ids, sequence = text(60), engine.sequence()
    sequence.append(ids[:30])
    follower = engine.attach_draft_head(sequence)
    assert engine.attach_draft_head(sequence) is follower
    sequence.append(ids[30:40])
    assert follower.begin == 30 and np.isfinite(follower.append(ids[30:41])).any()
    sequence.truncate(10)
    sequence.append(ids[10:15])
    assert follower.begin in (10, 0)  # of a recurrent model, which reads it again from where it can
    assert np.isfinite(follower.append(ids[follower.begin : 16])).any()


def test_drafting_does_not_change_the_models_logits(path):
    ids, rows = text(70), []
    for listens in (False, True):
        file = GGUFFile.open(path)
        engine = Engine(file, EngineOptions(2, 300, "f32"))
        if listens and head_of(path).exists():
            engine.load_draft_head(GGUFFile.open(head_of(path)))
        sequence = engine.sequence()
        if listens:
            engine.attach_draft_head(sequence)
        rows.append(np.concatenate([sequence.append(ids[:-3]), sequence.append(ids[-3:], "all")]))
        engine.close()
    np.testing.assert_array_equal(*rows)


def test_closed_sequences_return_the_pages_of_their_follower(path, engine):
    other = head_of(path)  # or a layer of the model's own
    assert (engine.has_draft_head, engine.draft_head_path) == (True, str(other) if other.exists() else None)
    for _ in range(20):
        sequence = engine.sequence()
        engine.attach_draft_head(sequence)
        sequence.append(text(200))
        sequence.close()
    follower = engine.attach_draft_head(engine.sequence())
    assert follower.engine._backend.get_cache_usage()[0] == 0


def test_attaching_a_draft_head_without_an_mtp_layer_is_refused(tmp_path):
    file = GGUFFile.open(write(model("llama"), tmp_path / "llama.gguf"))
    engine = Engine(file, EngineOptions(1, 300))
    with pytest.raises(UsageError, match="has no MTP layer"):
        engine.attach_draft_head(engine.sequence())
    assert (engine.has_draft_head, engine.draft_head_path) == (False, None)
    engine.close()


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_drafting_does_not_change_answers(path, seed, monkeypatch):
    monkeypatch.setattr(leaps, "StepCostModel", Free)
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    answers = {}
    with opened(path) as model:
        for how in ("off", "mtp", "auto"):
            generation = model.generate(text(30), 60, speculate=how, **drawn)
            answers[how] = "".join(generation), generation.tokens, generation.drafted > 0
    assert answers["mtp"][:2] == answers["auto"][:2] == answers["off"][:2]
    is_long = len(answers["off"][1]) > 1  # one that ends at once has no guesses
    assert [drafted for _, _, drafted in answers.values()] == [False, is_long, is_long]


def test_no_follower_is_attached_where_drafting_is_off_or_lost_too_much(path, monkeypatch):
    with opened(path) as model:
        for how, losses, listens in (("mtp", 0, True), ("off", 0, False), ("mtp", 99, False), ("auto", 0, False)):
            get_head_budget(model.engine).charge(losses)
            "".join(model.generate(text(30), 4, speculate=how, temperature=0, ignore_eos=True))
            assert bool(model.session.cache.idle[-1].listener) == listens


def test_drafting_continues_a_conversation(path):
    with opened(path) as model:
        first = model.generate(text(40), 8, speculate="mtp", temperature=0)
        "".join(first)
        prompt = [*text(40), *first.tokens, *text(9, seed=5)]
        again = model.generate(prompt, 30, speculate="mtp", temperature=0)
        "".join(again)
        assert again.cached_tokens > 40
    with opened(path) as model:
        alone = model.generate(prompt, 30, speculate="off", temperature=0)
        "".join(alone)
    assert again.tokens == alone.tokens


def test_drafting_with_context_shift_is_refused(path):
    with opened(path) as model, pytest.raises(UsageError, match="cannot be combined with on_overflow=shift"):
        model.generate(text(4), 4, speculate="mtp", on_overflow="shift")


@pytest.mark.parametrize("name", [*OWN, *MADE])
def test_the_state_of_an_mtp_layer_follows_the_models_layers(name, tmp_path):
    file = GGUFFile.open(written(name, tmp_path))
    _, h = load_architecture(file)
    assert has_mtp_layer(Weights(file.tensors), h) and get_mtp_state(h).layer == h.layers


@pytest.mark.parametrize(("name", "expected"), [("qwen35", "1 layer, * MB, used"), ("hy_v3", "1 layer, * MB, used")])
def test_inspect_shows_the_mtp_layer(name, expected, tmp_path, cli):
    path = write(with_guess(name), tmp_path / "model.gguf")
    (line,) = [line for line in cli("inspect", path)[1].splitlines() if line.startswith("guesses")]
    assert fnmatch(line.removeprefix("guesses").strip(), expected.replace("MB", "?B")), line
    facts = json.loads(cli("inspect", path, "--json")[1])["guessing"]
    assert facts["layers"] == 1 and facts["used"] and facts["bytes"] > 10_000
    other = write(model("llama"), tmp_path / "llama.gguf")
    assert json.loads(cli("inspect", other, "--json")[1])["guessing"] == {"layers": 0, "bytes": 0, "used": False}
    assert "guesses" not in cli("inspect", other)[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3, MAX_OTHERS + 1])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_drafting_does_not_change_answers_of_batches(path, count, seed, monkeypatch):
    """Check few answers, also when they are the last of many."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    monkeypatch.setattr(leaps, "StepCostModel", Free)
    prompts, answers, steps = [text(20 + 7 * n, seed=n) for n in range(count)], [], []
    for how in ("off", "auto"):
        with opened(path) as model:
            chosen = [gather_options(60 - 6 * n, (), drawn, how) for n in range(count)]
            asked = zip(prompts, chosen, strict=True)
            requests = [model.session.request(prompt, options) for prompt, options in asked]
            batch, taken = model.batch(iter(requests)), Counter[int]()
            run = model.engine.run

            def counted(asked, logits, precise, kernel_tokens, run=run, taken=taken):
                taken.update(len(ids) for _, ids in asked if logits == "all")
                return run(asked, logits, precise, kernel_tokens)

            model.engine.run = counted
            for _ in batch:
                pass
            batch.close()
            answers.append([request.answers[0].tokens for request in requests])
            steps.append(taken)
    assert answers[0] == answers[1]
    assert not steps[0]
    assert max(steps[1], default=0) > 1 or min(map(len, answers[1])) < 4  # they have ended at once


def test_drafting_requests_batch_with_others(path):
    with opened(path) as model:
        requests = [
            model.session.request(text(30, seed=n), gather_options(30, (), {"temperature": 0}, how), key=n)
            for n, how in enumerate(("off", "mtp"))
        ]
        for _ in (batch := model.batch(iter(requests))):
            pass
        batch.close()
        for n, request in enumerate(requests):
            alone = model.generate(text(30, seed=n), 30, temperature=0, speculate="off")
            assert "".join(alone) == request.answers[0].text


# ---- heads in files of their own


def damaged(tensors: dict, name: str, values: np.ndarray | None) -> dict:
    return {key: old for key, old in tensors.items() if key != name} | ({} if values is None else {name: values})


@pytest.mark.parametrize(
    ("message", "metadata", "tensor"),
    [
        ("is a draft head for a model with at least 4 layers and a width of 64", {"target_hidden_size": 64}, None),
        ("is a draft head for a model with at least 5 layers", {"target_layers": np.array([0, 1, 5])}, None),
        ("3 different layers", {"target_layers": np.array([0, 1, 1])}, None),
        ("3 different layers", {"target_layers": np.array([-1, 1, 2])}, None),
        ("3 layer indices", {"target_layers": np.array([0, 1])}, None),
        ("3 layer indices", {"target_layers": 3}, None),
        ("block_count of an EAGLE-3 head must be 1", {"block_count": 2}, None),
        ("norm_before_fc", {"norm_before_fc": 1}, None),
        ("has no tensor fc.weight", {}, ("fc.weight", None)),
        ("tensor fc.weight must have the shape", {}, ("fc.weight", np.zeros((96, 96), np.float32))),
        ("tensor d2t must have different tokens", {}, ("d2t", np.zeros(100, np.int64).view(np.uint8))),
        ("tensor d2t must have different tokens", {}, ("d2t", np.arange(250, 350).view(np.uint8))),
        (r"must have 99 logits \(found 100\)", {}, ("d2t", np.arange(99).view(np.uint8))),
        (r"must have 320 logits \(found 100\)", {}, ("d2t", None)),
        ("tensor d2t must be a vector of I64", {}, ("d2t", np.zeros(100, np.float32))),
        ("extra.weight: not part of this architecture", {}, ("extra.weight", np.zeros((4, 4), np.float32))),
        ("30.0 is not supported in eagle3 models", {"final_logit_softcapping": 30.0}, None),
    ],
)  # fmt: skip
def test_a_draft_head_that_does_not_fit_is_refused(tmp_path, message, metadata, tensor):
    target = with_head("eagle3_own")[0]
    wrong = head_for("eagle3_own", target, **({"target_layers": np.array([1, 2, 4])} | metadata))
    if tensor:
        tensors = damaged(wrong.tensors, *tensor)
        formats = {name: "I64" for name, values in tensors.items() if values.dtype == np.uint8}
        wrong = Model("eagle3", wrong.metadata, tensors, formats)
    with api.open_model(write(target, tmp_path / "model.gguf"), threads=1, context=300, cache=False) as model:
        before = model.generate(text(30), 5, temperature=0, speculate="off")
        expected = "".join(before)
        with pytest.raises((ModelError, UsageError), match=message) as caught:
            model.resolve_drafter(f"draft:{write(wrong, tmp_path / 'head.gguf')}")
        assert "\n" not in str(caught.value) and "head.gguf" in str(caught.value)
        assert "".join(model.generate(text(30), 5, temperature=0, speculate="auto")) == expected


def test_a_draft_head_may_read_the_output_of_the_last_layer(tmp_path):
    target = with_head("eagle3")[0]
    path = write(target, tmp_path / "model.gguf")
    write(head_for("eagle3", target, target_layers=np.array([1, 4, 2])), head_of(path))
    engine = Engine(GGUFFile.open(path), EngineOptions(2, 300, "f32"))
    engine.load_draft_head(GGUFFile.open(head_of(path)))
    sequence = engine.sequence()
    engine.attach_draft_head(sequence)
    sequence.append(text(20))
    assert nmse(guessed(engine, sequence, text(21), 2), meant(path, text(21), 2)[0]) < FAITHFUL
    engine.close()


def test_a_draft_head_file_replaces_the_models_own_layer(tmp_path):
    """Check also sequences that the own layer followed."""
    path = written("eagle3", tmp_path)
    other = write(
        head_for("eagle3", with_head("eagle3")[0], target_layers=np.array([1, 2, 4])), tmp_path / "other.gguf"
    )
    engine = Engine(GGUFFile.open(path), EngineOptions(2, 300, "f32"))
    assert engine.draft_head_path is None
    engine.load_draft_head(GGUFFile.open(other))
    assert (engine.has_draft_head, engine.draft_head_path) == (True, str(other))
    sequence = engine.sequence()
    first = engine.attach_draft_head(sequence)
    sequence.append(text(20))
    engine.load_draft_head(GGUFFile.open(head_of(path)))
    sequence.append(text(25)[20:])
    assert engine.attach_draft_head(sequence) is not first and sequence.listener.begin == 25
    sequence.truncate(0)
    sequence.append(text(20))
    assert nmse(guessed(engine, sequence, text(21), 2), meant(path, text(21), 2)[0]) < FAITHFUL
    engine.close()


def test_run_with_a_draft_head_prints_the_same_answer(tmp_path, cli):
    path = written("eagle3", tmp_path)
    words = (path, "-p", "Hi", "-n", "30", "--temp", "0", "--no-cache")
    plain, drafted = (cli("run", *words, "--speculate", how) for how in ("off", f"draft:{head_of(path)}"))
    assert plain[:2] == drafted[:2] and plain[0] == 0


def test_run_refuses_a_draft_head_alone_or_with_another_model(tmp_path, cli):
    path = written("eagle3", tmp_path)
    code, out, err = cli("run", head_of(path), "-p", "Hi")
    assert (code, out) == (3, "") and "a draft head runs only together with the model" in err
    other = write(model("llama", layers=2), tmp_path / "other.gguf")
    code, out, err = cli("run", other, "-p", "Hi", "--speculate", f"draft:{head_of(path)}")
    assert (code, out) == (2, "") and "is a draft head for a model with" in err and err.count("\n") == 1


class Told(DraftHead):
    """A head that records its runs and computes nothing."""

    def __init__(self, tokens: list[int] | None = None):
        self.vocab_size, self.width, self.context = 5, 1, 300
        self.runs, self.lock, self.orphaned = RunPlan(LATER_RUN), Lock(), []
        self.adapters, self.adapter_scales = (), ()
        self._previous_hidden, self._new_hidden, self._tokens = (
            np.zeros((9, 2), np.float32),
            np.zeros((9, 2), np.float32),
            tokens,
        )
        self.told, self._fuse, self._backend = list[tuple](), None, self
        outer = self

        class Backend:
            def create_state(self):
                prepared = lambda place, count: outer.told.append((place, count))  # noqa: E731
                return SimpleNamespace(truncate=lambda length: length, prepare=prepared, close=lambda: None)

            def run(self, spans, precise):
                ((_, position, ids, wanted, *_),) = spans
                assert (position, len(ids)) == outer.told.pop()
                outer.told.append((position, ids.tolist(), outer._previous_hidden[: len(ids), 0].tolist(), wanted))
                outer._new_hidden[len(ids) - 1, 0] = 100 * ids[-1]
                return np.full((wanted, 5 if tokens is None else len(tokens)), ids[-1], np.float32)

        self._backend = Backend()

    def take_runs(self) -> list[tuple]:
        told, self.told = self.told, []
        return told


def shown(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)[:, None]


def test_a_follower_pairs_each_token_with_the_hidden_state_before(monkeypatch):
    """Use the head's own hidden states after its own drafts."""
    head = Told()
    follower = head.create_draft_sequence(0)
    follower.on_hidden_states(0, np.array([1, 2, 3]), shown(10, 20, 30))
    assert (follower.tokens, head.take_runs()) == ([], [])
    follower.append([1, 2, 3, 4])
    assert head.take_runs() == [(0, [1, 2, 3, 4], [0, 10, 20, 30], 1)]
    follower.append([2])
    follower.append([1])
    assert head.take_runs() == [(4, [2], [400], 1), (5, [1], [200], 1)]
    assert follower.truncate(6) == 4  # what was read on guesses is not kept
    follower.on_hidden_states(3, np.array([4, 3]), shown(40, 50))
    assert follower.tokens == [1, 2, 3, 4]  # it is the same token
    follower.append([3, 2])
    assert head.take_runs() == [(4, [3, 2], [40, 50], 1)]
    follower.on_hidden_states(4, np.array([1, 1, 2]), shown(41, 51, 61))
    assert follower.tokens == [1, 2, 3, 4]  # it is another one
    follower.append([1, 1], "none")
    follower.append([2, 3, 0])
    # What was shown of the token before is forgotten by then.
    assert head.take_runs() == [(4, [1, 1], [0, 41], 0), (6, [2, 3, 0], [51, 61, 0], 1)]
    assert follower.truncate(9) == 6  # of the last run one token was a guess, so none counts
    follower.follow_rewind(6)
    assert (follower.begin, follower.tokens) == (0, [1, 2, 3, 4, 1, 1])
    follower.append([3, 2])
    assert head.take_runs() == [(6, [3, 2], [51, 0], 1)]


@pytest.mark.parametrize(("place", "begin"), [(8, 8), (9, 9), (14, 9), (15, 15)])
def test_a_follower_restarts_where_hidden_states_are_missing(place, begin):
    follower = (head := Told()).create_draft_sequence(9)
    follower.on_hidden_states(9, np.array([1, 2, 3, 4, 1]), shown(10, 20, 30, 40, 50))
    follower.append([1, 2, 3, 4, 1])
    head.take_runs()
    follower.on_hidden_states(place, np.array([2]), shown(60))
    assert follower.begin == begin
    missing = place - begin - len(follower.tokens)
    follower.append([*[1] * missing, 2, 0])
    before = {8: [0, 60], 9: [0, 60], 14: [50, 60], 15: [0, 60]}[place]
    assert head.take_runs() == [(place - begin, [2, 0], before, 1)]


@pytest.mark.parametrize(("begin", "place", "tokens"), [(3, 2, []), (3, 3, []), (3, 4, [1]), (3, 9, [1, 2])])
def test_rewinding_a_follower_drops_tokens_behind_the_position(begin, place, tokens):
    follower = Told().create_draft_sequence(begin)
    follower.on_hidden_states(begin, np.array([1, 2]), shown(10, 20))
    follower.append([1, 2])
    follower.follow_rewind(place)
    assert (follower.begin, follower.tokens) == (min(begin, place), tokens)
    follower.on_hidden_states(min(place, 5), np.array([3]), shown(30))
    assert follower.begin == min(begin, place)


@pytest.mark.parametrize("late", [2, 3])
def test_a_follower_runs_by_itself_when_it_lags(monkeypatch, late):
    monkeypatch.setattr(guess_head, "MAX_LAG", late)
    follower = (head := Told()).create_draft_sequence(7)
    follower.on_hidden_states(7, np.array([1, 2]), shown(10, 20))
    assert head.take_runs() == []
    follower.on_hidden_states(9, np.array([3]), shown(30))
    assert head.take_runs() == ([(0, [1, 2, 3], [0, 10, 20], 0)] if late == 2 else [])
    follower.append([4] if late == 2 else [1, 2, 3, 4])
    assert head.take_runs() == ([(3, [4], [30], 1)] if late == 2 else [(0, [1, 2, 3, 4], [0, 10, 20, 30], 1)])


def test_a_follower_splits_long_inputs_and_maps_reduced_vocabularies(monkeypatch):
    """Compute logits in the last run only."""
    monkeypatch.setattr(guess_head, "BATCH", 2)
    for count, wanted in ((1, [1]), (2, [1]), (3, [0, 1]), (4, [0, 1]), (5, [0, 0, 1])):
        head = Told()
        assert head.create_draft_sequence(0).append([4, 3, 2, 1, 0][:count]).tolist() == [[5.0 - count] * 5]
        assert [run[3] for run in head.take_runs()] == wanted
        assert len(head.create_draft_sequence(0).append([1] * count, "none")) == 0
        assert [run[3] for run in head.take_runs()] == [0] * len(wanted)
    closed = list[int]()
    some = Told([3, 1])
    some.orphaned = [SimpleNamespace(close=lambda number=number: closed.append(number)) for number in range(3)]
    rows = (follower := some.create_draft_sequence(0)).append([2])
    assert rows.tolist() == [[-np.inf, 2, -np.inf, 2, -np.inf]] and rows.dtype == np.float32
    assert (sorted(closed), some.orphaned, follower.tokens) == ([0, 1, 2], [], [2])
    some.lock = TakenLock()
    with pytest.raises(BlockingIOError):
        follower.append([2])


def test_draft_head_paths_name_files_but_not_own_layers():
    for head_source, path, has_layer in (
        (None, None, False),
        (SimpleNamespace(path="own.gguf", layers=()), None, True),
        (SimpleNamespace(path="head.gguf", layers=(1,)), "head.gguf", True),
    ):
        engine = SimpleNamespace(_head_source=head_source)
        assert Engine.draft_head_path.fget(engine) == path and Engine.has_draft_head.fget(engine) == has_layer
