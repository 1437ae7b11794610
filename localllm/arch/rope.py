"""Rotary position embedding (Su et al. 2021): the pairs of a head that it rotates, and their frequencies.

RoPE may have several positions for each token (M-RoPE, Qwen2-VL 2024): a head's pairs are divided between time, height
and width of an image, and a fourth position. In text the first three are equal, which gives ordinary RoPE; the fourth
is 0, so its pairs are not rotated.
"""

import math
from dataclasses import replace

import numpy as np

from localllm.arch.metadata import HyperparameterReader, format_value
from localllm.frozen import frozen


@frozen
class RopeParameters:
    """The rotary embedding of a layer's heads."""

    head_dim: int
    dims: int  # only the first `dims` dimensions of a head are rotated, in pairs
    interleaved: bool  # pairs are neighbours; otherwise dimension i is paired with i + dims / 2 ("neox")
    base: float = 10000.0
    factor: float = 1.0  # context length divided by the original one
    yarn: bool = False
    original_context: int = 0
    magnitude: float = 1.0  # multiplies cosine and sine
    by_factors: bool = False  # a tensor of the file must divide the frequencies (LongRoPE)
    unrotated: tuple[int, ...] = ()  # pairs that stay as they are
    pair_axes: tuple[int, ...] = ()  # the position that rotates each pair: 0 time, 1 height, 2 width
    frequency_pairs: tuple[int, ...] = ()  # for each pair, the pair whose frequency it has; (): its own
    yarn_betas: tuple[float, float] = (32.0, 1.0)  # rotations (fast, slow) between which YaRN blends
    is_inverse: bool = False  # rotate the other way, which undoes a rotation
    position_offset: int = 0  # subtracted from every position

    def compute_frequencies(self, factors: np.ndarray | None = None) -> np.ndarray:
        """Compute radians per position, float64 [dims / 2].

        YaRN (Peng et al. 2023) divides low frequencies by the factor, keeps high ones, and blends between. factors:
        divide the frequencies, float64 [dims / 2].
        """
        pairs = np.array(self.frequency_pairs or range(self.dims // 2))
        plain = self.base ** (-2.0 * pairs / self.dims)
        plain[list(self.unrotated)] = 0
        plain = -plain if self.is_inverse else plain
        if factors is not None:
            plain = plain / factors
        stretched = plain / self.factor
        if not self.yarn:
            return stretched
        low, high = self._find_pair(self.yarn_betas[0]), self._find_pair(self.yarn_betas[1])
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.dims - 1)
        keep = 1 - np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
        return stretched * (1 - keep) + plain * keep

    def remove_scaling(self, base: float) -> "RopeParameters":
        """Return a copy with another base and without scaling."""
        return replace(self, base=base, factor=1.0, yarn=False, magnitude=1.0)

    def _find_pair(self, rotations: float) -> float:
        """Return the pair (a fraction) that makes this many rotations within the original context."""
        return self.dims * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.base))


def read_rope(fields: HyperparameterReader, head_dim: int, interleaved: bool) -> RopeParameters:
    """Read the rope.* keys as llama.cpp does: a factor without a type is linear scaling.

    LongRoPE's factors are tensors (localllm.arch.attention.rope_factors), which a file of another type may have, too.
    Raises ModelError.
    """
    dims = fields.read_count("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        raise fields.make_error(f"rope.dimension_count {dims} must be even and at most the head dimension, {head_dim}")
    factor = fields.read_factor("rope.scaling.factor", fields.read_factor("rope.scale_linear", 1.0))
    kind = fields.read_raw("rope.scaling.type", "linear")
    if not isinstance(kind, str) or kind not in ("none", "linear", "longrope", "yarn"):
        raise fields.make_error(f"rope scaling {format_value(kind)} is not supported")
    base = read_base(fields, "rope.freq_base", 10000.0)
    yarn = kind == "yarn"
    if yarn and not fields.has("rope.scaling.factor"):
        raise fields.make_value_error("rope.scaling.factor", "a positive number")
    return RopeParameters(
        head_dim,
        dims,
        interleaved,
        base=base,
        factor=1.0 if kind == "none" else factor,
        yarn=yarn,
        by_factors=kind == "longrope",
        original_context=fields.read_count("rope.scaling.original_context_length", fields.read_count("context_length")),
        magnitude=fields.read_factor("rope.scaling.attn_factor", 1.0) * (compute_yarn_magnitude(factor) if yarn else 1),
    )


def read_base(fields: HyperparameterReader, name: str, default: float | None) -> float:
    """Read a base of the frequencies. Raises ModelError."""
    base = fields.read_number(name, default)
    if base <= 1:
        raise fields.make_error(f"{fields.format_key(name)} must be above 1 (found {base})")
    return base


def compute_yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """Return YaRN's attention factor, 0.1 * multiplier * ln(factor) + 1 for factors above 1 (Peng et al. 2023)."""
    return 1 + 0.1 * multiplier * math.log(max(factor, 1.0))


SECTIONS = "rope.dimension_sections"


def read_sections(fields: HyperparameterReader) -> list[int] | None:
    """Read how many pairs belong to each of the four positions; None without the key.

    Raises ModelError.
    """
    if fields.read_raw(SECTIONS) is None:
        return None
    sections = fields.read_array(SECTIONS, "iu", "an array of whole numbers").tolist()
    if len(sections) != 4 or min(sections) < 0 or not sum(sections):
        raise fields.make_error(
            f"{fields.format_key(SECTIONS)} must be four integers (found {format_value(np.array(sections))})"
        )
    return sections


def add_sections(fields: HyperparameterReader, rope: RopeParameters, interleaved: bool = False) -> RopeParameters:
    """Return a copy with the M-RoPE sections of the file; return `rope` itself if the file has none. Raises ModelError.

    interleaved: pairs alternate between the axes until an axis has used up its section (interleaved M-RoPE).
    """
    sections = read_sections(fields)
    if sections is None:
        return rope
    places = [pair % sum(sections) for pair in range(rope.dims // 2)]
    ends = [3 * sections[place % 3] if interleaved else sum(sections[:3]) for place in places]
    unrotated = tuple(pair for pair, (place, end) in enumerate(zip(places, ends, strict=True)) if place >= end)
    return replace(
        rope, unrotated=unrotated, pair_axes=tuple(select_axis(place, sections, interleaved) for place in places)
    )


def select_axis(place: int, sections: list[int], interleaved: bool) -> int:
    """Return the axis that rotates a pair: 0 for time, 1 for height, 2 for width."""
    if interleaved:
        return place % 3
    return 0 if place < sections[0] else 1 if place < sections[0] + sections[1] else 2
