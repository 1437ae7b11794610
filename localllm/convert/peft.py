"""Convert LoRA adapters that PEFT has saved to the tensors of a GGUF file.

PEFT stores A [rank, columns] and B [rows, rank] for a checkpoint's matrices, which a GGUF file may reorder, stack or
split. To find out how, this module converts test matrices whose values are their own row and column indices with the
conversion of the base model: the result shows which rows of B and which columns of A belong to each GGUF tensor. So
conversions need no code for adapters.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.convert.config import CheckpointConfig
from localllm.convert.family import CheckpointFamily
from localllm.convert.peft_files import LoraPair, read_folder
from localllm.convert.records import find_family, load_records, make_family, resolve_record
from localllm.convert.tensor_mapping import TensorNameMap, TensorOrigin, list_origins
from localllm.convert.transforms import DerivedSource, Shape, TensorSource, as_float32, scale_rows
from localllm.engine.adapter_file import compute_digest, require_finite
from localllm.engine.adapters import Adapter, LowRankMatrices, Magnitude, ShapedTensor
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import Tensor
from localllm.files.gguf.header import printable
from localllm.quant.formats import BY_NAME

NEEDS_CONFIG = "copy the base model's config.json into its folder"
# Architectures whose conversion multiplies matrices by numbers that only config.json has.
SCALED_BY_CONFIG = ("falcon-h1",)
# Keys of a record that change how matrices are converted.
ABOUT_TENSORS = ("layer", "parts", "tensors", "whole", "rotated", "parted", "transposed", "bare", "prefixes", "renamed",
                 "named", "named_as", "sizes", "read")  # fmt: skip
# Modules of transformers, after which PEFT names tensors, that some checkpoints call otherwise.
RENAMED = {
    ".shared_experts.": ".shared_expert.", "model.layers.": "backbone.layers.",
    ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2.",
}  # fmt: skip
ROWS_AT_ONCE = 512  # rows of a traced matrix that are computed together


def open_peft(folder: str, metadata: Mapping[str, object], tensors: Mapping[str, ShapedTensor]) -> Adapter:
    """Convert the adapter in a PEFT folder for a model.

    metadata, tensors: of the model's GGUF file. Raises ModelError if the folder is invalid or for another model,
    UnsupportedError for features of PEFT that localllm lacks.
    """
    path = Path(folder)
    settings, pairs = read_folder(path)
    low_ranks = convert_if_unambiguous(path, list_bases(path, settings, metadata, tensors), pairs, tensors)
    require_finite(folder, low_ranks)
    arch, ids = str(metadata.get("general.architecture", "")), settings.get("alora_invocation_tokens") or []
    invocation = tuple(int(id) for id in ids) if all(type(id) is int for id in ids) else ()
    return Adapter(folder, path.resolve().name, low_ranks, arch, invocation, compute_digest(low_ranks))


def convert_if_unambiguous(
    path: Path, bases: "Sequence[BaseConversion]", pairs: "Mapping[str, LoraPair]", tensors: Mapping[str, ShapedTensor]
) -> dict[str, LowRankMatrices]:
    """Convert all pairs with the one conversion that fits the model.

    Raises ModelError if none fits, or if several fit and give different results.
    """
    results, problem = dict[str, dict[str, LowRankMatrices]](), None
    for base in bases:
        try:
            low_ranks = convert(path, base, pairs, tensors)
            results[compute_digest(low_ranks)] = low_ranks
        except ModelError as error:
            problem = problem or error
    if len(results) == 1:
        return next(iter(results.values()))
    if problem and len(bases) == 1 and bases[0].is_certain:
        raise problem
    reason = f" ({problem})" if problem and not results else ""
    raise ModelError(f"{path}: does not fit this model, or needs more than its GGUF file: {NEEDS_CONFIG}{reason}")


# ---- the base model's conversion


@dataclass(frozen=True)
class BaseConversion:
    """A candidate for how the base model's checkpoint was converted to the GGUF file.

    Attributes:
        factors: multipliers of matrices, see CheckpointHyperparameters.
        is_certain: read from config.json, not guessed.
    """

    family: CheckpointFamily
    sizes: Mapping[str, int]
    tensors: Mapping[str, TensorOrigin]
    factors: Mapping[str, Sequence[np.ndarray]]
    is_certain: bool = False


def list_bases(
    path: Path, settings: Mapping[str, Any], metadata: Mapping[str, object], tensors: Mapping[str, ShapedTensor]
) -> "list[BaseConversion]":
    """List the conversions to try: the one of config.json in the folder, or all that the GGUF file allows."""
    named = settings.get("base_model_name_or_path")
    folders = [path, *([Path(named)] if isinstance(named, str) and named else [])]
    for folder in folders:
        if (folder / "config.json").is_file():
            config = CheckpointConfig.open(folder)
            family = find_family(config)
            facts = family.read(config.merge_text_config(family.defaults))
            known = {"packed": 0, **facts.sizes}
            return [BaseConversion(family, known, list_origins(family, known, False), facts.factors, True)]
    arch = metadata.get("general.architecture")
    if arch in SCALED_BY_CONFIG:
        return []
    bases = dict[
        str, BaseConversion
    ]()  # by what the records say of tensors: most classes of an architecture are converted alike
    for name, (its_arch, record) in load_records().items():
        if its_arch == arch and "select" not in record and "+" not in name:
            about = {key: value for key, value in resolve_record(name).items() if key in ABOUT_TENSORS}
            if (key := repr(sorted(about.items()))) not in bases:
                family = make_family(name)
                sizes = guess_sizes(metadata, tensors, family)
                bases[key] = BaseConversion(family, sizes, list_origins(family, sizes, False), {})
    return [*bases.values()]


class GuessedSizes(dict[str, int]):
    """Sizes of a model, of which those that the GGUF file does not state are 1 until a shape shows them."""

    def __missing__(self, name: str) -> int:
        self[name] = 1
        self.unknown.add(name)
        return 1

    def __init__(self, known: Mapping[str, int]):
        super().__init__(known)
        self.unknown = set[str]()


def guess_sizes(
    metadata: Mapping[str, object], tensors: Mapping[str, ShapedTensor], family: CheckpointFamily
) -> Mapping[str, int]:
    """Infer the sizes of the checkpoint from the metadata and shapes of its GGUF file."""
    number = partial(get_int, metadata)
    width, heads = number("embedding_length"), number("attention.head_count", 1) or 1
    head_dim = number("attention.key_length") or width // heads
    kv_heads = number("attention.head_count_kv") or heads
    expert_hidden = number("expert_feed_forward_length") or number("feed_forward_length")
    shared = number("expert_shared_feed_forward_length") or number("expert_shared_count") * expert_hidden
    sizes = GuessedSizes({
        "width": width, "layers": number("block_count"), "hidden": number("feed_forward_length"), "heads": heads,
        "kv_heads": kv_heads, "head_dim": head_dim, "queries": heads * head_dim, "keys": kv_heads * head_dim,
        "vocab": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        "experts": number("expert_count"),
        "expert_hidden": expert_hidden, "shared_hidden": shared, "packed": 0, "mtp_layers": 0,
        "leading_dense": number("leading_dense_block_count"), "both_hidden": 2 * number("feed_forward_length"),
        "rotated_dims": number("rope.dimension_count"), "fused_rows": (heads + 2 * kv_heads) * head_dim,
        "latent": number("attention.kv_lora_rank"),
    })  # fmt: skip
    sizes.update(guess_latent_sizes(metadata, heads))
    if str(metadata.get("general.architecture")).startswith("qwen3"):
        sizes.update(guess_delta_sizes(metadata, tensors, sizes))
    for layer in range(sizes["layers"]):
        for name, its in family.layer(sizes, layer).items():
            tensor = tensors.get(f"blk.{layer}.{name}.weight")
            dimensions = its if isinstance(its, tuple) else its.dimensions
            if tensor is not None and len(dimensions) == len(tensor.shape):
                pairs = zip(dimensions, tensor.shape, strict=True)
                sizes.update({each: size for each, size in pairs if each in sizes.unknown})
    return sizes


def guess_latent_sizes(metadata: Mapping[str, object], heads: int) -> dict[str, int]:
    """Infer the sizes of latent attention (MLA); empty for other models."""
    number = partial(get_int, metadata)
    whole_key, value_dim = number("attention.key_length_mla"), number("attention.value_length_mla")
    if not whole_key:
        return {}
    rotated, latent = number("rope.dimension_count"), number("attention.kv_lora_rank")
    return {
        "rotated": rotated, "key_dim": whole_key - rotated, "value_dim": value_dim, "queries": heads * whole_key,
        "latent_and_key": latent + rotated, "both_rows": heads * (whole_key - rotated + value_dim),
        "values": heads * value_dim, "narrow": number("attention.q_lora_rank"),
    }  # fmt: skip


def guess_delta_sizes(
    metadata: Mapping[str, object], tensors: Mapping[str, ShapedTensor], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Infer the sizes of delta-rule layers (Qwen 3 Next, Qwen 3.5); empty for other models."""
    number = partial(get_int, metadata)
    key_heads, value_heads = number("ssm.group_count"), number("ssm.time_step_rank")
    if not value_heads:
        return {}
    keys, values = key_heads * number("ssm.state_size"), number("ssm.inner_size")
    attends = {f"attends_{n}": int(f"blk.{n}.ssm_out.weight" not in tensors) for n in range(sizes["layers"] + 1)}
    return {
        "both_queries": 2 * sizes["queries"], "key_heads": key_heads, "value_heads": value_heads,
        "rule_values": values, "value_dim": values // value_heads, "key_dim": number("ssm.state_size"),
        "convolved": 2 * keys + values, "all_four": 2 * (keys + values), "both_strengths": 2 * value_heads,
        "kernel": number("ssm.conv_kernel"), "one": 1, "both_inputs": 2 * sizes["width"],
        "both_hidden": 2 * sizes["expert_hidden"], **attends,
    }  # fmt: skip


def get_int(metadata: Mapping[str, object], key: str, default: int = 0) -> int:
    """Return an integer of the architecture's metadata, the first element of an array.

    key: without the architecture's prefix. Returns the default for a value of another type.
    """
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}", default)
    if isinstance(value, np.ndarray | list):
        value = int(value[0]) if len(value) else default
    return value if isinstance(value, int) and not isinstance(value, bool) else default


# ---- conversion


def convert(
    path: Path, base: BaseConversion, pairs: Mapping[str, LoraPair], tensors: Mapping[str, ShapedTensor]
) -> dict[str, LowRankMatrices]:
    """Convert all pairs to those of GGUF tensors.

    Raises ModelError for an adapter of another model, UnsupportedError for a conversion that cannot be applied to it.
    """
    names = TensorNameMap(base.family, base.sizes)
    parts = {part for place in base.tensors.values() for part in place.of}
    found: dict[str, dict[int, LoraPair]] = {}
    for stored_name, pair in pairs.items():
        name = base.family.named(stored_name, base.sizes["layers"]) if base.family.named else stored_name
        candidates = [name, *(name.replace(new, old) for new, old in RENAMED.items() if new in name)]
        places = [names.find_stored(names.strip_affixes(each), parts) for each in candidates]
        part, expert = next((place for place in places if place[0] in parts), ("", -1))
        if not part:
            hint = "" if base.is_certain else f": {NEEDS_CONFIG}"
            raise ModelError(f"{path}: {printable(stored_name)} is not a matrix of the model{hint}")
        found.setdefault(part, {})[expert] = pair
    tracer, low_ranks, used = ConversionTracer(base), dict[str, LowRankMatrices](), set[str]()
    for name, place in base.tensors.items():
        if any(part in found for part in place.of) and name in tensors:
            low_ranks[name] = convert_tensor(path, name, place, found, tensors[name].shape, tracer)
            used |= found.keys() & place.of.keys()
    if unused := sorted(found.keys() - used):
        raise ModelError(f"{path}: is for another model: this one has no tensor {printable(unused[0])}")
    return low_ranks


def convert_tensor(
    path: Path,
    name: str,
    place: TensorOrigin,
    found: Mapping[str, Mapping[int, LoraPair]],
    shape: Shape,
    tracer: "ConversionTracer",
) -> LowRankMatrices:  # fmt: skip
    """Compute the low-rank matrices of one GGUF tensor from those of the tensors it is built of."""
    matrices = []
    for part, stored_shape in place.of.items():
        if part not in found:
            continue
        stack = fill_missing(path, part, found[part], stored_shape)
        traced = tracer.trace(name, place, part)
        if traced.rows.shape[:-1] != shape[:-2] or (traced.rows.shape[-1], traced.columns.shape[-1]) != shape[-2:]:
            raise ModelError(f"{path}: {printable(part)} does not fit the model's {name} {list(shape)}: {NEEDS_CONFIG}")
        if traced.is_transposed and -1 not in found[part]:  # a stack in another order than that of linear layers
            raise UnsupportedError(
                f"{path}: adapters of the experts of {name} are not supported: merge it with PEFT first"
            )
        matrices.append(traced.apply(name, stack))
    a = np.concatenate([each.factor * each.a for each in matrices], axis=-2) if len(matrices) > 1 else matrices[0].a
    b = np.concatenate([each.b for each in matrices], axis=-1)
    factor = matrices[0].factor if len(matrices) == 1 else 1.0
    magnitude = combine_magnitudes(name, [each.magnitude for each in matrices if each.magnitude])
    if name == "token_embd.weight":  # rows of A are looked up
        a, b = np.ascontiguousarray(b), np.ascontiguousarray(a.T)
    a_tensor, b_tensor = make_float_tensor(f"{name}.lora_a", a), make_float_tensor(f"{name}.lora_b", b)
    return LowRankMatrices(a_tensor, b_tensor, factor, magnitude)


def combine_magnitudes(name: str, magnitudes: Sequence[Magnitude]) -> Magnitude | None:
    """Combine DoRA's magnitudes of several stored tensors into those of a GGUF tensor; None without DoRA.

    Raises UnsupportedError if a value would need magnitudes of more than one.
    """
    if not magnitudes:
        return None
    if any(each.of_columns for each in magnitudes) and len(magnitudes) > 1:
        raise UnsupportedError(f"DoRA of {name} is not supported: its conversion combines matrices")
    values = magnitudes[0].values
    for each in magnitudes[1:]:
        values = np.where(np.isnan(values), each.values, values)
    return Magnitude(values, magnitudes[0].of_columns)


def fill_missing(path: Path, part: str, pairs: Mapping[int, LoraPair], shape: Shape) -> list[LoraPair]:
    """Return one pair for each matrix of a stored tensor, zeros for experts without one. Raises ModelError."""
    first = next(iter(pairs.values()))
    count = shape[0] if len(shape) == 3 else 1
    untouched = None if first.magnitude is None else np.full_like(first.magnitude, np.nan)
    zeros = LoraPair(np.zeros_like(first.a), np.zeros_like(first.b), first.factor, untouched, first.of_columns)
    result = [pairs.get(number if -1 not in pairs else -1, zeros) for number in range(count)]
    for pair in result:
        if (
            (pair.b.shape[0], pair.a.shape[1]) != shape[-2:]
            or pair.factor != first.factor
            or pair.a.shape != first.a.shape
        ):
            sizes = f"[{pair.b.shape[0]}, {pair.a.shape[1]}] with rank {pair.a.shape[0]}"
            raise ModelError(f"{path}: the matrices of {printable(part)} are for {sizes}, not for {list(shape[-2:])}")
    return result


class MatrixOrigin(NamedTuple):
    """For each row and column of a GGUF tensor, the stored row and column that it is copied from.

    Attributes:
        rows, columns: indices in the stored matrix, int64 [..., rows] and [..., columns]; exchanged if the tensor is
            transposed.
        matrix: index of the stored matrix, int64 [...].
        factors: multipliers of rows, float32 [..., rows].
    """

    rows: np.ndarray
    columns: np.ndarray
    matrix: np.ndarray
    factors: np.ndarray
    is_transposed: bool

    def apply(self, name: str, stack: Sequence[LoraPair]) -> "ConvertedPair":
        """Reorder the matrices of stored tensors for the GGUF tensor.

        Raises UnsupportedError for magnitudes (DoRA) of a stored tensor that is split.
        """
        a, b, magnitudes = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        outer, of_columns = self.rows.shape[:-1], stack[0].of_columns != self.is_transposed
        for place in np.ndindex(outer):
            pair = stack[int(self.matrix[place])]
            left, right = (pair.a.T, pair.b.T) if self.is_transposed else (pair.b, pair.a)
            b.append(self.factors[place][:, None] * left[np.maximum(self.rows[place], 0)])
            a.append(right[:, self.columns[place]])
            if pair.magnitude is not None:
                magnitudes.append(self._convert_magnitude(name, place, pair.magnitude, of_columns, left, right))
        whole = [np.stack(some).reshape(*outer, *some[0].shape) for some in (a, b, magnitudes) if some]
        magnitude = Magnitude(whole[2], of_columns) if magnitudes else None
        return ConvertedPair(whole[0], whole[1], stack[0].factor, magnitude)

    def _convert_magnitude(
        self, name: str, place: tuple[int, ...], magnitude: np.ndarray, of_columns: bool,
        left: np.ndarray, right: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """Reorder the magnitudes of rows or columns; NaN for rows of other stored tensors.

        left, right: B and A after conversion. Raises UnsupportedError if a magnitude's vector is split, so that its
        norm changes.
        """
        rows, columns, factors = self.rows[place], self.columns[place], np.abs(self.factors[place])
        across, size = (rows, left.shape[0]) if of_columns else (columns, right.shape[1])
        if not np.array_equal(np.sort(across), np.arange(size)) or (of_columns and np.ptp(factors)):
            raise UnsupportedError(
                f"DoRA of {name} is not supported: its conversion splits rows; merge it with PEFT first"
            )
        if of_columns:
            return magnitude[columns] * factors[0]
        return np.where(rows < 0, np.float32(np.nan), magnitude[np.maximum(rows, 0)] * factors)


class ConvertedPair(NamedTuple):
    """The LoRA matrices of one GGUF tensor.

    Attributes:
        a: float32 [..., rank, columns].  b: float32 [..., rows, rank].  factor: multiplier of their product.
        magnitude: None without DoRA.
    """

    a: np.ndarray
    b: np.ndarray
    factor: float
    magnitude: Magnitude | None


class ConversionTracer:
    """Traces how the base model's tensors are converted, once for all layers."""

    def __init__(self, base: BaseConversion):
        self._base, self._known = base, dict[object, MatrixOrigin]()

    def trace(self, name: str, place: TensorOrigin, part: str) -> MatrixOrigin:
        plain = [re.sub(r"^blk\.\d+\.", "", each) for each in (name, part)]
        key = (*plain, tuple(place.of.values()))
        if key not in self._known:
            self._known[key] = self._trace(name, place, part)
        return self._known[key]

    def _trace(self, name: str, place: TensorOrigin, part: str) -> MatrixOrigin:
        factors = self._base.factors.get(re.sub(r"^blk\.\d+\.", "", name).removesuffix(".weight"), ())
        ones, rows, columns = (
            self._values(place, part, pattern, factors)
            for pattern in (
                lambda row, column: np.ones(np.broadcast_shapes(row.shape, column.shape)),
                lambda row, column: row + 0 * column,
                lambda row, column: column + 0 * row,
            )
        )
        outer = ones.shape[:-2]
        with np.errstate(divide="ignore", invalid="ignore"):
            rows, columns = (np.where(ones == 0, -1, np.rint(each / ones)).astype(np.int64) for each in (rows, columns))
        is_taken = (rows >= 0).any(axis=-1)
        is_plain = (rows == rows[..., :1]).all() and (columns == columns.max(axis=-2, keepdims=True))[is_taken].all()
        is_transposed = not is_plain
        height = place.of[part][-2]
        if is_plain:
            row_index, column_index = rows[..., 0], columns.max(axis=-2)
        elif (rows == rows[..., :1, :]).all() and (columns == columns[..., :1]).all():
            row_index, column_index = columns[..., 0], rows[..., 0, :] % height
        else:
            raise UnsupportedError(f"adapters of {name} are not supported: its conversion mixes rows and columns")
        self._require_copies(name, place, part, factors, ones, rows, columns)
        matrix = rows.max(axis=(-2, -1)) // height
        row_index = row_index if is_transposed else np.where(row_index < 0, -1, row_index % height)
        return MatrixOrigin(row_index, column_index, matrix.reshape(outer), ones.max(axis=-1), is_transposed)

    def _require_copies(
        self, name: str, place: TensorOrigin, part: str, factors: Sequence[np.ndarray], ones: np.ndarray,
        rows: np.ndarray, columns: np.ndarray,
    ) -> None:  # fmt: skip
        """Raise UnsupportedError unless every value is a stored one times its factor, tested with other values."""
        computed = self._values(place, part, compute_test_values, factors)
        expected = ones * compute_test_values(np.maximum(rows, 0), np.maximum(columns, 0))
        if not np.allclose(computed, expected, rtol=1e-5, atol=1e-5):
            raise UnsupportedError(f"adapters of {name} are not supported: its conversion changes single numbers")

    def _values(self, place: TensorOrigin, part: str, pattern: Any, factors: Sequence[np.ndarray]) -> np.ndarray:
        """Convert a stored tensor whose values are pattern(row, column); all others are zeros. Returns float64."""
        sources: list[TensorSource] = [
            make_pattern_source(shape, pattern if each == part else lambda row, column: 0.0 * (row + column))
            for each, shape in place.of.items()
        ]
        tensor = scale_rows(place.build(sources), factors)
        count = math.prod(tensor.shape[:-1])
        chunks = [
            as_float32(tensor.read_rows(first, min(first + ROWS_AT_ONCE, count)), tensor.dtype)
            for first in range(0, count, ROWS_AT_ONCE)
        ]
        return np.concatenate(chunks).reshape(tensor.shape).astype(np.float64)


def compute_test_values(row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Return values from -1 to 1 that differ between neighbouring rows and columns."""
    return np.sin(12.9898 * row + 78.233 * column)


def make_pattern_source(shape: Shape, pattern: Any) -> DerivedSource:
    """Return a source with the values pattern(row, column).

    Rows are counted through all matrices of a stack.
    """

    def read_rows(first: int, last: int) -> np.ndarray:
        numbers = pattern(np.arange(first, last)[:, None], np.arange(shape[-1])[None, :])
        return np.ascontiguousarray(numbers, np.float32).view(np.uint8)

    return DerivedSource("F32", shape, read_rows)


def make_float_tensor(name: str, numbers: np.ndarray) -> Tensor:
    data = np.ascontiguousarray(numbers, np.float32)
    return Tensor(name, BY_NAME["F32"], data.shape, data.view(np.uint8))
