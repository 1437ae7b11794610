"""Every verb in plain NumPy, executed immediately: the oracle that the fast kernels are tested against.

The verbs are specified in localllm.arch.verbs. Activations are float32 [tokens, columns].
"""

from collections.abc import Sequence

import numpy as np

from localllm.engine.operations.attention import AttentionReference
from localllm.engine.operations.columns import ColumnReference
from localllm.engine.operations.computing import Observer
from localllm.engine.operations.convolution import ConvolutionReference
from localllm.engine.operations.elementwise import ElementwiseReference
from localllm.engine.operations.experts import ExpertReference
from localllm.engine.operations.hidden_states import HiddenStateReference
from localllm.engine.operations.key_selection import KeySelectionReference
from localllm.engine.operations.linear import LinearReference
from localllm.engine.operations.positions import PositionReference
from localllm.engine.operations.recurrent import RecurrentReference
from localllm.engine.operations.tokens import TokenReference
from localllm.engine.run import Span


class Reference(
    ElementwiseReference, LinearReference, AttentionReference, KeySelectionReference, ExpertReference,
    ConvolutionReference, RecurrentReference, TokenReference, PositionReference, ColumnReference, HiddenStateReference,
):  # fmt: skip
    """A builder (localllm.arch.verbs) whose verbs compute. One for each run."""

    def __init__(
        self, spans: Sequence[Span], matrices: dict[tuple[str, int], np.ndarray], context: int,
        observer: Observer | None = None,
    ):  # fmt: skip
        super().__init__(spans, matrices, context, observer)
        self.entered = {}
