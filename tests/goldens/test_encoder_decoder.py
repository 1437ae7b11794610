"""Models with an encoder and a decoder: logits against llama.cpp's, forks and truncations of sequences."""

import json

import numpy as np
import pytest
from engines import FAITHFUL, bound, open_engine
from models import ANSWERING, model, write, write_model
from models.answering import GELU, IN_BLOCKS, START, text_and_answer
from models.golden import Golden, check_digest, kept
from project import ROOT

from localllm.arch import rowwise_verbs
from localllm.engine.embedding_runner import EmbeddingRunner
from localllm.engine.options import EngineOptions
from localllm.errors import UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from tests.fuzz.test_wrong_models import damages, kinds, refusal
from tests.goldens.test_logits import looked_up, nmse


def opened(path, backend="cpu", **options):
    return open_engine(path, **{"context": 200, "kv_type": "f32", "backend": backend, **options})


def all_logits(engine, text: np.ndarray, *answers: np.ndarray) -> np.ndarray:
    """Return the logits behind each token of an answer, which is read in pieces."""
    sequence, (first, *others) = engine.sequence(), answers
    rows = [sequence.append([*text, *first], "all")] + [sequence.append(answer, "all") for answer in others]
    assert sequence.encoded == len(text)
    sequence.close()
    return np.concatenate(rows)


def compared(engine, name: str) -> dict[str, float]:
    """Return the distance from llama.cpp's logits: an answer at once, then one by one, and all of it one by one."""
    golden, (text, answer) = Golden.load(name), text_and_answer(name, model(name))
    np.testing.assert_array_equal(golden.tokens, [*text, *answer])
    greedy = [[token] for token in golden.greedy]
    rows = all_logits(engine, text, answer, *greedy)
    steps = all_logits(engine, text, *[[token] for token in answer])
    expected = np.concatenate((golden.prefill, golden.decode))
    return {"rows": nmse(kept(rows), expected), "steps": nmse(kept(steps), golden.prefill)}


@pytest.mark.parametrize("name", ANSWERING)
def test_the_reference_agrees_with_llama_cpp(model_path, name, monkeypatch):
    check_digest(name, model(name), Golden.load(name))
    monkeypatch.setattr(rowwise_verbs, "gelu", looked_up(rowwise_verbs.gelu))
    engine = opened(model_path(name), "reference")
    assert max(compared(engine, name).values()) < (1e-6 if name in GELU else 3e-11)


@pytest.mark.parametrize("name", ANSWERING)
def test_the_cpu_agrees_with_llama_cpp_and_the_reference(model_path, name):
    """Compare with the reference where llama.cpp's GELU is not exact."""
    engine, reference = opened(model_path(name)), opened(model_path(name), "reference")
    assert max(compared(engine, name).values()) < (1e-4 if name in GELU else FAITHFUL)
    text, answer = text_and_answer(name, model(name))
    assert nmse(all_logits(engine, text, answer), all_logits(reference, text, answer)) < FAITHFUL
    engine.close()


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_quantized_models_agree_with_llama_cpp(model_path, name):
    engine, golden = opened(model_path(name)), Golden.load(name)
    distances = compared(engine, name)
    engine.close()
    most = max(3e-8, 1.1 * golden.native.max()) if name.startswith("umt5") else 3e-8
    assert distances["rows"] < most


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ANSWERING)
def test_other_numbers_and_dimensions_agree_with_the_reference(tmp_path, name, seed):
    """Read texts longer than the distances that are told apart, and than a run."""
    dims = {"width": 56 + 8 * seed, "hidden": 36, "heads": 2 + seed, "head_dim": 8 * seed + 2, "buckets": 8 * seed}
    path = write_model(name, tmp_path / "model.gguf", seed, **dims, context=700)
    random = np.random.default_rng(seed)
    engine, reference = opened(path, context=1400), opened(path, "reference", context=1400)
    for length in (1, 17, 300, 600):
        text, answer = random.integers(START + 1, 272, length), np.array([START, *random.integers(0, 272, 200)])
        expected = all_logits(reference, text, answer)
        assert nmse(all_logits(engine, text, answer), expected) < FAITHFUL
        assert nmse(all_logits(engine, text, answer[:1], answer[1:150], answer[150:]), expected) < FAITHFUL
    engine.close()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forked_and_truncated_sequences_match_a_fresh_run(model_path, backend):
    """Go back anywhere in an answer; expect nothing left of a sequence that goes back into the text."""
    engine, (text, answer) = opened(model_path("t5"), backend), text_and_answer("t5", model("t5"))
    expected = all_logits(engine, text, answer)
    sequence = engine.sequence()
    sequence.append([*text, *answer], "none")
    twin = sequence.fork()
    assert twin.truncate(len(text) + 5) == len(text) + 5
    assert nmse(twin.append(answer[5:], "all"), expected[5:]) < bound(1e-11, in_tiles=1e-9)
    other = np.concatenate((text[:7], text[20:]))
    assert sequence.truncate(len(text)) == 0 == sequence.encoded
    assert nmse(sequence.append([*other, *answer], "all"), expected) > 1e-3
    assert twin.truncate(len(text) + 1) == len(text) + 1
    assert nmse(twin.append(answer[1:], "all"), expected[1:]) < bound(1e-11, in_tiles=1e-9)
    together = engine.run([(engine.sequence(), [*text, *answer]), (twin, answer[:4])], "all", True)
    assert nmse(together[0], expected) < bound(1e-11, in_tiles=1e-9)
    engine.close()


def test_other_uses_of_an_encoder_decoder_are_refused(model_path):
    engine = opened(model_path("t5"))
    for wrong in ([5, 6, 7], [START, 5]):
        with pytest.raises(UsageError, match="t5 models have an encoder"):
            engine.sequence().append(wrong)
    with pytest.raises(UsageError, match="context shift is not supported"):
        engine.require_shift()
    engine.close()
    with pytest.raises(UnsupportedError, match="do not make embeddings"):
        EmbeddingRunner(GGUFFile.open(model_path("t5")), "mean", EngineOptions(threads=1))
    with pytest.raises(UnsupportedError, match="on the CPU only"):
        opened(model_path("t5"), "cuda")


@pytest.mark.parametrize("name", ANSWERING)
def test_damaged_tensors_are_refused_by_name(model_path, name):
    """Remove, rename, transpose tensors, or change their length."""
    file = GGUFFile.open(model_path(name))
    tensors = dict(file.tensors)
    assert refusal(file) is None
    for tensor in kinds(tensors).values():
        for damage, file.tensors in damages(tensor, tensors):
            own_biases = "attn_rel_b" in tensor.name and ".blk.0." not in tensor.name
            if damage == "removed" and (tensor.name == "output.weight" or own_biases):
                continue
            reason = refusal(file)
            assert reason is not None, f"{tensor.name} {damage}"
            assert tensor.name.rpartition(".")[0] in reason, f"{tensor.name} {damage}: {reason}"


@pytest.mark.parametrize(("key", "value"), [
    ("attention.relative_buckets_count", 12), ("attention.relative_buckets_count", 6), ("attention.head_count_kv", 2),
    ("attention.key_length", 8), ("attention.value_length", 8), ("feed_forward_length", 32), ("decoder_block_count", 1),
    ("decoder_block_count", 3), ("block_count", 1), ("decoder_start_token_id", 272), ("attention.head_count", 2),
])  # fmt: skip
def test_damaged_settings_are_refused(tmp_path, key, value):
    damaged = model("t5")
    damaged.metadata[f"t5.{key}"] = value
    assert refusal(GGUFFile.open(write(damaged, tmp_path / "model.gguf"))) is not None


def test_run_answers_and_other_commands_refuse_in_one_line(model_path, cli):
    path = str(model_path("t5"))
    code, out, err = cli("run", path, "-p", "Why is the sky blue?", "-n", "6", "--temp", "0", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["tokens"]) == 6
    for arguments, problem in (
        (("chat", path, "-p", "Hi"), "t5 models have no chat format: use localllm run"),
        (
            ("run", path, "-p", "Hi", "-sys", "Be kind."),
            "t5 models take a single text without a system message: leave out -sys",
        ),
        (("perplexity", path, "-f", str(ROOT / "tests/support/prose.txt")), "t5 models have an encoder"),
    ):
        code, out, err = cli(*arguments)
        assert (code, out) == (2, "")
        assert problem in err
        assert err.count("\n") == 1
