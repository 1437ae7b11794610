"""N-gram embeddings, added to the residual streams in one layer (Qwen 4, 2026).

For each token, the last two tokens, the last three and so on are hashed to rows of a table (as in Svenstrup et al.
2017, arXiv 1709.03933). The concatenated rows give a key and a value. Each stream adds the gated value, and a dilated
convolution over the gated values of the last tokens. The previous tokens' ids are a recurrent state, so forks and
rewinds of a sequence keep them.
"""

from typing import Any

from localllm.arch.hyper_connections import concat_streams
from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import Activation, Builder, NgramHash
from localllm.arch.weights import Weight, Weights
from localllm.errors import ModelError
from localllm.frozen import frozen

LONGEST, MOST_HASHES, MOST_ROWS, MOST_PRODUCT = 8, 64, 1 << 31, 1 << 63
LEAST = 1e-6  # of the absolute value under a gate's root


@frozen
class NgramEmbeddingHyperparameters:
    """Hashed embeddings of n-grams of up to `length` tokens, in one layer.

    Attributes:
        dim: the width of the table.  taps: kernel size of the convolution.  hashings: one for each row of an n-gram.
        number: index of the layer's first state that belongs to the embeddings.
    """

    layer: int
    length: int
    dim: int
    taps: int
    hashings: tuple[NgramHash, ...]
    number: int

    def list_state_shapes(self, columns: int) -> list[tuple[int, ...]]:
        """Return the states' shapes: the convolution's window, and one for each previous token."""
        return [((self.taps - 1) * self.length, columns), *[(1, 1)] * (self.length - 1)]


def read_ngram_embeddings(
    fields: HyperparameterReader, attends: tuple[bool, ...], number: int
) -> NgramEmbeddingHyperparameters | None:
    """Read the ple.* keys, None for a model without them. Raises ModelError.

    number: see NgramEmbeddingHyperparameters.
    """
    if not fields.has("ple.layers") and not fields.has("ple.ngram_size"):
        return None
    layers = fields.read_array("ple.layers", "iu", "the number of one layer").tolist()
    if len(layers) != 1 or not 0 <= layers[0] < len(attends) or attends[layers[0]]:
        raise fields.make_value_error("ple.layers", "the index of one layer without attention")
    length, each, last_id = (
        fields.read_count("ple.ngram_size"),
        fields.read_count("ple.heads_per_ngram"),
        fields.vocab_size - 1,
    )
    if not 2 <= length <= LONGEST or (length - 1) * each > MOST_HASHES:
        raise fields.make_unsupported_error(f"{each} rows for each n-gram length up to {length} are not supported")
    end = fields.read_integer("ple.eos_token_id", None, 0, last_id)
    fields.read_integer("ple.image_token_id", 0, 0, last_id)  # only validated: images are not supported
    factors = read_integers(fields, "ple.layer_multipliers", length, MOST_PRODUCT // fields.vocab_size)
    sizes, firsts = (
        read_integers(fields, f"ple.head_{name}", (length - 1) * each, MOST_ROWS) for name in ("vocab_sizes", "offsets")
    )
    if min(sizes) == 0:
        raise fields.make_value_error("ple.head_vocab_sizes", "numbers above 0")
    hashings = [
        NgramHash(tuple(factors[: 2 + number // each]), size, first, end)
        for number, (size, first) in enumerate(zip(sizes, firsts, strict=True))
    ]
    dim, taps = fields.read_count("embedding_length_per_layer_input"), fields.read_count("ple.conv_kernel")
    return NgramEmbeddingHyperparameters(layers[0], length, dim, taps, tuple(hashings), number)


def read_integers(fields: HyperparameterReader, name: str, count: int, end: int) -> list[int]:
    """Read `count` integers from 0 to `end` - 1. Raises ModelError."""
    expected = f"{count} numbers from 0 to {end - 1}"
    numbers = fields.read_array(name, "iu", expected).tolist()
    if len(numbers) != count or not all(0 <= number < end for number in numbers):
        raise fields.make_value_error(name, expected)
    return numbers


def add_ngram_embeddings(
    b: Builder, tables: Weights, w: Weights, h: Any, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Add the n-gram embeddings to the streams x, [tokens, streams * width]."""
    n, columns = h.ngrams, h.streams * h.width
    embedded = embed_ngrams(b, tables, n, state)
    value = b.linear(embedded, w.ple_value.require_shape(h.width, len(n.hashings) * n.dim))
    key = normalize_streams(b, h, b.linear(embedded, w.ple_key), w.ple_norm_key.flatten())
    agreement = b.head_dots(key, normalize_streams(b, h, x, w.ple_norm_query.flatten()), h.streams)
    gates = b.sigmoid(b.signed_root(b.scale(agreement, h.width**-0.5), LEAST))
    gated = b.mix_streams(value, gates, 1)
    normed = normalize_streams(b, h, gated, w.ple_norm_conv.flatten())
    near = b.convolve(normed, w.ple_conv1d.require_shape(columns, n.taps), state, n.number, dilation=n.length)
    return b.add(x, b.add(gated, near))


def normalize_streams(b: Builder, h: Any, x: Activation, norm: Weight) -> Activation:
    """Apply RMSNorm to each stream.

    norm: [streams * width].
    """
    return b.rms_norm(x, norm.require_shape(h.streams * h.width), h.epsilon, h.width)


def embed_ngrams(b: Builder, w: Weights, n: NgramEmbeddingHyperparameters, state: RecurrentLayerState) -> Activation:
    """Look up the rows of the last two tokens, of the last three and so on, [tokens, hashings * dim]."""
    tokens = last = b.as_column(b.ids)
    for number in range(n.number + 1, n.number + n.length):
        last = b.previous(last, state, number)
        tokens = b.concat_heads(tokens, last, 1)
    table = w.per_layer_token_embd
    if table.shape[1:] != (n.dim,):
        raise ModelError(f"tensor {table.name} must have rows of length {n.dim} (found the shape {list(table.shape)})")
    return concat_streams(b, [b.embed_hashed(table, tokens, hashing) for hashing in n.hashings])
