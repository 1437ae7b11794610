"""The common structure of RWKV 6 and 7, and of Qwen models with RWKV's attention (QRWKV, ARWKV).

A layer interpolates each token with the previous one, and updates a state matrix for each head; then follows RWKV's
feed-forward network, which also reads the previous token, or Qwen's.
"""

from collections.abc import Callable, Sequence

from localllm.arch.attention import LAYER_EPSILON, RMS_EPSILON
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.layer_state import RecurrentLayerState
from localllm.arch.metadata import HyperparameterReader
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weight, Weights
from localllm.frozen import frozen

HEAD_EPSILON = 64e-5  # of each head's norm


@frozen
class RwkvHyperparameters(Hyperparameters):
    """The hyperparameters of RWKV.

    Attributes:
        ranks: ranks of the low-rank products for gates and decays.
        has_own_network: whether it has RWKV's feed-forward network, not Qwen's.
    """

    head_dim: int
    kv_heads: int
    epsilon: float
    has_own_network: bool
    rescale: int  # after every `rescale` layers the residual stream is halved; 0 for never
    ranks: tuple[int, ...]

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    def list_states(self) -> Sequence[RecurrentLayerState]:
        """Return each layer's state: the heads' matrices, and the last token's row for one or both sublayers."""
        last = ((1, self.width),) * (2 if self.has_own_network else 1)
        return [
            RecurrentLayerState(layer, ((self.heads, self.head_dim, self.head_dim), *last))
            for layer in range(self.layers)
        ]


def read_rwkv(fields: HyperparameterReader, ranks: Sequence[str]) -> RwkvHyperparameters:
    """Read the hyperparameters of an RWKV model. Raises ModelError.

    ranks: the metadata keys that hold the sizes of low-rank matrices.
    """
    is_rwkv, common, head_dim = (
        fields.arch.startswith("rwkv") and "qwen" not in fields.arch,
        fields.read_common_fields(),
        0,
    )
    if common["width"] % (head_dim := fields.read_count("wkv.head_size")):
        raise fields.make_error(f"embedding_length {common['width']} is not divisible by the head size {head_dim}")
    if fields.read_count("token_shift_count", 2) != 1 + is_rwkv:
        raise fields.make_error(f"{fields.format_key('token_shift_count')} must be {1 + is_rwkv}")
    heads = common["width"] // head_dim
    kv_heads = fields.read_count("attention.head_count_kv", 0) or heads
    if heads % kv_heads:
        raise fields.make_error(f"the {heads} heads are not divisible by attention.head_count_kv {kv_heads}")
    return RwkvHyperparameters(
        **common,
        head_dim=head_dim,
        kv_heads=kv_heads,
        epsilon=fields.read_epsilon(LAYER_EPSILON if is_rwkv else RMS_EPSILON),
        has_own_network=is_rwkv,
        rescale=fields.read_count("rescale_every_n_layers", 0),
        ranks=tuple(fields.read_count(name, 0) for name in ranks),
    )


Mix = Callable[[Builder, Weights, RwkvHyperparameters, RecurrentLayerState, Activation], Activation]  # a sublayer


def run_decoder(b: Builder, w: Weights, h: RwkvHyperparameters, apply_time_mix: Mix, channel_mix: Mix) -> Activation:
    """Compute the logits of the requested tokens."""
    if not h.has_own_network:
        return apply_decoder(b, w, h, apply_block, mixes=(apply_time_mix, apply_gated_network))
    w.require_biases("token_embd_norm")
    x = b.layer_norm(b.embed(w.token_embd, b.ids), w.token_embd_norm, h.epsilon)
    return apply_decoder(b, w, h, apply_block, x, make_final_layer_norm(b, w, h), mixes=(apply_time_mix, channel_mix))  # type: ignore[arg-type]


def apply_block(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation, mixes: tuple[Mix, Mix]
) -> Activation:
    """Apply one layer: two sublayers, each added to the residual stream."""
    apply_time_mix, channel_mix = mixes
    x = b.add(x, apply_time_mix(b, w, h, state, apply_norm(b, w, h, "attn_norm", x)))
    x = b.add(
        x, channel_mix(b, w, h, state, apply_norm(b, w, h, "attn_norm_2" if h.has_own_network else "ffn_norm", x))
    )
    return b.scale(x, 0.5) if h.rescale and (state.layer + 1) % h.rescale == 0 else x


def apply_norm(b: Builder, w: Weights, h: RwkvHyperparameters, name: str, x: Activation) -> Activation:
    """Apply LayerNorm, or RMSNorm as in Qwen."""
    if not h.has_own_network:
        return b.rms_norm(x, w.require(name), h.epsilon)
    w.require_biases(name)
    return b.layer_norm(x, w.require(name), h.epsilon)


def apply_gated_network(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    return apply_gated_feed_forward(b, w, x, b.swiglu)


def collect_lerps(w: Weights, h: RwkvHyperparameters, names: str) -> list[Weight]:
    """Return the interpolation weights between a token and the previous one, a vector for each of `names`.

    The file has one tensor for all, or in old files one for each.
    """
    if fused := w.get("time_mix_lerp_fused"):
        return fused.require_shape(*fused.shape[:-1], h.width).flatten().split(*[h.width] * len(names))
    return [require_vector(w, h, f"time_mix_lerp_{name}") for name in names]


def require_vector(w: Weights, h: RwkvHyperparameters, name: str) -> Weight:
    """Return a tensor as a vector [width], without its dimensions of 1."""
    weight = w.require(name)
    return weight.require_shape(*[1] * (len(weight.shape) - 1), h.width).flatten()


def apply_low_rank_linear(
    b: Builder,
    w: Weights,
    name: str,
    rank: int,
    x: Activation,
    between: Callable[[Activation], Activation] | None = None,
) -> Activation:
    """Apply a low-rank product: two matrices with the function `between` them, and a bias."""
    y = b.linear(x, w.require(f"{name}1").require_shape(rank, w.require(f"{name}1").shape[1]))
    return b.linear(between(y) if between else y, w.require(f"{name}2"))
