"""Correct predicted sensitivities by the measured divergence of the chosen formats.

sensitivity.py predicts a divergence as the sum of the matrices' separate ones. Here all matrices are encoded in the
chosen formats, and the divergence is measured on held-out texts: once with all of them encoded, and once for each part
of the model with that part unencoded. The difference, relative to the part's predicted divergence, corrects the harm of
its matrices, and formats are chosen again. The formats with the least measured divergence are used.
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
from localllm.quantizing.mixed_precision.sensitivity import Sensitivity, layer_of, role_group
from localllm.quantizing.original_weights import OriginalWeights
from localllm.quantizing.plan import TensorJob

ROUNDS = 3  # the most rounds of measuring and choosing
TEXTS = 8  # held-out chunks
DEPTHS = 4  # parts into which a model is divided by depth
MOST = 2.0  # the largest correction factor, and the inverse of the least one: measurements are noisy


def refine(
    calibration: Calibration,
    needs: Sequence[Sensitivity],
    choose: Callable[[Sequence[Sensitivity]], dict[str, str]],
    widener: Widener,
    threads: int,
    on_matrix: OnMatrix,
) -> tuple[dict[str, str], float]:
    """Choose formats in a few rounds; returns those that diverge least, and their divergence.

    choose: formats by sensitivities. The divergence is that of weights: inputs are not rounded.
    """
    number = 0
    checked = PlanCheck(
        calibration, widener, threads, lambda done, all, name: on_matrix(number * all + done, ROUNDS * all, name)
    )
    best, least = dict[str, str](), np.inf
    for number in range(ROUNDS):
        formats = choose(needs)
        if formats == best:
            break
        measured = checked.divergence(formats)
        if best and measured >= least:
            break
        best, least = formats, measured
        if number + 1 < ROUNDS:
            needs = correct_harm(needs, formats, checked.contribution)
    return best, least


def correct_harm(
    needs: Sequence[Sensitivity], formats: Mapping[str, str], contribution: Callable[[Collection[str]], float]
) -> list[Sensitivity]:
    """Scale the harm of matrices by what the parts of the model, by role and by depth, contribute.

    contribution: divergence that the matrices of these names cause in the formats.
    """
    layers = 1 + max((layer_of(need.name) or 0) for need in needs)

    def depth_of(name: str) -> int:
        return (layer_of(name) or 0) * DEPTHS // layers

    factors = dict.fromkeys((need.name for need in needs), 1.0)
    for part_of in (role_group, depth_of):
        parts: dict[str | int, list[Sensitivity]] = {}
        for need in needs:
            # Matrices outside layers have a role but no depth.
            if part_of is role_group or layer_of(need.name) is not None:
                parts.setdefault(part_of(need.name), []).append(need)
        contributions = {part: max(contribution([need.name for need in some]), 0.0) for part, some in parts.items()}
        predicted = {
            part: sum(need.harm * need.errors[formats[need.name]] for need in some) for part, some in parts.items()
        }
        usual = sum(contributions.values()) / max(sum(predicted.values()), 1e-30)
        for part, some in parts.items():
            ratio = contributions[part] / max(predicted[part] * usual, 1e-30)
            for need in some:
                factors[need.name] *= min(max(ratio, 1 / MOST), MOST)
    return [replace(need, harm=need.harm * factors[need.name]) for need in needs]


class MatrixEncoder(ActivationCollector):
    """Encodes the matrices whose chosen formats changed.

    Attributes:
        formats: the chosen formats, by name.  blocks: the encoded matrices.
    """

    def __init__(self, jobs: Mapping[str, TensorJob], widener: Widener, threads: int, on_matrix: OnMatrix):
        super().__init__(jobs, widener, threads, lambda name: on_matrix(len(self.processed), len(self.formats), name))
        self.formats, self.blocks = dict[str, str](), dict[str, MatrixBlocks]()

    def process(self, job: TensorJob, inputs: Inputs) -> None:
        name = job.tensor.name
        self.blocks[name] = self.encode_matrix(job, inputs, self.formats[name])


class PlanCheck:
    """Measures the divergence of encoded models on held-out texts."""

    def __init__(self, calibration: Calibration, widener: Widener, threads: int, on_matrix: OnMatrix):
        self._calibration, self._widener, self._threads = calibration, widener, threads
        self._encoded = MatrixEncoder(calibration.jobs, widener, threads, on_matrix)
        self._texts = held_out_texts(calibration)
        self._base = calibration.logits(OriginalWeights(calibration.jobs, widener), self._texts, threads)

    def divergence(self, formats: Mapping[str, str]) -> float:
        """Measure with all matrices in these formats."""
        encoded, blocks = self._encoded, self._encoded.blocks
        encoded.formats = dict(formats)
        encoded.processed = {name for name in blocks if blocks[name].format == formats[name]}
        self._calibration.forward(encoded, self._calibration.select_chunks(READ), self._threads)
        self._found = self._with(blocks)
        return self._found

    def contribution(self, names: Collection[str]) -> float:
        """Measure how much the last divergence decreases with these matrices unencoded."""
        return self._found - self._with(
            {name: blocks for name, blocks in self._encoded.blocks.items() if name not in names}
        )

    def _with(self, blocks: Mapping[str, MatrixBlocks]) -> float:
        matrices = CoarseWeights(self._calibration.jobs, self._widener, blocks)
        return divergence(self._base, self._calibration.logits(matrices, self._texts, self._threads), self._threads)


def held_out_texts(calibration: Calibration) -> list[np.ndarray]:
    """Return the beginnings of chunks that were not used for choosing formats, or of all chunks if there are none."""
    read = {chunk.ctypes.data for chunk in calibration.select_chunks(READ)}  # views of them
    unread = [chunk for chunk in calibration.chunks if chunk.ctypes.data not in read] or calibration.chunks
    return [chunk[:TOKENS] for chunk in unread[:: -(-len(unread) // TEXTS)]]
