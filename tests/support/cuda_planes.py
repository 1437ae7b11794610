"""Decode the planes of localllm.kernels.cuda.matmul.planes in NumPy."""

import numpy as np

from localllm.kernels.cuda.matmul.planes import PLANES, UNIT, compute_plane_offset
from localllm.quant.block_codes import build_e8m0_table, build_ue4m3_table
from localllm.quant.formats import DOUBLED_E2M1, IQ4_VALUES

CENTRES = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32, "Q1_0": 1, "Q2_0": 1, "TQ2_0": 1}
STEPS = {"Q1_0": 2}
TABLES = {name: np.array(IQ4_VALUES) for name in ("IQ4_NL", "IQ4_XS")} | {
    name: np.array(DOUBLED_E2M1) for name in ("MXFP4", "NVFP4")
}


def split(name: str, rows: np.ndarray, columns: int) -> dict[str, np.ndarray]:
    """Return the planes of rows, uint8 [rows, row_bytes], by name: uint8 [rows, units or blocks, bytes]."""
    planes = {}
    for plane in PLANES[name]:
        start = compute_plane_offset(name, plane.name, columns)
        data = rows[:, start : start + columns // plane.weights * plane.bytes]
        planes[plane.name] = data.reshape(len(rows), -1, plane.bytes)
    return planes


def integers(data: np.ndarray, kind: str) -> np.ndarray:
    """Return the last axis as integers of that type."""
    return np.ascontiguousarray(data).view(kind).astype(np.int64)


def halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def codes_of(planes: dict[str, np.ndarray]) -> np.ndarray:
    """Assemble each weight's code from the bit planes: int64 [rows, units, 32], from zero up."""
    total, place, byte = np.zeros((), np.int64), 0, 8 * np.arange(4)
    if "bytes" in planes:
        return np.concatenate([integers(planes[key], "i1") for key in ("bytes", "last_bytes")], axis=-1)
    if "nibbles" in planes:
        total, place = np.concatenate([planes["nibbles"] & 15, planes["nibbles"] >> 4], axis=-1).astype(np.int64), 4
    if "table" in planes:
        words = integers(planes["table"], "<u4")[..., None] >> 4 * np.arange(8) & 15  # [..., word, 8]
        total, place = np.concatenate([words[..., :4], words[..., 4:]], axis=-2).reshape(*words.shape[:-2], UNIT), 4
    if "pairs" in planes:
        words = integers(planes["pairs"], "<u4")[..., None, None] >> 2 * np.arange(4)[:, None] + byte & 3
        total, place = total | words.reshape(*words.shape[:-3], UNIT) << place, place + 2
    if "bits" in planes:
        words = integers(planes["bits"], "<u4")[..., None] >> np.arange(8)[:, None] + byte & 1
        total = total | words.reshape(*words.shape[:-2], UNIT) << place
    return total


def per_unit(data: np.ndarray) -> np.ndarray:
    """Repeat values of 256 weights for each of their 8 units: [rows, blocks, ...] -> [rows, units, ...]."""
    return np.repeat(data, 8, axis=1)


def k_header(planes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minimums of Q4_K and Q5_K, [rows, units, 1]."""
    header, unit = planes["header"], np.arange(8)
    d, words = halves(header[..., :4]), integers(header[..., 4:], "<u4")[..., None]
    scales = words[..., 0, :] >> 4 * unit & 15 | (words[..., 2, :] >> 2 * unit & 3) << 4
    minimums = words[..., 1, :] >> 4 * unit & 15 | (words[..., 2, :] >> 2 * unit + 16 & 3) << 4
    count = len(header), -1, 1
    return (d[..., :1] * scales.astype(np.float32)).reshape(count), (d[..., 1:] * minimums.astype(np.float32)).reshape(
        count
    )


def factors(name: str, planes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return scales of units or of 16 weights, and subtracted offsets: float32 [rows, units, 1 or 2]."""
    nothing = np.zeros((1, 1, 1), np.float32)
    if name in ("Q4_K", "Q5_K"):
        return k_header(planes)
    if name == "NVFP4":
        return build_ue4m3_table()[planes["scales"]], nothing
    if name == "MXFP4":
        return build_e8m0_table()[planes["scales"]], nothing
    if name == "IQ4_XS":
        header, unit = planes["header"], np.arange(8)
        low, high = integers(header[..., 4:], "<u4") >> 4 * unit & 15, integers(header[..., 2:4], "<u2") >> 2 * unit & 3
        scales = halves(header[..., :2]) * ((low | high << 4) - 32).astype(np.float32)
        return scales.reshape(len(header), -1, 1), nothing
    if name == "Q2_K":
        both, packed = per_unit(halves(planes["d_low"])), planes["scales"]
        return both[..., :1] * (packed & 15).astype(np.float32), both[..., 1:] * (packed >> 4).astype(np.float32)
    if name == "Q3_K":
        low = np.concatenate([planes["scales"] & 15, planes["scales"] >> 4], axis=-1).astype(np.int64)
        high = (integers(planes["high"], "<u4") >> 2 * np.arange(16) & 3).reshape(low.shape)
        return per_unit(halves(planes["d"])) * ((low | high << 4) - 32).astype(np.float32), nothing
    if name == "Q6_K":
        return per_unit(halves(planes["d"])) * integers(planes["scales"], "i1").astype(np.float32), nothing
    if "d_low" in planes:
        both = halves(planes["d_low"])
        return both[..., :1], -both[..., 1:]
    units = max(data.shape[1] for data in planes.values())
    return np.repeat(halves(planes["d"]), units // planes["d"].shape[1], axis=1), nothing


def dequantized(name: str, rows: np.ndarray, columns: int) -> np.ndarray:
    """Dequantize rows of planes, uint8 [rows, row_bytes], to float32 [rows, columns]."""
    planes = split(name, rows, columns)
    codes, (scales, lows) = STEPS.get(name, 1) * codes_of(planes) - CENTRES.get(name, 0), factors(name, planes)
    values = (TABLES[name][codes] if name in TABLES else codes).astype(np.float32)
    repeats = UNIT // scales.shape[-1], UNIT // lows.shape[-1]
    scales, lows = np.repeat(scales, repeats[0], axis=-1), np.repeat(lows, repeats[1], axis=-1)
    return (scales * values - lows).reshape(len(rows), columns)
