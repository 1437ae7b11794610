"""RoPE with several positions for each token (M-RoPE, Qwen2-VL 2024).

A head's pairs are divided between time, height and width of an image, and a fourth position. In text the first three
are equal, which gives ordinary RoPE; the fourth is 0, so its pairs are not rotated.
"""

from dataclasses import replace

import numpy as np

from localllm.arch.metadata import Fields, show
from localllm.arch.rope import Rope

NAME = "rope.dimension_sections"


def read_sections(fields: Fields) -> list[int] | None:
    """Read how many pairs belong to each of the four positions, None if the file has no such key. Raises ModelError."""
    if fields.raw(NAME) is None:
        return None
    sections = fields.array(NAME, "iu", "an array of whole numbers").tolist()
    if len(sections) != 4 or min(sections) < 0 or not sum(sections):
        raise fields.error(f"{fields.key(NAME)} should be four numbers, is {show(np.array(sections))}")
    return sections


def with_sections(fields: Fields, rope: Rope, interleaved: bool = False) -> Rope:
    """Return RoPE with the file's sections, or unchanged if it has none. Raises ModelError.

    interleaved: pairs alternate between the axes until an axis has used up its section (interleaved M-RoPE).
    """
    sections = read_sections(fields)
    if sections is None:
        return rope
    places = [pair % sum(sections) for pair in range(rope.dims // 2)]
    ends = [3 * sections[place % 3] if interleaved else sum(sections[:3]) for place in places]
    unrotated = tuple(pair for pair, (place, end) in enumerate(zip(places, ends, strict=True)) if place >= end)
    return replace(
        rope, unrotated=unrotated, pair_axes=tuple(axis_of(place, sections, interleaved) for place in places)
    )


def axis_of(place: int, sections: list[int], interleaved: bool) -> int:
    """Return the axis that rotates a pair: 0 for time, 1 for height, 2 for width."""
    if interleaved:
        return place % 3
    return 0 if place < sections[0] else 1 if place < sections[0] + sections[1] else 2
