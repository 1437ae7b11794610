"""Encode weights to the blocks of a format: the entry point of this package."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from localllm.quant import affine, codebook, symmetric, ternary, value_tables
from localllm.quant.blocks import narrow_to_bf16, narrow_to_half
from localllm.quant.formats import BY_NAME

# An encoder of rows: (weights float32 [rows, columns], importance float32 [columns] or None, out uint8 [rows, bytes]).
Encoder = Callable[[NDArray, NDArray | None, NDArray], None]

f32 = np.float32
RANGE_WEIGHTS = 1 << 20  # weights that a thread encodes at a time, some milliseconds of work
MIN_IMPORTANCE = 1e-6  # times the mean, added to each column, so that columns of importance 0 get sensible codes, too


def compute_column_weights(importance: NDArray | None, columns: int) -> NDArray:
    """Return the weights of squared errors by column, float32 [columns], with a mean of about 1.

    All are 1 without importance.
    """
    mean = 0.0 if importance is None else float(np.mean(importance, dtype=np.float64))
    if importance is None or mean == 0:
        return np.ones(columns, np.float32)
    return (importance / mean + MIN_IMPORTANCE).astype(np.float32)


def add_column_weights(search: Callable) -> Encoder:
    def encoder(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
        search(weights, compute_column_weights(importance, weights.shape[1]), out)

    return encoder


def encode_f32(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    out[:] = weights.view(np.uint8)


def encode_f16(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    narrow_to_half(weights.reshape(-1), out.reshape(-1).view(np.uint16))


def encode_bf16(weights: NDArray, importance: NDArray | None, out: NDArray) -> None:
    narrow_to_bf16(weights.reshape(-1), out.reshape(-1).view(np.uint16))


ENCODERS: dict[str, Encoder] = {
    "F32": encode_f32,
    "F16": encode_f16,
    "BF16": encode_bf16,
    "Q1_0": add_column_weights(ternary.encode_q1_0),
    "Q2_0": add_column_weights(symmetric.build_block_encoder("Q2_0", 24, f32(-0.7), f32(0.3))),
    "Q4_0": add_column_weights(symmetric.build_block_encoder("Q4_0")),
    "Q4_1": add_column_weights(affine.build_block_encoder("Q4_1")),
    "Q5_0": add_column_weights(symmetric.build_block_encoder("Q5_0")),
    "Q5_1": add_column_weights(affine.build_block_encoder("Q5_1")),
    "Q8_0": add_column_weights(symmetric.encode_q8_0),
    "Q2_K": add_column_weights(affine.build_super_block_encoder("Q2_K")),
    "Q3_K": add_column_weights(
        symmetric.build_super_block_encoder("Q3_K", 12, f32(-0.6), f32(0.45), refits=2, rounds=4, reach=1)
    ),
    "Q4_K": add_column_weights(affine.build_super_block_encoder("Q4_K")),
    "Q5_K": add_column_weights(affine.build_super_block_encoder("Q5_K")),
    # Integer scales lie so close together that trying many of them (reach=6) saves 5 % more error than a finer grid.
    "Q6_K": add_column_weights(
        symmetric.build_super_block_encoder("Q6_K", 8, f32(-0.6), f32(0.6), refits=1, rounds=2, reach=6)
    ),
    "IQ4_NL": add_column_weights(value_tables.encode_iq4_nl),
    "IQ4_XS": add_column_weights(value_tables.encode_iq4_xs),
    "MXFP4": add_column_weights(value_tables.encode_mxfp4),
    "TQ1_0": add_column_weights(ternary.encode_tq1_0),
    "TQ2_0": add_column_weights(ternary.encode_tq2_0),
    **{name: add_column_weights(search) for name, search in codebook.ENCODERS.items()},
}


def encode(name: str, weights: NDArray, importance: NDArray | None = None, threads: int = 1) -> NDArray:
    """Encode finite weights, float32 [rows, columns], to blocks, uint8 [rows, bytes of a row].

    importance: float32 [columns], the mean squares of the activations that multiply each column, which weight its
    squared errors; None to weight all columns alike. The bytes do not depend on the number of threads. Raises
    ValueError if rows are not whole blocks or the importance does not fit, KeyError if the format has no encoder.
    """
    encoder, format = ENCODERS[name], BY_NAME[name]
    rows, columns = weights.shape
    if columns % format.block:
        raise ValueError(f"rows of {columns} weights cannot be divided into {name}'s blocks of {format.block}")
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (columns,) or not np.all(np.isfinite(importance) & (importance >= 0)):
            raise ValueError(f"the importance must be {columns} finite numbers, none negative")
    weights = np.require(weights, np.float32, ["C_CONTIGUOUS", "ALIGNED"]).view()
    weights.flags.writeable = False  # always the same array type: Numba compiles a search once per type
    out = np.empty((rows, format.row_bytes(columns)), np.uint8)
    step = max(RANGE_WEIGHTS // max(columns, 1), 1)

    def encode_range(start: int) -> None:
        encoder(weights[start : start + step], importance, out[start : start + step])

    if threads == 1:
        for start in range(0, rows, step):
            encode_range(start)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(encode_range, range(0, rows, step)))
    return out
