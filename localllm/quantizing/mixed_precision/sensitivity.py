"""Which matrix needs how many bits: formats by measured need, for a file of a given size.

Of each matrix it is measured what its formats cost: the mean square of what is wrong in its output, relative to that
output, through the second moments of what it meets, and because other programs round that to 8 bits (with a scale for
256 numbers where weights are in super-blocks, else for 32); and how much the model's predictions suffer from such an
error: the divergence when that matrix alone is coarse. To first order what all matrices do adds up, so that the least
sum for a size is found by a price of a byte (Lagrange's multiplier): every matrix takes the format whose divergence and
bytes cost least together.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localllm.errors import UsageError
from localllm.quant.formats import BY_NAME
from localllm.quant.recipes import GATE, KEY, OTHER, QUERY, UP, role_of

# Formats with codebooks decode more slowly, so none are offered.
OF_SUPER_BLOCKS = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K")
OF_BLOCKS = ("Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # for rows of any 32
TOGETHER = {KEY: QUERY, UP: GATE}  # whose errors are measured together


@dataclass
class Need:
    """What is known of a matrix, or of a stack of them.

    weights: how many.  errors: by format, what is wrong in its output because of its weights, relative to it.
    rounding: because of what it meets, by the numbers that share a scale.  harm: divergence for such an error of 1.
    """

    name: str
    weights: int
    errors: dict[str, float] = field(default_factory=dict)
    rounding: dict[int, float] = field(default_factory=dict)
    harm: float = 0.0

    def bytes(self, format: str) -> int:
        return self.weights // BY_NAME[format].block * BY_NAME[format].bytes

    def cost(self, format: str) -> float:
        """The divergence that a format makes, to first order."""
        return self.harm * (self.errors[format] + self.rounding.get(BY_NAME[format].block, 0.0))


def candidates(columns: int) -> Sequence[str]:
    """The formats that are offered to rows of so many weights, the smallest first."""
    names = (*OF_SUPER_BLOCKS, *OF_BLOCKS)
    return [name for name in names if columns % BY_NAME[name].block == 0]


def group_of(name: str) -> str:
    """Matrices of one name are measured together: those of two layers."""
    layer, kind = layer_of(name), kind_of(name)
    return name if layer is None or kind == OTHER else f"blk.{layer // 2 * 2}.{kind}"


def layer_of(name: str) -> int | None:
    """The number of a tensor's layer."""
    layer = re.match(r"blk\.(\d+)\.", name)
    return int(layer[1]) if layer else None


def kind_of(name: str) -> str:
    """The role of a tensor, or of that with which it is measured."""
    role = role_of(name)
    return TOGETHER.get(role, role)


def chosen(needs: Sequence[Need], budget: int) -> dict[str, str]:
    """The formats of least divergence that take at most `budget` bytes together.

    Raises UsageError if even the smallest ones take more.
    """
    least = sum(min(map(need.bytes, need.errors)) for need in needs)
    if budget < least:
        raise UsageError(f"no formats are so small: the matrices take {least} bytes at least, and {budget} are left")
    low, high = 0.0, 1.0
    while total(needs, cheapest(needs, high)) > budget:
        high *= 4
    for _ in range(60):
        price = (low + high) / 2
        if total(needs, cheapest(needs, price)) > budget:
            low = price
        else:
            high = price
    return filled(needs, cheapest(needs, high), budget)


def cheapest(needs: Sequence[Need], price: float) -> dict[str, str]:
    """Of each the format of least divergence and bytes at a price, per byte, in units of the largest divergence."""
    scale = max(max(map(need.cost, need.errors)) for need in needs) / max(need.weights for need in needs) or 1.0

    def cost(need: Need, name: str) -> tuple[float, int]:
        return need.cost(name) + price * scale * need.bytes(name), need.bytes(name)

    return {need.name: min(need.errors, key=lambda name: cost(need, name)) for need in needs}


def filled(needs: Sequence[Need], formats: dict[str, str], budget: int) -> dict[str, str]:
    """The same, and what is left of the budget spent where it helps most per byte."""
    room = budget - total(needs, formats)
    while True:
        steps = [
            (gain / more, need.name, name, more)
            for need in needs
            for name in need.errors
            if 0 < (more := need.bytes(name) - need.bytes(formats[need.name])) <= room
            and (gain := need.cost(formats[need.name]) - need.cost(name)) > 0
        ]
        if not steps:
            return formats
        _, name, format, more = max(steps)
        formats[name], room = format, room - more


def total(needs: Sequence[Need], formats: Mapping[str, str]) -> int:
    """Bytes."""
    return sum(need.bytes(formats[need.name]) for need in needs)


def predicted(needs: Sequence[Need], formats: Mapping[str, str]) -> float:
    """The divergence of all together, to first order."""
    return sum(need.cost(formats[need.name]) for need in needs)
