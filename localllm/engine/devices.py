"""Which device computes, and how many of a model's layers a card gets."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from localllm.arch.states import State
from localllm.arch.storage import KVType
from localllm.engine.cuda_card import Card
from localllm.engine.cuda_device import NoCardError, open_card
from localllm.engine.placing import Sizes, layers_that_fit, require_room, sizes, spare
from localllm.errors import MemoryLimitError, UnsupportedError, UsageError
from localllm.files.gguf_file import GGUFFile

DEVICES = re.compile(r"cpu|auto|reference|cuda(:\d{1,3})?")


class Placed(NamedTuple):
    """A card for the last layers, or none."""

    card: Card | None
    layers: int  # how many
    spare: int = 0  # bytes that it has besides them, with one context
    warning: str | None = None  # why there is none, should that surprise


def require_device(name: str) -> None:
    """Raise UsageError for a name that means no device."""
    if not DEVICES.fullmatch(name):
        raise UsageError(f"unknown device {name!r}: use cpu, cuda, cuda:N, auto or reference")


def placed(
    device: str, wanted: int | str, file: GGUFFile, states: Sequence[State], layers: int, context: int, kv_type: KVType,
    buffers: Callable[[Sequence[State], KVType], int],
) -> Placed:  # fmt: skip
    """The card of that name, with `wanted` of the layers: a number, all, or auto for as many as it has room for.

    buffers(states, kv_type): bytes that a card needs besides weights and cache. With the device auto, the CPU computes
    what no card can, and the warning says why, if there is a driver. Raises NoCardError, MemoryLimitError,
    UnsupportedError.
    """
    automatic = device == "auto"
    if wanted == 0:
        return Placed(None, 0)
    try:
        card = open_card(int(device.partition(":")[2] or 0))
    except NoCardError as error:
        if automatic:
            return Placed(None, 0, warning=f"the CPU computes: {error}")
        raise
    try:
        needed = sizes(file.tensors, states, layers, context, kv_type, buffers(states, kv_type))
        free = card.free_bytes()
        count = layers_on(card.name, needed, wanted, free)
        return Placed(card, count, spare(needed, count, free))
    except (MemoryLimitError, UnsupportedError) as error:
        card.close()
        if automatic and wanted == "auto":
            return Placed(None, 0, warning=f"the CPU computes: {error}")
        raise


def layers_on(card: str, needed: Sizes, wanted: int | str, free: int) -> int:
    """How many layers a card gets. Raises MemoryLimitError if it has no room for them, or for any."""
    count = len(needed.layers) if wanted == "all" else wanted
    if isinstance(count, int):
        require_room(needed, min(count, len(needed.layers)), free)
        return min(count, len(needed.layers))
    if not (count := layers_that_fit(needed, free)):
        raise MemoryLimitError(f"{card} has {free / 1e9:.1f} GB free, too few for a layer of this model")
    return count
