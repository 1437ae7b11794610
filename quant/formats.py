"""The tensor formats of GGUF files, and the file types: one row each.

A quantized format stores a row of weights as blocks; a block is `block` weights in `bytes` bytes and is decoded
independently. Float and integer types have blocks of one. A row has everything that other modules need to know: the
file of kernels that reads the format, and how it is encoded, checked and offered. This module does not import NumPy.

A block is a few consecutive fields, whose layout unpacking, quantizing, GPU kernels, tests and random files share. Most
formats store a weight as an integer, its *code*, of 1 to 8 bits, in one field or in two (the low bits and the high
ones). A group of weights shares a scale:

    weight = d * scale * (code - centre)              d: a float16; scale: 1, or an integer per group
    weight = d * scale * code - low * minimum         low: another float16 (Q4_1 and Q5_1: + low)
    weight = d * scale * values[code]                 values: 16 that are not evenly spaced

NVFP4 and MXFP4 have small floats as scales, and no d; TQ1_0 has five base-3 digits in a byte. In the formats with a
grid (codebook) a code is the index of 4 or 8 weights (an octet), and signs are stored separately. `parts` lists the
offsets of their fields:

    codes    the low 8 bits of each code
             IQ2_XS: 16 bits each, a 9-bit code and a sign code
             IQ2_XXS: 8 bytes for every 32 weights, 4 codes and the 32-bit word described at `scales`
    high     the high bits of the codes, from the lowest bits of a byte up
             IQ2_S: 2 bits each. IQ3_S: 1 bit each. IQ1_M: 3 bits, and the sign of an octet's shift (set: minus)
    signs    a bit for each weight (set: minus). A sign code has 7 bits for an octet; the eighth sign makes the number
             of minus signs even
    scales   4 bits for each group, the low half of a byte first
             IQ2_XXS, IQ3_XXS: a 32-bit word for every 32 weights, 4 sign codes and the scale in the top 4 bits
             IQ1_S: 16 bits for every 32 weights, 3 high bits of each of 4 codes, a scale of 3 bits, the shift's sign
             IQ1_M: four 16-bit words, each with four scales of 3 bits and 4 bits of d on top

    weight = d * (scale + 1/2) / 4 * grid[code] * sign       IQ2; IQ3_XXS: / 2 instead of / 4, IQ3_S: * 2
    weight = d * (1 + 2 * scale) * (grid[code] ± 1/8)        IQ1

Sources: the GGUF specification and ggml's type list; the block structs and `dequantize_row_*` functions of ggml
(ggml-common.h, ggml-quants.c); the k-quants are described in llama.cpp's pull request 1684; OCP Microscaling Formats
(MX) Specification 1.0 has the values of MXFP4 (5.3.3) and its scales (5.4.1).
"""

from typing import NamedTuple


class Field(NamedTuple):
    """Values of `bits` bits that are packed regularly into bytes.

    `run` consecutive bytes hold values 0 to run - 1 in their lowest bits, the next `run` values in the bits above, and
    so on, until the bytes are full. Then the next `run` bytes follow.
    """

    at: int  # offset of the first byte in the block
    bits: int
    run: int = 1

    def locate(self, i: int) -> tuple[int, int]:
        """Return the byte and the lowest bit of value i."""
        each = 8 // self.bits
        return self.at + i // (self.run * each) * self.run + i % self.run, i // self.run % each * self.bits


class ScatteredField(NamedTuple):
    """Values of `bits` bits at listed positions, in no regular order."""

    bits: int
    places: tuple[tuple[int, int], ...]  # (byte, lowest bit) of each value

    def locate(self, i: int) -> tuple[int, int]:
        return self.places[i]


Fields = tuple[Field | ScatteredField, ...]


class BlockLayout(NamedTuple):
    """Where the fields of a format's block are, and what their values mean."""

    d: int | None  # the first byte of the float16 d; None if the block has none, or stores it in several fields
    group: int  # weights that share a scale
    codes: tuple[Field, ...] = ()  # one per weight; the field with the lowest bits first, as in all tuples of fields
    centre: int = 0
    step: int = 1  # weight = d * scale * (step * code - centre)
    values: tuple[int, ...] = ()
    scales: Fields = ()  # one value per group
    scale_centre: int = 0
    scale_type: str = "integer"  # or "int8"; or the float types "e8m0" and "ue4m3", halved, without a d
    low: int | None = None  # the first byte of the float16 low
    minimums: Fields = ()  # one value per group; () with a low: low itself is added
    grid: int = 0  # weights that a code represents; 0 without a grid
    parts: tuple[tuple[str, int], ...] = ()  # (name, first byte) of the fields of formats with a grid

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return sum(field.bits for field in self.codes)

    @property
    def sub_block(self) -> int:
        """The number of consecutive weights, of each 32, that share a scale: 32 or 16."""
        return min(self.group, 32)

    def find_field(self, name: str) -> int:
        return dict(self.parts)[name]


def list_positions(at: int, count: int, shift: int) -> tuple[tuple[int, int], ...]:
    """Return positions of `count` values, one per byte from `at` on, each beginning at bit `shift`."""
    return tuple((at + i, shift) for i in range(count))


# The 4-bit floats E2M1 (sign, 2 bits exponent, 1 bit mantissa), doubled so that all are integers. Their scales are
# halved.
DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# kvalues_iq4nl in ggml-common.h.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# TQ1_0's codes: (first weight, first byte, bytes, digits in each): digit n of byte i is weight first + n * bytes + i.
TRITS = ((0, 0, 32, 5), (160, 32, 16, 5), (240, 48, 4, 4))

# 8 scales and 8 minimums of 6 bits in 12 bytes. Groups 0 to 3: the low 6 bits of bytes 4 to 7 (scales) and 8 to 11
# (minimums). Groups 4 to 7: the low 4 bits in bytes 12 to 15 (scale in the low half, minimum in the high half), the
# high 2 bits on top of bytes 4 to 7 and 8 to 11.
K_SCALES = (
    ScatteredField(4, list_positions(4, 4, 0) + list_positions(12, 4, 0)), ScatteredField(2, list_positions(4, 4,
    4) + list_positions(4, 4, 6))
)  # fmt: skip
K_MINIMUMS = (
    ScatteredField(4, list_positions(8, 4, 0) + list_positions(12, 4, 4)), ScatteredField(2, list_positions(8, 4,
    4) + list_positions(8, 4, 6))
)  # fmt: skip


class Format(NamedTuple):
    """A tensor format of GGUF: its size, its layout, and what other modules need to know about it."""

    id: int  # ggml_type in the file
    name: str
    block: int  # weights per block
    bytes: int  # bytes per block
    family: str = ""  # the file of localllm/kernels/formats that reads it; "": float or integer values
    fallback: str = "F16"  # for rows that are not whole blocks
    poor: bool = False  # whether its quality is poor without an importance matrix
    # The relative error above which `verify` calls a tensor badly encoded: thrice that of normally distributed weights.
    limit: float = 1.0
    feedback: bool = False  # whether GPTQ replaces its codes, see block_codes.py
    offered: bool = False  # whether --size may choose it; codebooks are not offered, because they decode more slowly
    layout: BlockLayout | None = None

    def row_bytes(self, columns: int) -> int:
        return columns // self.block * self.bytes


FORMATS: dict[int, Format] = {
    format.id: format
    for format in [
        Format(0, "F32", 1, 4, limit=1e-6),
        Format(1, "F16", 1, 2, limit=2e-3),
        Format(2, "Q4_0", 32, 18, "blocks_of_32", limit=0.3, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(2, 4, 16),), centre=8)),
        Format(3, "Q4_1", 32, 20, "blocks_of_32", limit=0.25, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(4, 4, 16),), low=2)),
        Format(6, "Q5_0", 32, 22, "blocks_of_32", limit=0.15, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(6, 4, 16), Field(2, 1)), centre=16)),
        Format(7, "Q5_1", 32, 24, "blocks_of_32", limit=0.12, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(8, 4, 16), Field(4, 1)), low=2)),
        Format(8, "Q8_0", 32, 34, "blocks_of_32", limit=0.02, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(2, 8),), centre=0)),
        Format(10, "Q2_K", 256, 84, "k_quants", fallback="Q4_0", feedback=True, offered=True,
            layout=BlockLayout(80, 16, (Field(16, 2, 32),), scales=(ScatteredField(4, list_positions(0, 16, 0)),),
            low=82,
                minimums=(ScatteredField(4, list_positions(0, 16, 4)),))),
        Format(11, "Q3_K", 256, 110, "k_quants", fallback="Q4_0", feedback=True, offered=True,
            layout=BlockLayout(108, 16, (Field(32, 2, 32), Field(0, 1, 32)), centre=4,
                scales=(Field(96, 4, 8), Field(104, 2, 4)), scale_centre=32)),
        Format(12, "Q4_K", 256, 144, "k_quants", fallback="Q5_0", limit=0.25, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(16, 4, 32),), scales=K_SCALES, low=2, minimums=K_MINIMUMS)),
        Format(13, "Q5_K", 256, 176, "k_quants", fallback="Q5_1", limit=0.12, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(48, 4, 32), Field(16, 1, 32)), scales=K_SCALES, low=2,
            minimums=K_MINIMUMS)),
        Format(14, "Q6_K", 256, 210, "k_quants", fallback="Q8_0", limit=0.06, feedback=True, offered=True,
            layout=BlockLayout(208, 16, (Field(0, 4, 64), Field(128, 2, 32)), centre=32, scales=(Field(192, 8),),
                scale_type="int8")),
        Format(16, "IQ2_XXS", 256, 66, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(0, 32, grid=8, parts=(("codes", 2), ("scales", 6)))),
        Format(17, "IQ2_XS", 256, 74, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(0, 16, grid=8, parts=(("codes", 2), ("scales", 66)))),
        Format(18, "IQ3_XXS", 256, 98, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(0, 32, grid=4, parts=(("codes", 2), ("scales", 66)))),
        Format(19, "IQ1_S", 256, 50, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(0, 32, grid=8, parts=(("codes", 2), ("scales", 34)))),
        Format(20, "IQ4_NL", 32, 18, "blocks_of_32", limit=0.25, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(2, 4, 16),), values=IQ4_VALUES)),
        Format(21, "IQ3_S", 256, 110, "iq", fallback="IQ4_NL",
            layout=BlockLayout(0, 32, grid=4, parts=(("codes", 2), ("high", 66), ("signs", 74), ("scales", 106)))),
        Format(22, "IQ2_S", 256, 82, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(0, 16, grid=8, parts=(("codes", 2), ("signs", 34), ("high", 66), ("scales", 74)))),
        Format(23, "IQ4_XS", 256, 136, "k_quants", fallback="IQ4_NL", limit=0.25, feedback=True, offered=True,
            layout=BlockLayout(0, 32, (Field(8, 4, 16),), values=IQ4_VALUES, scales=(Field(4, 4), Field(2, 2)),
                scale_centre=32)),
        Format(24, "I8", 1, 1),
        Format(25, "I16", 1, 2),
        Format(26, "I32", 1, 4),
        Format(27, "I64", 1, 8),
        Format(28, "F64", 1, 8),
        Format(29, "IQ1_M", 256, 56, "iq", fallback="IQ4_NL", poor=True,
            layout=BlockLayout(None, 16, grid=8, parts=(("codes", 0), ("high", 32), ("scales", 48)))),
        Format(30, "BF16", 1, 2, limit=1e-2),
        Format(34, "TQ1_0", 256, 54, "low_bits", fallback="Q4_0", layout=BlockLayout(52, 256)),
        Format(35, "TQ2_0", 256, 66, "low_bits", fallback="Q4_0", layout=BlockLayout(64, 256, (Field(0, 2, 32),),
        centre=1)),
        Format(39, "MXFP4", 32, 17, "blocks_of_32", feedback=True,
            layout=BlockLayout(None, 32, (Field(1, 4, 16),), values=DOUBLED_E2M1, scales=(Field(0, 8),),
            scale_type="e8m0")),
        Format(40, "NVFP4", 64, 36, "nvfp4",
            layout=BlockLayout(None, 16, (Field(4, 4, 8),), values=DOUBLED_E2M1, scales=(Field(0, 8),),
            scale_type="ue4m3")),
        Format(41, "Q1_0", 128, 18, "low_bits", feedback=True, layout=BlockLayout(0, 128, (Field(2, 1),), centre=1,
        step=2)),
        Format(42, "Q2_0", 64, 18, "low_bits", fallback="Q4_0", feedback=True,
            layout=BlockLayout(0, 64, (Field(2, 2),), centre=1)),
    ]
}  # fmt: skip

BY_NAME: dict[str, Format] = {format.name: format for format in FORMATS.values()}
LAYOUTS: dict[str, BlockLayout] = {format.name: format.layout for format in FORMATS.values() if format.layout}
UNKNOWN_TO_GGUF = ("Q1_0", "Q2_0")  # formats that `gguf` 0.19 cannot dequantize: their layouts do


def list_float_offsets(name: str) -> tuple[int, ...]:
    """Return the offsets of a block's float16 values: d, and low if there is one."""
    layout = LAYOUTS[name]
    return tuple(at for at in (layout.d, layout.low) if at is not None)


class Recipe(NamedTuple):
    """A file type of llama.cpp, such as Q4_K_M; recipes.py has its rules for single tensors."""

    number: int  # general.file_type
    name: str
    base: str  # the format of most matrices
    group: str = ""  # its line in the help of `quantize`
    ladder: str = ""  # whether --ladder writes it: "always", with "imatrix" only, or ""


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in [
        Recipe(0, "F32", "F32", "32 to 16 bits"),
        Recipe(1, "F16", "F16", "32 to 16 bits"),
        Recipe(32, "BF16", "BF16", "32 to 16 bits"),
        Recipe(7, "Q8_0", "Q8_0", "8 to 5 bits", "always"),
        Recipe(18, "Q6_K", "Q6_K", "8 to 5 bits", "always"),
        Recipe(17, "Q5_K_M", "Q5_K", "8 to 5 bits", "always"),
        Recipe(16, "Q5_K_S", "Q5_K", "8 to 5 bits", "always"),
        Recipe(9, "Q5_1", "Q5_1", "8 to 5 bits"),
        Recipe(8, "Q5_0", "Q5_0", "8 to 5 bits"),
        Recipe(15, "Q4_K_M", "Q4_K", "4 bits", "always"),
        Recipe(14, "Q4_K_S", "Q4_K", "4 bits", "always"),
        Recipe(3, "Q4_1", "Q4_1", "4 bits"),
        Recipe(2, "Q4_0", "Q4_0", "4 bits"),
        Recipe(25, "IQ4_NL", "IQ4_NL", "4 bits", "always"),
        Recipe(30, "IQ4_XS", "IQ4_XS", "4 bits", "always"),
        Recipe(38, "MXFP4", "MXFP4", "4 bits"),
        Recipe(13, "Q3_K_L", "Q3_K", "3 and 2 bits", "always"),
        Recipe(12, "Q3_K_M", "Q3_K", "3 and 2 bits", "always"),
        Recipe(11, "Q3_K_S", "Q3_K", "3 and 2 bits", "always"),
        Recipe(10, "Q2_K", "Q2_K", "3 and 2 bits", "always"),
        Recipe(21, "Q2_K_S", "Q2_K", "3 and 2 bits"),
        Recipe(27, "IQ3_M", "IQ3_S", "with --imatrix", "always"),
        Recipe(26, "IQ3_S", "IQ3_S", "with --imatrix"),
        Recipe(22, "IQ3_XS", "IQ3_S", "with --imatrix", "imatrix"),
        Recipe(23, "IQ3_XXS", "IQ3_XXS", "with --imatrix", "imatrix"),
        Recipe(29, "IQ2_M", "IQ2_S", "with --imatrix", "imatrix"),
        Recipe(28, "IQ2_S", "IQ2_XS", "with --imatrix"),
        Recipe(20, "IQ2_XS", "IQ2_XS", "with --imatrix"),
        Recipe(19, "IQ2_XXS", "IQ2_XXS", "with --imatrix"),
        Recipe(31, "IQ1_M", "IQ1_M", "with --imatrix"),
        Recipe(24, "IQ1_S", "IQ1_S", "with --imatrix"),
        Recipe(37, "TQ2_0", "TQ2_0", "ternary"),
        Recipe(36, "TQ1_0", "TQ1_0", "ternary"),
        Recipe(41, "Q2_0", "Q2_0", "simple"),
        Recipe(40, "Q1_0", "Q1_0", "simple"),
    ]
}
