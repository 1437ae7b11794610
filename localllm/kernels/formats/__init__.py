"""Block formats: device functions that read their weights, with one file per family of formats.

A family's file has

- GROUPS: its formats, by name, for the int8 kernels, which read groups of 256 weights (group_format.py explains group,
  chunk, sub-block and striped)
- SMALL_CODE_GROUPS, INTEGER_SCALE_GROUPS: other readers of the same formats, which unpack tiles of rows for prefill
- UNPACK: functions like those of scalar.py, for formats whose layout (quant/formats.py) does not list all codes

Importing this module does not import Numba.
"""

from importlib import import_module
from typing import Any

from localllm.quant.formats import BY_NAME, FORMATS, LAYOUTS

FAMILIES = {format.name: format.family for format in FORMATS.values() if format.family}


def import_family(name: str) -> Any:
    return import_module(f"localllm.kernels.formats.{FAMILIES[name]}")


def supports_int8(name: str, columns: int) -> bool:
    """Return whether int8 kernels multiply rows of `columns` weights: groups of 256, or chunks of 64.

    Only some formats have chunks.
    """
    has_chunks = name in FAMILIES and BY_NAME[name].block <= 64 and LAYOUTS[name].sub_block == 32
    return name in FAMILIES and columns % (64 if has_chunks else 256) == 0


def load_group_format(name: str, small_codes: bool = False, integer_scales: bool = False) -> Any:
    """Return a format's GroupFormat, with the smallest codes, or with integer scales if it has them."""
    module = import_family(name)
    integers = getattr(module, "INTEGER_SCALE_GROUPS", {}) if integer_scales else {}
    small = getattr(module, "SMALL_CODE_GROUPS", {}) if small_codes else {}
    return (module.GROUPS | small | integers)[name]
