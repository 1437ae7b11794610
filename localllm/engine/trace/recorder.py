"""Trace an architecture: record its verbs as a list of operations on activations, with all shapes checked.

The list is the same for all targets; localllm.engine.lower makes steps of it. Verbs are defined in localllm.arch.verbs;
localllm.engine.operations has the code that records them.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.weights import Weights, without_other_parts
from localllm.engine.lower.activation import Activation
from localllm.engine.operations.convolution import ConvolutionVerbs
from localllm.engine.operations.elementwise import ElementwiseVerbs
from localllm.engine.operations.experts import ExpertVerbs
from localllm.engine.operations.hidden_states import HiddenStateTap, HiddenStateVerbs
from localllm.engine.operations.operation import Operation
from localllm.engine.operations.positions import PositionVerbs
from localllm.engine.operations.registry import with_verbs
from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Oddities

if TYPE_CHECKING:
    from localllm.arch.vision.hyperparameters import Vision

# Tensors that may be in a file though no verb uses them.
HARMLESS = (".attn_rot_embd.weight", ".attn.rope_freqs")  # RoPE frequencies, which follow from the metadata


@with_verbs("record")
class Recorder(ElementwiseVerbs, ExpertVerbs, ConvolutionVerbs, PositionVerbs, HiddenStateVerbs):
    """A builder (localllm.arch.verbs) whose verbs record operations.

    Attributes:
        encoding: operations of the encoder, if there is one.
    """

    def __init__(
        self, hyperparameters: "Hyperparameters | Vision", context: int, hidden_state_tap: HiddenStateTap | None = None
    ):
        """Begin a trace; context: the most tokens of a sequence.  hidden_state_tap: the hidden states to export."""
        super().__init__(hyperparameters.vocab_size, hyperparameters.width, context)
        self.encoding = list[Operation]()
        self.tap(hidden_state_tap)

    def use(self, recorder: "Recorder") -> None:
        """Count the tensors of another part of the model as used."""
        self._used |= recorder._used

    def require_all_used(self, names: Collection[str], oddities: Oddities | None = None) -> None:
        """Raise ModelError for a tensor that no verb has used.

        oddities: collects unused parts that are not of the language model, such as encoders, and cause no error.
        """
        unused = [name for name in names if name not in self._used and not name.endswith(HARMLESS)]
        if unused := unused if oddities is None else without_other_parts(unused, oddities):
            more_tensors = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise ModelError(
                f"tensor {printable(unused[0])}{more_tensors}: not part of this architecture as localllm supports it"
            )


def trace_model(
    file: GGUFFile, forward: Callable[..., Activation], weights: Weights, hyperparameters: Hyperparameters,
    context: int, hidden_state_tap: HiddenStateTap | None = None,
) -> Recorder:  # fmt: skip
    """Trace an architecture for a file; hidden_state_tap: see Recorder.

    Raises ModelError, which names the file, for tensors that do not fit or are not used.
    """
    recorder = Recorder(hyperparameters, context, hidden_state_tap)
    try:
        if hyperparameters.encode:
            encoder = Recorder(hyperparameters, context)
            hyperparameters.encode(encoder, weights, hyperparameters)
            recorder.encoding = encoder.operations
            recorder.use(encoder)
        logits = forward(recorder, weights, hyperparameters)
        recorder.require_all_used(file.tensors, file.oddities)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None
    if not hyperparameters.pooling and logits.columns != hyperparameters.vocab_size:
        raise ModelError(f"{file.path}: logits for {logits.columns} tokens instead of {hyperparameters.vocab_size}")
    return recorder
