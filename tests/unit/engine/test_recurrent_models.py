"""Test models with recurrent layers: any dimensions, and any history of a sequence."""

import numpy as np
import pytest
from engines import FAITHFUL
from recurrent_models import MODELS, file_of, mamba, mamba2, qwen35
from tiny_hybrid import write_tiny_hybrid

import localllm
from localllm.arch import load_architecture
from localllm.arch.layer_state import KVType, RecurrentLayerState, count_cache_bytes
from localllm.engine.engine import MAX_MERGED_RECOMPUTE, Engine
from localllm.engine.memory import recurrent
from localllm.engine.memory.recurrent import RecurrentState, StateLayout
from localllm.engine.options import EngineOptions
from localllm.errors import MemoryLimitError, ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.kernels.table import PAGE


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 45, count).tolist()


def engine_of(name: str, backend: str = "cpu") -> Engine:
    return Engine(file_of(*MODELS[name]), EngineOptions(2, 700, "f32", backend))


@pytest.fixture(params=["mamba", "mamba2", "lfm2", "qwen35", "deepseek4"])
def engine(request, model_path):
    name = request.param
    file = file_of(*MODELS[name]) if name in MODELS else GGUFFile.open(model_path(name))
    engine = Engine(file, EngineOptions(2, 700, "f32"))
    yield engine
    engine.close()


def fresh(engine: Engine, ids: list[int], logits: str = "last") -> np.ndarray:
    sequence = engine.sequence()
    rows = sequence.append(ids, logits)
    sequence.close()
    return rows


def test_states_are_padded_to_vectors_and_aligned_to_cache_lines():
    layout = StateLayout([RecurrentLayerState(0, ((3, 20), (5,))), RecurrentLayerState(2, ((2, 2, 32),))])
    assert [layout.get_offset(*place) for place in ((0, 0), (0, 1), (2, 0))] == [0, 4 * 3 * 32, 4 * (3 * 32 + 16)]
    for memory in (layout.zeros, layout.allocate()):
        assert len(memory) == 3 * 32 + 16 + 4 * 32 and memory.ctypes.data % 64 == 0


# ---- any dimensions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_recurrent_models_agree_with_the_reference(name):
    """Run a prompt at once, one token at a time, and several sequences together."""
    cpu, reference, ids = engine_of(name), engine_of(name, "reference"), tokens(70)
    expected = fresh(reference, ids, "all")
    assert nmse(fresh(cpu, ids, "all"), expected) < FAITHFUL
    alone = cpu.sequence()
    assert nmse(np.concatenate([alone.append([token]) for token in ids[:20]]), expected[:20]) < FAITHFUL
    for engine in (cpu, reference):
        sequences = [engine.sequence() for _ in range(3)]
        for first, second in ((0, 5), (5, 6), (6, 30)):
            rows = engine.step([(sequence, ids[first : second - 1 + (i == 2)]) for i, sequence in enumerate(sequences)]
                               if second - first > 1 else [(sequences[2], ids[first:second])])  # fmt: skip
            assert nmse(rows[-1], expected[second - 1 : second]) < FAITHFUL
    cpu.close()


@pytest.mark.parametrize("model, problem", [
    (mamba2(heads=6, groups=2)[:2], "token_embd"),
    (("mamba2", {"ssm.time_step_rank": 5}), "must be divisible by ssm.time_step_rank"),
    (("qwen35", {"ssm.group_count": 4}), "must be divisible by"),
    (("qwen35", {"rope.dimension_sections": np.array([1, -1])}), "dimension_sections"),
    (("qwen35", {"attention.recurrent_layers": np.array([True])}), "recurrent_layers"),
    (("qwen35", {"nextn_predict_layers": 3}), "must be below"),
    (("lfm2", {"attention.head_count_kv": np.array([0, 3, 0])}), "is not divisible by"),
    (("mamba", {"ssm.state_size": 6}), "ssm_x"),
    (("mamba", {"ssm.conv_kernel": 2}), "ssm_conv1d"),
    (("qwen35", {"ssm.state_size": 13}), "attn_qkv"),
])  # fmt: skip
def test_recurrent_models_with_invalid_metadata_or_tensors_are_refused(model, problem):
    arch, fields = model
    _, metadata, tensors = MODELS[arch]
    if problem == "token_embd":
        tensors = {name: values for name, values in tensors.items() if name != "token_embd.weight"}
    with pytest.raises(ModelError, match=problem):
        Engine(file_of(arch, metadata | fields, tensors), EngineOptions(2, 700, "f32"))


def test_mtp_layers_are_left_out_of_the_model():
    arch, metadata, tensors = qwen35(layers=2, interval=2)
    expected = fresh(Engine(file_of(arch, metadata, tensors), EngineOptions(2, 700, "f32")), tokens(9))
    more = {"blk.2.nextn.eh_proj.weight": np.ones((64, 128), np.float32), "blk.2.attn_norm.weight": np.ones(64, "f4")}
    file = file_of(arch, metadata | {"block_count": 3, "nextn_predict_layers": 1}, tensors | more)
    np.testing.assert_array_equal(fresh(Engine(file, EngineOptions(2, 700, "f32")), tokens(9)), expected)


def test_attending_layers_may_be_listed_in_the_metadata():
    arch, metadata, tensors = MODELS["qwen35"]
    listed = metadata | {"full_attention_interval": 7, "attention.recurrent_layers": np.array([True, False, True])}
    h = load_architecture(file_of(arch, listed, tensors))[1]
    assert h.attends == (False, True, False)


def test_memory_of_states_does_not_grow_with_the_context():
    h = load_architecture(file_of(*mamba(inner=72, state=5, taps=3, layers=2)))[1]
    assert (
        count_cache_bytes(h.list_states(), 10, KVType())
        == count_cache_bytes(h.list_states(), 10**6, KVType())
        == 2 * 4 * 72 * (2 + 5)
    )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["blk.0.ssm_alpha.weight", "blk.0.ssm_beta.weight", "blk.1.attn_q.weight"])
def test_infinite_weights_before_a_gate_are_refused(name, backend):
    """A sigmoid of infinity is finite, and so is the step of a recurrence: they must not hide it."""
    arch, metadata, tensors = MODELS["qwen35"]
    for value in (np.inf, -np.inf):
        broken = tensors[name].copy()
        broken[-1, 0] = value  # of queries' gates, too
        engine = Engine(file_of(arch, metadata, tensors | {name: broken}), EngineOptions(1, 700, "f32", backend))
        with np.errstate(all="ignore"), pytest.raises(ModelError, match="not finite"):
            fresh(engine, tokens(3))
        engine.close()


# ---- forks and ways back --------------------------------------------------------------------------------------------


def test_truncating_anywhere_gives_the_logits_of_a_new_sequence(engine):
    """Check also positions far behind all snapshots."""
    ids = tokens(600)
    sequence = engine.sequence()
    sequence.append(ids[:300], "none")
    for token in ids[300:450]:
        sequence.append([token], "none")
    for length in (449, 448, 430, 300, 299, 77, 1, 0):
        assert sequence.truncate(length) == length
        assert sequence.tokens == ids[:length]
        new = tokens(3, seed=length)
        rows = sequence.append(new, "all")
        assert nmse(rows, fresh(engine, ids[:length] + new, "all")[-3:]) < FAITHFUL
        sequence.truncate(length)
        assert nmse(sequence.append(ids[length:450]), fresh(engine, ids[:450])) < FAITHFUL


def test_forks_of_a_truncated_sequence_continue_from_there(engine):
    ids = tokens(100)
    sequence = engine.sequence()
    sequence.append(ids, "none")
    sequence.truncate(50)
    fork = sequence.fork()
    rows = engine.step([(sequence, [1]), (fork, [2, 3])])
    assert nmse(rows[0], fresh(engine, [*ids[:50], 1])) < FAITHFUL
    assert nmse(rows[1], fresh(engine, [*ids[:50], 2, 3])) < FAITHFUL


def test_rejected_drafts_run_few_tokens_again(engine, monkeypatch):
    """As in speculation, some of several tokens are kept."""
    ids, read = tokens(300), []
    sequence = engine.sequence()
    sequence.append(ids[:200], "none")
    run = engine.backend.run
    monkeypatch.setattr(
        engine.backend, "run", lambda spans, precise: read.append(len(spans[0].ids)) or run(spans, precise)
    )
    held = 200
    for kept in (1, 4, 2, 5, 3, 1, 1, 2, 3, 4, 1, 2):
        sequence.append(ids[held : held + kept] + tokens(5 - kept, seed=held), "none")
        held += kept
        sequence.truncate(held)
    assert max(read) <= MAX_MERGED_RECOMPUTE + 5
    assert len(read) <= 12 + 3
    assert nmse(sequence.append([7]), fresh(engine, [*ids[:held], 7])) < FAITHFUL


def test_an_interrupted_run_does_not_change_a_sequence(engine, monkeypatch):
    ids = tokens(40)
    sequence = engine.sequence()
    sequence.append(ids, "none")
    sequence.append([1], "none")
    run = engine.backend.run

    def interrupted(spans, precise):
        run(spans, precise)
        raise KeyboardInterrupt

    for wrong in ([2], [2, 3, 4]):
        monkeypatch.setattr(engine.backend, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sequence.append(wrong)
        assert sequence.tokens == [*ids, 1]
        monkeypatch.setattr(engine.backend, "run", run)
        assert nmse(sequence.append([5]), fresh(engine, [*ids, 1, 5])) < FAITHFUL
        sequence.truncate(41)


@pytest.mark.parametrize("failure", [MemoryLimitError, KeyboardInterrupt])
def test_tokens_to_run_again_survive_a_failed_run(engine, monkeypatch, failure):
    """They are among the sequence's tokens already. Memory may end for another sequence of the run."""
    ids = tokens(100)
    sequences = engine.sequence(), engine.sequence()
    for sequence in sequences:
        sequence.append(ids, "none")
        assert sequence.truncate(60) == 60

    def fail(*arguments):
        raise failure

    with monkeypatch.context() as patch:
        place = (sequences[1].store, "prepare") if failure is MemoryLimitError else (engine.backend, "run")
        patch.setattr(*place, fail)
        with pytest.raises(failure):
            engine.step([(sequence, [1]) for sequence in sequences])
    for sequence in sequences:
        assert sequence.tokens == ids[:60]
        assert nmse(sequence.append([5]), fresh(engine, [*ids[:60], 5])) < FAITHFUL


def test_forks_share_states_until_they_run():
    layout = StateLayout(load_architecture(file_of(*MODELS["mamba2"]))[1].list_states())
    state = RecurrentState(layout)
    state.prepare(0, 10)
    first = state.target
    fork = state.fork()
    assert fork.target is first
    fork.prepare(10, 1)
    assert fork.source is first
    assert fork.target is not first
    state.prepare(10, 1)
    assert state.source is first
    assert state.target is not first, "others need it, and a prompt ended here"
    before = state.target
    state.prepare(11, 1)
    assert state.source is state.target is before, "nobody else has it"


def test_candidates_in_forks_equal_separate_answers(tmp_path):
    """Sampled ones equal those alone, and beams on the CPU those on the reference."""
    path, options = write_tiny_hybrid(tmp_path / "hybrid.gguf"), {"max_tokens": 20, "temperature": 1.0}
    beams = []
    for backend in ("cpu", "reference"):
        with localllm.open(path, kv_type="f32", backend=backend) as model:
            alone = {seed: "".join(model.generate("hello world", seed=seed, **options)) for seed in (4, 5, 6)}
            together = model.candidates("hello world", n=3, seed=4, **options)
            assert {answer.seed: answer.text for answer in together} == alone
            beams.append([answer.tokens for answer in model.candidates("hello world", beams=3, n=3, max_tokens=12)])
    assert beams[0] == beams[1]


def test_snapshots_are_limited_and_denser_near_the_end(monkeypatch):
    layout = StateLayout(load_architecture(file_of(*MODELS["mamba"]))[1].list_states())
    state, length = RecurrentState(layout), 0
    for count in [512] * 20 + [1] * 500:
        state.prepare(length, count)
        length += count
    positions = [kept.position for kept in state._snapshots]
    assert len(positions) == recurrent.MAX_SNAPSHOTS
    assert 512 * 20 in positions, "where the prompt ended"
    assert length - positions[-1] <= PAGE
    assert positions[0] <= 512 * 20
    assert state.truncate(512 * 20 + 1) == 512 * 20
    assert state.truncate(0) == 0
