"""Choose a format for each matrix by its measured sensitivity, for a file of a given size.

Two values are measured for each matrix: the mean squared output error in each format, relative to the output, through
the second moments of its inputs, plus that of rounding the inputs to 8 bits as llama.cpp does (one scale for 256 values
where weights are in super-blocks, else for 32); and the harm of such an error: the divergence of the model's
predictions when that matrix alone is coarse. To first order the divergences of all matrices add up, so the least sum
for a size is found with a price per byte (a Lagrange multiplier): every matrix gets the format with the least
divergence + price * bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localllm.errors import UsageError
from localllm.quant.formats import BY_NAME, FORMATS
from localllm.quant.recipes import GATE, KEY, OTHER, QUERY, UP, get_role

# Formats with super-blocks first, then the others, each group by size.
OFFERED_FORMATS = sorted(
    (format for format in FORMATS.values() if format.offered), key=lambda each: (-each.block, each.bytes, each.id)
)
SHARED_ROLES = {KEY: QUERY, UP: GATE}  # roles whose harm is measured with that of another role


@dataclass
class Sensitivity:
    """The sensitivity of a matrix, or a stack of them, to its format.

    Attributes:
        weights: number of weights.  errors: by format, the relative output error of the encoded weights.
        rounding: by the number of inputs per scale, the relative output error of rounded inputs.
        harm: divergence per relative error of 1.
    """

    name: str
    weights: int
    errors: dict[str, float] = field(default_factory=dict)
    rounding: dict[int, float] = field(default_factory=dict)
    harm: float = 0.0

    def count_bytes(self, format: str) -> int:
        return self.weights // BY_NAME[format].block * BY_NAME[format].bytes

    def predict_divergence(self, format: str) -> float:
        """Return the divergence that a format causes, to first order."""
        return self.harm * (self.errors[format] + self.rounding.get(BY_NAME[format].block, 0.0))


def list_candidates(columns: int) -> Sequence[str]:
    """List the formats that fit rows of `columns` weights, the smallest first."""
    return [format.name for format in OFFERED_FORMATS if columns % format.block == 0]


def get_group(name: str) -> str:
    """Return the group whose harm is measured together with a matrix's: one role in two neighbouring layers."""
    layer, kind = parse_layer(name), get_measured_role(name)
    return name if layer is None or kind == OTHER else f"blk.{layer // 2 * 2}.{kind}"


def parse_layer(name: str) -> int | None:
    layer = re.match(r"blk\.(\d+)\.", name)
    return int(layer[1]) if layer else None


def get_measured_role(name: str) -> str:
    """Return the role that a tensor's harm is measured with, which may be another's: UP with GATE."""
    role = get_role(name)
    return SHARED_ROLES.get(role, role)


def choose_within_budget(needs: Sequence[Sensitivity], budget: int) -> dict[str, str]:
    """Choose the formats of least divergence that take at most `budget` bytes together.

    Raises UsageError if even the smallest ones take more.
    """
    least = sum(min(map(need.count_bytes, need.errors)) for need in needs)
    if budget < least:
        raise UsageError(
            f"the smallest formats take {least} bytes for the matrices, but only {budget} are left: raise --size"
        )
    low, high = 0.0, 1.0
    while sum_bytes(needs, choose_at_price(needs, high)) > budget:
        high *= 4
    for _ in range(60):
        price = (low + high) / 2
        if sum_bytes(needs, choose_at_price(needs, price)) > budget:
            low = price
        else:
            high = price
    return spend_remaining_budget(needs, choose_at_price(needs, high), budget)


def choose_at_price(needs: Sequence[Sensitivity], price: float) -> dict[str, str]:
    """Choose for each matrix the format with the least divergence + price * bytes.

    price: in units of the largest divergence.
    """
    scale = (
        max(max(map(need.predict_divergence, need.errors)) for need in needs) / max(need.weights for need in needs)
        or 1.0
    )

    def compute_cost(need: Sensitivity, name: str) -> tuple[float, int]:
        return need.predict_divergence(name) + price * scale * need.count_bytes(name), need.count_bytes(name)

    return {need.name: min(need.errors, key=lambda name: compute_cost(need, name)) for need in needs}


def spend_remaining_budget(needs: Sequence[Sensitivity], formats: dict[str, str], budget: int) -> dict[str, str]:
    """Spend the rest of the budget where it lowers the divergence most per byte; changes `formats` in place."""
    room = budget - sum_bytes(needs, formats)
    while True:
        steps = [
            (gain / added, need.name, name, added)
            for need in needs
            for name in need.errors
            if 0 < (added := need.count_bytes(name) - need.count_bytes(formats[need.name])) <= room
            and (gain := need.predict_divergence(formats[need.name]) - need.predict_divergence(name)) > 0
        ]
        if not steps:
            return formats
        _, name, format, added = max(steps)
        formats[name], room = format, room - added


def sum_bytes(needs: Sequence[Sensitivity], formats: Mapping[str, str]) -> int:
    return sum(need.count_bytes(formats[need.name]) for need in needs)


def predict_divergence(needs: Sequence[Sensitivity], formats: Mapping[str, str]) -> float:
    """Return the divergence of all matrices together, to first order."""
    return sum(need.predict_divergence(formats[need.name]) for need in needs)
