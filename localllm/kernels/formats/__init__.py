"""Block formats: how each lane reads them. A row for each format: the file of its family.

A family's file has GROUPS, its formats as the int8 kernels see them (group_format.py), by name; SMALL_CODE_GROUPS and
INTEGER_SCALE_GROUPS, the same where tiles need another; and UNPACK, for formats whose codes are not all in their layout
(quant/layouts.py): functions like those of scalar.py. This file does not import Numba.
"""

from importlib import import_module
from typing import Any

from localllm.quant.formats import BY_NAME
from localllm.quant.layouts import LAYOUTS

FAMILIES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"), "blocks_of_32"),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), "k_quants"),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), "ternary"),
    **dict.fromkeys(("Q1_0", "Q2_0"), "bits"),
    "NVFP4": "nvfp4",
    **dict.fromkeys(("IQ1_S", "IQ1_M"), "iq1"),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), "iq2_iq3"),
}


def family(name: str) -> Any:
    """Return the file of a format's family."""
    return import_module(f"localllm.kernels.formats.{FAMILIES[name]}")


def supports_int8(name: str, columns: int) -> bool:
    """Return whether the int8 kernels multiply rows of `columns` weights.

    Rows should be whole groups of 256, and chunks of 64 if the format has them.
    """
    has_chunks = name in FAMILIES and BY_NAME[name].block <= 64 and LAYOUTS[name].sub_block == 32
    return name in FAMILIES and columns % (64 if has_chunks else 256) == 0


def load_group_format(name: str, small_codes: bool = False, integer_scales: bool = False) -> Any:
    """Return the format as the int8 kernels see it.

    small_codes: no scale may hide in the codes. integer_scales: scales may be integers, see GroupFormat.
    """
    found = family(name)
    integers = getattr(found, "INTEGER_SCALE_GROUPS", {}) if integer_scales else {}
    small = getattr(found, "SMALL_CODE_GROUPS", {}) if small_codes else {}
    return (found.GROUPS | small | integers)[name]
