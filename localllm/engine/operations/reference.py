"""Every verb in plain NumPy, executed immediately: the oracle that the fast kernels are tested against.

The verbs are specified in localllm.arch.verbs. Activations are float32 [tokens, columns].
"""

from collections.abc import Sequence

import numpy as np

from localllm.engine.operations.computing import Observer
from localllm.engine.operations.convolution import ConvolutionReference
from localllm.engine.operations.elementwise import ElementwiseReference
from localllm.engine.operations.experts import ExpertReference
from localllm.engine.operations.hidden_states import HiddenStateReference
from localllm.engine.operations.positions import PositionReference
from localllm.engine.operations.registry import with_verbs
from localllm.engine.run import Span


@with_verbs("reference")
class Reference(ElementwiseReference, ExpertReference, ConvolutionReference, PositionReference, HiddenStateReference):
    """A builder (localllm.arch.verbs) whose verbs compute. One for each run."""

    def __init__(
        self, spans: Sequence[Span], matrices: dict[tuple[str, int], np.ndarray], context: int,
        observer: Observer | None = None,
    ):  # fmt: skip
        super().__init__(spans, matrices, context, observer)
        self.entered = {}
