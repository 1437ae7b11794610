"""Formats by need, checked by what they really do, and corrected.

What sensitivity.py predicts is what matrices do one by one, summed. Here all of them are encoded in the chosen
formats, and the divergence is measured on texts that no choice has seen: with all of them coarse, and with those of one
part of the model as they are. What a part does to a model that is coarse everywhere else, relative to what was
predicted, corrects the harm of its matrices, and formats are chosen again. Those that diverge least are taken.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from localllm.kernels.dequantize_rows import Widener
from localllm.quantizing.calibrate import Calibration
from localllm.quantizing.layerwise_runner import Inputs
from localllm.quantizing.mixed_precision.measure import (
    READ,
    TOKENS,
    ActivationCollector,
    CoarseWeights,
    MatrixBlocks,
    OnMatrix,
    divergence,
)
from localllm.quantizing.mixed_precision.sensitivity import Need, kind_of, layer_of
from localllm.quantizing.original_weights import Originals
from localllm.quantizing.plan import TensorJob

ROUNDS = 3  # times that formats are checked at most
TEXTS = 8  # chunks that tell
DEPTHS = 4  # parts of a model by depth
MOST = 2.0  # times that a part does more, or less, than others; what is measured is not exact


def corrected(
    calibration: Calibration,
    needs: Sequence[Need],
    choose: Callable[[Sequence[Need]], dict[str, str]],
    widener: Widener,
    threads: int,
    on_matrix: OnMatrix,
) -> tuple[dict[str, str], float]:
    """The formats that diverge least of those that are chosen in a few rounds, and how much that is.

    choose: formats by needs. The divergence is that of weights: what meets them is not rounded.
    """
    checked = PlanCheck(calibration, widener, threads, on_matrix)
    best, least = dict[str, str](), np.inf
    for number in range(ROUNDS):
        formats = choose(needs)
        if formats == best:
            break
        found = checked.divergence(formats)
        if best and found >= least:
            break
        best, least = formats, found
        if number + 1 < ROUNDS:
            needs = as_done(needs, formats, checked.done_by)
    return best, least


def as_done(
    needs: Sequence[Need], formats: Mapping[str, str], done_by: Callable[[Collection[str]], float]
) -> list[Need]:
    """Needs whose harm is corrected by what parts of the model do, those of a kind and those of a depth.

    done_by: divergence that matrices of these names make in the formats.
    """
    layers = 1 + max((layer_of(need.name) or 0) for need in needs)

    def depth_of(name: str) -> int:
        return (layer_of(name) or 0) * DEPTHS // layers

    factors = dict.fromkeys((need.name for need in needs), 1.0)
    for part_of in (kind_of, depth_of):
        parts: dict[str | int, list[Need]] = {}
        for need in needs:
            if part_of is kind_of or layer_of(need.name) is not None:  # what is in no layer is a kind of its own
                parts.setdefault(part_of(need.name), []).append(need)
        done = {part: max(done_by([need.name for need in some]), 0.0) for part, some in parts.items()}
        said = {part: sum(need.harm * need.errors[formats[need.name]] for need in some) for part, some in parts.items()}
        usual = sum(done.values()) / max(sum(said.values()), 1e-30)
        for part, some in parts.items():
            more = done[part] / max(said[part] * usual, 1e-30)
            for need in some:
                factors[need.name] *= min(max(more, 1 / MOST), MOST)
    return [replace(need, harm=need.harm * factors[need.name]) for need in needs]


class Encoded(ActivationCollector):
    """Encodes the matrices that are not yet in the formats that they should have.

    Attributes:
        formats: those, by name.  blocks: what they have become.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, threads: int, on_matrix: OnMatrix):
        super().__init__(jobs, widener, threads, lambda name: on_matrix(len(self.seen), len(self.formats), name))
        self.formats, self.blocks = dict[str, str](), dict[str, MatrixBlocks]()

    def look(self, job: TensorJob, inputs: Inputs) -> None:
        """As of ActivationCollector."""
        name = job.tensor.name
        self.blocks[name] = self.encoded(job, inputs, self.formats[name])


class PlanCheck:
    """Divergences of a model whose matrices are encoded, on texts by which nothing is chosen."""

    def __init__(self, calibration: Calibration, widener: Widener, threads: int, on_matrix: OnMatrix):
        self._calibration, self._widener, self._threads = calibration, widener, threads
        self._encoded = Encoded(calibration.jobs, widener, threads, on_matrix)
        self._texts = held_back(calibration)
        self._base = calibration.logits(Originals(calibration.jobs, widener), self._texts, threads)

    def divergence(self, formats: Mapping[str, str]) -> float:
        """With all matrices in these formats."""
        encoded, blocks = self._encoded, self._encoded.blocks
        encoded.formats = dict(formats)
        encoded.seen = {name for name in blocks if blocks[name].format == formats[name]}
        self._calibration.forward(encoded, self._calibration.some(READ), self._threads)
        self._found = self._with(blocks)
        return self._found

    def done_by(self, names: Collection[str]) -> float:
        """How much of the last divergence is gone if these matrices are as they are."""
        return self._found - self._with({name: it for name, it in self._encoded.blocks.items() if name not in names})

    def _with(self, blocks: Mapping[str, MatrixBlocks]) -> float:
        matrices = CoarseWeights(self._calibration.jobs, self._widener, blocks)
        return divergence(self._base, self._calibration.logits(matrices, self._texts, self._threads), self._threads)


def held_back(calibration: Calibration) -> list[np.ndarray]:
    """Beginnings of chunks by which nothing is chosen; of all chunks if there are no others."""
    read = {chunk.ctypes.data for chunk in calibration.some(READ)}  # views of them
    others = [chunk for chunk in calibration.chunks if chunk.ctypes.data not in read] or calibration.chunks
    return [chunk[:TOKENS] for chunk in others[:: -(-len(others) // TEXTS)]]
