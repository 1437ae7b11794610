"""The layout of quantized weights on a GPU.

Each row of a matrix consists of planes, one for each field of its blocks. A thread reads a unit: 32 weights in every
format. From each plane it loads its unit's bytes, 16 or 8 bytes of codes at once, and neighbouring threads load
neighbouring bytes. The planes of a row follow each other, wide fields first, so all are aligned; rows are padded to 16
bytes. Nothing is widened: a row takes as many bytes as in the file.

Codes are divided into planes by bits, in 32-bit words for dot products of four bytes. Word w of a unit, 0 to 7, has the
weights 4 w to 4 w + 3, one in each byte. The planes of a unit:

    nibbles  4 words. Low halves of the bytes of word w: the low 4 bits of the unit's word w; high halves: those of the
             unit's word 4 + w
    table    4 words. Low 16 bits of word w: the 4 codes of the unit's word w; high 16 bits: those of the unit's word
             4 + w
    pairs    2 words. Bits 2 (w % 4) and the next of the bytes of word w // 4: two bits of the unit's word w
    bits     1 word. Bit w of its bytes: one bit of the unit's word w
    bytes    two planes of 16 bytes, the codes themselves: words 0 to 3, and words 4 to 7

The planes of scales, minimums and d are the same as in the file, except

    Q4_K, Q5_K  header, 16 bytes for 256 weights: d, low; the low 4 bits of the scales of 8 units, then those of the
                minimums; the high 2 bits of the scales, then those of the minimums
    Q3_K        the low 4 bits of a unit's two scales in a byte; the high 2 bits of all 16 scales in 4 bytes
    IQ4_XS      header, 8 bytes for 256 weights, as in the file
"""

from typing import NamedTuple

from localllm.kernels.formats import FAMILIES
from localllm.quant.formats import BY_NAME, LAYOUTS, BlockLayout

UNIT = 32  # weights
ALIGNMENT = 16  # rows are padded to a multiple of this, in bytes


class FieldPlane(NamedTuple):
    """A plane: one field of the blocks of a row."""

    name: str
    bytes: int  # bytes for every `weights` weights
    weights: int = UNIT


SPECIAL_PLANES: dict[str, tuple[FieldPlane, ...]] = {
    "Q2_K": (FieldPlane("pairs", 8), FieldPlane("d_low", 4, 256), FieldPlane("scales", 2)),
    "Q3_K": (
        FieldPlane("pairs", 8),
        FieldPlane("bits", 4),
        FieldPlane("high", 4, 256),
        FieldPlane("d", 2, 256),
        FieldPlane("scales", 1),
    ),
    "Q4_K": (FieldPlane("nibbles", 16), FieldPlane("header", 16, 256)),
    "Q5_K": (FieldPlane("nibbles", 16), FieldPlane("header", 16, 256), FieldPlane("bits", 4)),
    "Q6_K": (FieldPlane("nibbles", 16), FieldPlane("pairs", 8), FieldPlane("scales", 2), FieldPlane("d", 2, 256)),
    "IQ4_XS": (FieldPlane("table", 16), FieldPlane("header", 8, 256)),
}


def list_code_planes(layout: BlockLayout) -> list[FieldPlane]:
    if layout.bits == 8:
        return [FieldPlane("bytes", 16), FieldPlane("last_bytes", 16)]
    if layout.values:
        return [FieldPlane("table", 16)]
    sizes = {4: FieldPlane("nibbles", 16), 2: FieldPlane("pairs", 8), 1: FieldPlane("bits", 4)}
    return [plane for bits, plane in sizes.items() if layout.bits & bits]


def list_planes(name: str) -> tuple[FieldPlane, ...]:
    """Return all planes of a format: the special ones above, or those that its block layout determines."""
    if name in SPECIAL_PLANES:
        return SPECIAL_PLANES[name]
    layout, block = LAYOUTS[name], BY_NAME[name].block
    if layout.scales:
        factors = FieldPlane("scales", UNIT // layout.group)
    else:
        factors = FieldPlane("d", 2, block) if layout.low is None else FieldPlane("d_low", 4, block)
    return (*list_code_planes(layout), factors)


PLANES = {name: list_planes(name) for name in FAMILIES if LAYOUTS[name].codes}
FLOAT_FORMATS = ("F32", "F16", "BF16")  # stored as in the file, with padded rows

# Other formats are converted on upload: to Q8_0 if that costs less than 2e-6 of their mean square, because their codes
# are (nearly) integers and 32 share a scale; otherwise, where it would cost up to 2e-5, to F16, which costs 5e-8.
CONVERTED_TO_Q8_0 = ("TQ1_0", "IQ1_S", "IQ2_XXS", "IQ3_XXS")


def get_storage_format(format_name: str) -> str:
    """Return the format in which weights of a format are stored on a GPU."""
    if format_name in PLANES or format_name in FLOAT_FORMATS:
        return format_name
    return "Q8_0" if format_name in CONVERTED_TO_Q8_0 else "F16"


def compute_unit_shift(plane: FieldPlane) -> int:
    """Return log2 of the number of units that share an element of a plane."""
    return (plane.weights // UNIT).bit_length() - 1


def compute_plane_offset(format_name: str, plane: str, columns: int) -> int:
    """Return the offset of a plane in a row, in bytes.

    plane: its name; "" for the end of all planes.
    """
    start = 0
    for field in PLANES[format_name]:
        if field.name == plane:
            return start
        start += columns // field.weights * field.bytes
    return start


def compute_row_bytes(format_name: str, columns: int) -> int:
    """Compute the size in bytes of a row on a GPU, padding included.

    columns: a multiple of the block size.
    """
    size = {"F32": 4, "F16": 2, "BF16": 2}.get(format_name)
    return -(-(size * columns if size else compute_plane_offset(format_name, "", columns)) // ALIGNMENT) * ALIGNMENT
