"""RWKV 7 "Goose" (Peng et al. 2025, arXiv 2503.14456), and ARWKV (Lin et al. 2025), with the network of Qwen 2.5.

Unlike RWKV 6: the state is updated by a delta rule: the value at a removal key is taken out, at a rate that depends on
the token; values are interpolated with those of the first layer.
"""

from localllm.arch.family import Activation, Builder, HyperparameterReader, RecurrentLayerState, Weights
from localllm.arch.rwkv import (
    HEAD_EPSILON,
    RwkvHyperparameters,
    apply_low_rank_linear,
    collect_lerps,
    read_rwkv,
    require_vector,
    run_decoder,
)

RANKS = [f"attention.{name}_lora_rank" for name in ("decay", "iclr", "value_residual_mix", "gate")]
SLOWEST = -0.606531  # the logarithm of the fastest decay, e^-0.5
TINY = 1e-24  # epsilon of the keys' L2 norm


def read(fields: HyperparameterReader) -> RwkvHyperparameters:
    return read_rwkv(fields, RANKS)


def forward(b: Builder, w: Weights, h: RwkvHyperparameters) -> Activation:
    first: list[Activation] = []  # the values of the first layer

    def mix(b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation) -> Activation:
        return apply_time_mix(b, w, h, state, x, first)

    return run_decoder(b, w, h, mix, apply_channel_mix)


def apply_time_mix(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation, first: list[Activation]
) -> Activation:
    """Compute the heads' gated outputs."""
    previous, (decay, rate, residual, gate) = b.previous(x, state, 1), h.ranks
    xr, xw, xk, xv, xa, *xg = (b.lerp(x, previous, by) for by in collect_lerps(w, h, "rwkvag" if gate else "rwkva"))
    r, k, v = b.linear(xr, w.time_mix_receptance), b.linear(xk, w.time_mix_key), b.linear(xv, w.time_mix_value)
    decays = b.add_vector(
        apply_low_rank_linear(b, w, "time_mix_w", decay, xw, lambda y: b.softcap(y, 1.0)), w.time_mix_w0
    )
    decays = b.exponential(b.scale(b.sigmoid(decays), SLOWEST))
    a = b.sigmoid(b.add_vector(apply_low_rank_linear(b, w, "time_mix_a", rate, xa), w.time_mix_a0))
    if first:
        by = b.sigmoid(b.add_vector(apply_low_rank_linear(b, w, "time_mix_v", residual, xv), w.time_mix_v0))
        v = b.add(v, b.multiply(b.add(first[0], b.scale(v, -1.0)), by))
    else:
        first.append(v)
        rank = w.time_mix_v1.shape[0]  # of tensors that the first layer does not use
        b.ignore(
            w.time_mix_v0.require_shape(h.width),
            w.time_mix_v1.require_shape(rank, h.width),
            w.time_mix_v2.require_shape(h.width, rank),
        )
    key = b.rms_norm(b.scale_columns(k, w.time_mix_k_k), None, TINY / h.head_dim, h.head_dim)
    key = b.scale(key, h.head_dim**-0.5)
    k = b.lerp(k, b.multiply(k, a), w.time_mix_k_a)
    y = b.wkv7(r, decays, k, v, b.scale(key, -1.0), b.multiply(key, a), state, 0)
    if ln := w.get("time_mix_ln"):
        w.require_biases("time_mix_ln")
        y = b.layer_norm(y, ln.require_shape(h.width), HEAD_EPSILON, h.head_dim)
    bonus = b.head_dots(k, b.scale_columns(r, w.time_mix_r_k), h.heads)
    y = b.add(y, b.multiply_heads(v, bonus))
    if gate:
        y = b.multiply(y, apply_low_rank_linear(b, w, "time_mix_g", gate, xg[0], b.sigmoid))
    return b.linear(y, w.time_mix_output)


def apply_channel_mix(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Apply the feed-forward network."""
    x = b.lerp(x, b.previous(x, state, 2), require_vector(w, h, "channel_mix_lerp_k"))
    return b.linear(b.relu_squared(b.linear(x, w.channel_mix_key)), w.channel_mix_value)
