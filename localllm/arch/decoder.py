"""The common structure of decoders: embeddings, layers, a final norm and the output matrix.

A multi-token prediction (MTP) layer, which drafts tokens (DeepSeek-V3, 2024, arXiv 2412.19437), reads a token's
embedding and the model's hidden state of the token before, and predicts the next token. To draft further tokens, it
reads its own output instead of the model's hidden state.

Models of embeddings reduce the rows of a text's tokens to one row or to scores. Sentence-BERT (Reimers and Gurevych
2019, arXiv 1908.10084) takes the mean of the rows; other models take the first or the last. Rerankers and classifiers
have a head after that, which computes scores.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any, NamedTuple

from localllm.arch.attention import TransformerHyperparameters
from localllm.arch.hyperparameters import RANK, Hyperparameters
from localllm.arch.layer_state import State
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights

NONE = "none"  # no pooling: a row for each token
KINDS = NONE, "mean", "cls", "last", RANK  # in the order of their ids in GGUF
HEAD = "cls", "cls.norm", "cls.output"  # tensors of a classification head
DENSE = "dense_2", "dense_3"  # matrices after pooling, as sentence-transformers numbers its modules


def read_pooling(fields: HyperparameterReader, name: str = "pooling_type") -> str | None:
    """Return the name of the file's pooling type; None without the key. Raises ModelError."""
    if not fields.has(name):
        return None
    number = fields.read_count(name, 0)
    if number >= len(KINDS):
        raise fields.make_value_error(name, f"a number from 0 to {len(KINDS) - 1}")
    return KINDS[number]


def note_missing_dense(fields: HyperparameterReader, names: Container[str]) -> None:
    """Record an irregularity if a file lacks the matrices that follow pooling.

    EmbeddingGemma has them, and every model whose metadata give their sizes. names: the file's tensors.
    """
    needs = [name for name in DENSE if fields.arch == "gemma-embedding" or fields.has(f"{name}_feat_in")]
    if missing := [f"{name}.weight" for name in needs if f"{name}.weight" not in names]:
        are = "are" if len(missing) > 1 else "is"
        fields.oddities.note_missing(
            f"{' and '.join(missing)} {are} missing: this file's embeddings differ from the model's, which multiplies"
            " the pooled row by these matrices; convert it again with its dense modules"
        )


def pool_texts(b: Builder, w: Weights, h: Hyperparameters, x: Activation) -> Activation:
    """Pool the tokens' normalized rows x by h.pooling to one row per text. Raises ModelError.

    Tensors of other pooling types are ignored.
    """
    rows = b.pool(x, h.classifier_pooling if h.pooling == RANK else str(h.pooling))
    if h.pooling == RANK:
        b.ignore(*(w.get(name) for name in DENSE))
        return apply_classification_head(b, w, h, rows)
    b.ignore(*(part for name in HEAD for part in (w.get(name), w.get_bias(name))))
    for name in DENSE:
        rows = b.linear(rows, matrix) if (matrix := w.get(name)) else rows
    return rows


def apply_classification_head(b: Builder, w: Weights, h: Hyperparameters, x: Activation) -> Activation:
    """Apply the classification head, which computes scores. Raises ModelError if the file has none."""
    if not (w.get("cls") or w.get("cls.output")):
        w.require("cls.output")
    if inner := w.get("cls"):
        x = b.linear(x, inner)
        if w.get("cls.output"):
            x = b.gelu_erf(x) if h.has_gelu_classifier else b.softcap(x, 1.0)  # tanh
        x = b.layer_norm(x, norm, h.classifier_epsilon) if (norm := w.get("cls.norm")) else x
    return b.linear(x, outer) if (outer := w.get("cls.output")) else x


Norm = Callable[[Activation], Activation]


def apply_decoder(
    b: Builder,
    w: Weights,
    h: Any,
    block: Callable[..., Activation],
    x: Activation | None = None,
    norm: Norm | None = None,
    **shared: Any,
) -> Activation:
    """Compute the logits of the requested tokens, float32 [wanted, vocab].

    block(b, the layer's weights, h, the layer's state, x, **shared) applies one layer. x: the first layer's input, the
    tokens' embeddings if None.  norm: the final norm, RMSNorm with output_norm if None. h has list_layer_states() and
    epsilon. Without an output matrix, the embedding matrix is used.
    """
    x = b.embed_inputs(lambda: b.embed(w.token_embd, b.ids)) if x is None else x
    for state in h.list_layer_states():
        x = block(b, w.get_layer(state.layer), h, state, b.tap_layer_input(x, state.layer), **shared)
    return compute_logits(b, w, h, b.tap_layer_input(x, h.layers), norm)


def compute_logits(b: Builder, w: Weights, h: Any, x: Activation, norm: Norm | None = None) -> Activation:
    """Compute the requested tokens' logits from the last layer's output.

    With h.pooling, compute a row for each text instead.
    """
    ignore_mtp_layers(b, w, h)
    normed = norm or (lambda x: b.rms_norm(x, w.output_norm, h.epsilon))
    if h.pooling:
        b.ignore(w.get("output"), w.get_bias("output"))
        return pool_texts(b, w, h, normed(x))
    b.ignore(w.get("cls.output"), w.get_bias("cls.output"))
    x = b.select(b.export_hidden(normed(x)), b.wanted) if b.reveals else normed(b.select(x, b.wanted))
    return b.linear(x, w.get("output") or w.token_embd)


def ignore_mtp_layers(b: Builder, w: Weights, h: Any) -> None:
    """Mark the tensors of MTP layers as used (Gloeckle et al. 2024). Raises ModelError.

    A file may lack them.
    """
    for layer in range(h.layers, h.layers + h.mtp_layers):
        if tensors := (block := w.get_layer(layer)).list_weights():
            block.require("nextn.eh_proj").require_shape(h.width, 2 * h.width)
            b.ignore(*tensors)


def make_final_layer_norm(b: Builder, w: Weights, h: TransformerHyperparameters) -> Norm:
    """Return a function that applies LayerNorm (Ba et al. 2016) as the final norm."""
    w.require_biases("output_norm")
    return lambda x: b.layer_norm(x, w.output_norm, h.epsilon)


class MtpOutput(NamedTuple):
    """The output of an MTP layer.

    Attributes:
        hidden: the hidden states of all tokens, which the next step reads instead of the model's.
        logits: logits of the requested tokens.
    """

    hidden: Activation
    logits: Activation


def apply_mtp_layer(
    b: Builder,
    w: Weights,
    h: Any,
    hidden: Activation,
    block: Callable[..., Activation],
    norm: Callable[[Activation, Weight], Activation] | None = None,
) -> MtpOutput:
    """Compute the output of the first multi-token prediction layer. Raises ModelError.

    hidden: for each token the model's hidden state of the token before it, after the final norm, float32 [tokens,
    width]. block: one layer, as for `decoder`.  norm: applied to a row with a weight, RMSNorm if None. If the layer has
    no embeddings, final norm or output matrix, the model's are used.
    """
    weights, normed = w.get_layer(h.layers), norm or (lambda x, weight: b.rms_norm(x, weight, h.epsilon))
    x = normed(b.embed(weights.get("nextn.embed_tokens") or w.token_embd, b.ids), weights.require("nextn.enorm"))
    x = b.concat_heads(x, normed(hidden, weights.require("nextn.hnorm")), 1)
    x = b.linear(x, weights.require("nextn.eh_proj").require_shape(h.width, 2 * h.width))
    x = block(b, weights, h, get_mtp_state(h), x)
    x = normed(x, weights.get("nextn.shared_head_norm") or w.output_norm)
    head = weights.get("nextn.shared_head_head") or w.get("output") or w.token_embd
    return MtpOutput(x, b.linear(b.select(x, b.wanted), head))


def get_mtp_state(h: Hyperparameters) -> State:
    """Return the state of the first MTP layer."""
    return replace(h, layers=h.layers + 1).list_states()[h.layers]


def has_mtp_layer(w: Weights, h: Hyperparameters) -> bool:
    """Return whether apply_mtp_layer can compute the file's MTP layer; it lacks Ling 2's output norm."""
    weights = w.get_layer(h.layers)
    return h.mtp_layers > 0 and weights.get("nextn.eh_proj") is not None and weights.get("layer_output_norm") is None
