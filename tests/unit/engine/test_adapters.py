"""Low-rank adapters against the same model with them merged into its weights, and their files."""

import numpy as np
import pytest
from adapters import merge, random_adapter, supported_names, write_adapter
from models import DECLARATIONS, write_model

from localllm.engine.adapter_file import read_adapter
from localllm.engine.adapters import transpose_rows
from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import LocalllmError, ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.writer import OutputTensor, build_header
from localllm.kernels.table import MAX_ADAPTERS
from localllm.quant.formats import BY_NAME

IDS = [5, 17, 99, 3, 200, 41, 7]


def logits(file: GGUFFile, *scales: float, backend: str = "reference", lora=(), **options) -> np.ndarray:
    engine = Engine(file, EngineOptions(1, kv_type="f32", backend=backend, lora=tuple(lora), **options))
    try:
        sequence = engine.sequence()
        if scales:
            sequence.set_adapter_scales(scales)
        return sequence.append(IDS, "all")
    finally:
        engine.close()


def error(expected: np.ndarray, computed: np.ndarray) -> float:
    """Return the squared error relative to the squares of the expected numbers; without masked logits."""
    expected, computed = (np.clip(logits.astype(np.float64), -100, 100) for logits in (expected, computed))
    return float(((expected - computed) ** 2).sum() / (expected**2).sum())


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> GGUFFile:
    return GGUFFile.open(write_model("llama", tmp_path_factory.mktemp("adapters") / "llama.gguf"))


@pytest.mark.sampled
@pytest.mark.parametrize("family", DECLARATIONS)
def test_an_adapter_computes_what_the_merged_model_computes(family, tmp_path):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    names = supported_names(file)
    if not names:
        pytest.skip("no matrix of this architecture accepts an adapter")
    adapter = random_adapter(file, names)
    adapted, base = logits(file, lora=[(adapter, -0.5)]), logits(file)
    file.tensors.update(merge(file, adapter, -0.5))
    merged = logits(file)
    assert error(merged, adapted) < 1e-8 < error(base, adapted)


@pytest.mark.parametrize("format", ["F32", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe", "deepseek2_v3", "mamba2", "gemma3", "phi3"])
def test_the_cpu_computes_what_the_reference_computes(family, format, tmp_path):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    lora = [(random_adapter(file, supported_names(file), 5, format=format), 1.0)]
    expected = logits(file, lora=lora)
    assert error(expected, logits(file, backend="cpu", lora=lora)) < 1e-7


def test_a_scale_of_0_changes_no_bit(llama):
    lora = [(random_adapter(llama, supported_names(llama)), 1.0)]
    np.testing.assert_array_equal(logits(llama, 0.0, backend="cpu", lora=lora), logits(llama, backend="cpu"))


def test_several_adapters_add_up(llama):
    names = supported_names(llama)
    adapters = [random_adapter(llama, names[seed:], 2 + seed, seed, name=f"{seed}") for seed in range(3)]
    scales = (0.5, -1.0, 0.25)
    adapted = logits(llama, *scales, lora=[(adapter, 0.0) for adapter in adapters])
    tensors = dict(llama.tensors)
    try:
        for adapter, scale in zip(adapters, scales, strict=True):
            llama.tensors.update(merge(llama, adapter, scale))
        assert error(logits(llama), adapted) < 1e-8
    finally:
        llama.tensors.update(tensors)


def test_sequences_with_other_scales_in_one_run_equal_each_alone(llama):
    adapter = random_adapter(llama, supported_names(llama))
    engine = Engine(llama, EngineOptions(1, backend="cpu", lora=((adapter, 1.0),)))
    scales = (1.0, 0.0, -0.5, 1.0)
    together = [engine.sequence() for _ in scales]
    for sequence, scale in zip(together, scales, strict=True):
        sequence.set_adapter_scales([scale])
    rows = [engine.step([(sequence, [id]) for sequence in together]) for id in IDS]
    for number, scale in enumerate(scales):
        alone = engine.sequence()
        alone.set_adapter_scales([scale])
        for id, row in zip(IDS, rows, strict=True):
            np.testing.assert_array_equal(alone.append([id]), row[number])
    engine.close()


def test_prefill_equals_decode_where_the_scale_changes_within_a_prompt(llama):
    adapter = random_adapter(llama, supported_names(llama))
    engine = Engine(llama, EngineOptions(1, kv_type="f32", lora=((adapter, 0.0),)))
    steps, whole = engine.sequence(), engine.sequence()
    for position, id in enumerate(IDS):
        if position == 3:
            steps.set_adapter_scales([2.0])
        row = steps.append([id])
    whole.adapter_scales.set(3, [2.0])
    assert error(row, whole.append(IDS)) < 1e-9
    engine.close()


def test_a_truncated_sequence_keeps_its_latest_scales(llama):
    engine = Engine(llama, EngineOptions(1, lora=((random_adapter(llama, supported_names(llama)), 1.0),)))
    sequence = engine.sequence()
    expected = sequence.append(IDS)
    sequence.truncate(0)
    np.testing.assert_array_equal(sequence.append(IDS), expected)
    with pytest.raises(UsageError, match=r"at most 1 scales, one per adapter \(found 2\)"):
        sequence.set_adapter_scales([1.0, 1.0])
    engine.close()


# ---- adapters that do not fit


def refusal(file: GGUFFile, adapter) -> str:
    with pytest.raises(LocalllmError) as refused:
        Engine(file, EngineOptions(1, lora=((adapter, 1.0),)))
    return str(refused.value)


def test_an_adapter_for_another_model_is_refused_with_the_tensor(llama):
    name = "blk.0.attn_q.weight"
    (low_rank,) = random_adapter(llama, [name]).low_ranks.values()
    adapter = random_adapter(llama, [name])

    def changed(**fields):
        return refusal(llama, type(adapter)(**{"path": "a.gguf", "name": "a", "low_ranks": {name: low_rank}, **fields}))

    assert changed(low_ranks={"blk.9.attn_q.weight": low_rank}) == (
        "a.gguf: is for another model: this one has no tensor blk.9.attn_q.weight"
    )
    assert changed(low_ranks={"output.weight": low_rank}).startswith(
        "a.gguf: is for another model: its matrices [4, 256] and [256, 4] do not fit output.weight ["
    )
    assert changed(arch="qwen2") == "a.gguf: the adapter is for qwen2, the model is llama"
    assert changed(low_ranks={"output_norm.weight": low_rank}).startswith("a.gguf: is for another model")


def test_too_many_adapters_are_refused(llama):
    adapter = random_adapter(llama, ["blk.0.attn_q.weight"])
    with pytest.raises(UnsupportedError, match=rf"at most {MAX_ADAPTERS} adapters \(found {MAX_ADAPTERS + 1}\)"):
        Engine(llama, EngineOptions(1, lora=((adapter, 1.0),) * (MAX_ADAPTERS + 1)))


def test_an_adapter_of_a_matrix_that_is_not_multiplied_is_refused(tmp_path):
    file = GGUFFile.open(write_model("mamba2", tmp_path / "model.gguf"))
    adapter = random_adapter(file, ["blk.0.ssm_conv1d.weight"])
    assert refusal(file, adapter) == (
        f"{file.path}: style.gguf: adapters of blk.0.ssm_conv1d.weight are not supported for mamba2"
    )


# ---- files


def test_a_file_of_llama_cpp_is_read_as_it_was_written(llama, tmp_path):
    adapter = random_adapter(llama, supported_names(llama), 6)
    read = read_adapter(write_adapter(adapter, tmp_path / "poet.gguf", alpha=3.0))
    assert (read.name, read.arch, read.invocation) == ("poet", "llama", ())
    assert read.low_ranks.keys() == adapter.low_ranks.keys() and {e.factor for e in read.low_ranks.values()} == {0.5}
    for name, each in adapter.low_ranks.items():
        np.testing.assert_array_equal(read.low_ranks[name].a.data, each.a.data)
        np.testing.assert_array_equal(read.low_ranks[name].b.data, each.b.data)


def test_an_alpha_of_0_means_a_factor_of_1(llama, tmp_path):
    path = write_adapter(random_adapter(llama, ["blk.0.attn_q.weight"]), tmp_path / "a.gguf", alpha=0.0)
    assert read_adapter(path).low_ranks["blk.0.attn_q.weight"].factor == 1.0


@pytest.mark.parametrize(("metadata", "message"), [
    ({"general.type": "model"}, "this is no adapter (general.type is 'model')"),
    ({"general.type": None, "general.architecture": "controlvector"}, "this is a control vector: use --control-vector"),
    ({"general.type": ["adapter"]}, "this is no adapter (general.type is ['adapter'])"),
    ({"adapter.type": "ia3"}, "adapter.type must be lora (found 'ia3')"),
    ({"adapter.lora.alpha": "high"}, "adapter.lora.alpha must be a number (found 'high')"),
    ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha must be a number (found nan)"),
])  # fmt: skip
def test_adapter_metadata_of_a_wrong_type_is_refused(llama, tmp_path, metadata, message):
    adapter = random_adapter(llama, ["blk.0.attn_q.weight"])
    path = write_adapter(adapter, tmp_path / "a.gguf", **{"alpha": 1.0, **metadata})
    with pytest.raises(ModelError) as refused:
        read_adapter(path)
    assert message in str(refused.value) and str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize("element", [np.nan, np.inf])
def test_elements_that_are_not_finite_are_refused(llama, tmp_path, element):
    adapter = random_adapter(llama, ["blk.0.attn_q.weight"])
    adapter.low_ranks["blk.0.attn_q.weight"].b.data.view(np.float32)[3] = element
    path = write_adapter(adapter, tmp_path / "a.gguf", alpha=1.0)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_q\.weight\.lora_b has elements that are not finite"):
        read_adapter(path)


def write_vectors(path, tensors: dict[str, np.ndarray], arch: str = "controlvector"):
    outputs = [OutputTensor(name, BY_NAME["F32"], numbers.shape) for name, numbers in tensors.items()]
    data = b"".join(n.tobytes() + b"\0" * (-n.nbytes % 32) for n in tensors.values())
    path.write_bytes(build_header({"general.architecture": arch}, outputs) + data)
    return path


@pytest.mark.parametrize(("names", "message"), [
    (["blk.0.attn_q.weight.lora_a"], "has blk.0.attn_q.weight.lora_a, but not blk.0.attn_q.weight.lora_b"),
    (["output_norm.weight"], "tensor output_norm.weight is not part of a LoRA adapter"),
    ([], "must have at least one pair of matrices"),
])  # fmt: skip
def test_incomplete_files_are_refused(tmp_path, names, message):
    outputs = [OutputTensor(name, BY_NAME["F32"], (4, 8)) for name in names]
    about = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    path = tmp_path / "a.gguf"
    path.write_bytes(build_header(about, outputs) + bytes(128 * len(names)))
    with pytest.raises(ModelError) as refused:
        read_adapter(path)
    assert message in str(refused.value)


@pytest.mark.parametrize("format", ["F32", "F16"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_the_memory_of_an_adapter_is_that_of_both_matrices(family, format, tmp_path):
    file = GGUFFile.open(write_model(family, tmp_path / "model.gguf"))
    adapter = random_adapter(file, supported_names(file), 3, format=format)
    first = sum(each.a.nbytes for each in adapter.low_ranks.values())
    second = sum(
        transpose_rows(each.b, 0, each.b.shape[0], 0).tensor.nbytes if len(each.b.shape) == 2 else each.b.nbytes
        for each in adapter.low_ranks.values()
    )
    assert adapter.nbytes == first + second


# ---- control vectors


def test_a_control_vector_is_added_to_the_output_of_its_layer(llama, tmp_path):
    width = llama.tensors["token_embd.weight"].shape[1]
    vector = np.random.default_rng(0).standard_normal(width).astype(np.float32)
    path = str(write_vectors(tmp_path / "v.gguf", {"direction.1": vector}))
    changed = {scale: logits(llama, control_vectors=((path, scale),)) for scale in (0.0, 0.5, 1.0)}
    np.testing.assert_array_equal(changed[0.0], logits(llama))
    assert error(changed[0.0], changed[0.5]) > 1e-4
    twice = logits(llama, control_vectors=((path, 0.5), (path, 0.5)))
    assert error(changed[1.0], twice) < 1e-12
    assert error(changed[1.0], logits(llama, backend="cpu", control_vectors=((path, 1.0),))) < 1e-8
    with pytest.raises(UsageError, match=r"must be from 1 to 1 \(found 0 to 1\)"):
        logits(llama, control_vectors=((path, 1.0),), control_layers=(0, 1))


@pytest.mark.parametrize(("tensors", "message"), [
    ({"direction.0": 256}, "direction.0 is not direction.N of a layer from 1 on"),
    ({"direction.2": 256}, "direction.2 is not direction.N of one of 2 layers"),
    ({"direction.1": 95}, "tensor direction.1 must be F32 [256] (found F32 [95])"),
    ({}, "must have at least one vector direction.N"),
])  # fmt: skip
def test_a_control_vector_of_another_model_is_refused(llama, tmp_path, tensors, message):
    path = write_vectors(tmp_path / "v.gguf", {name: np.ones(size, np.float32) for name, size in tensors.items()})
    with pytest.raises(ModelError) as refused:
        logits(llama, control_vectors=((str(path), 1.0),))
    assert message in str(refused.value)
