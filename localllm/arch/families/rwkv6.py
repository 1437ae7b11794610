"""RWKV 6 "Finch" (Peng et al. 2024, arXiv 2404.05892), and QRWKV 6 (Recursal 2024), with the network of Qwen 2.5.

The interpolation weights between a token and the previous one depend on both. In QRWKV 6, heads share keys and values,
keys are scaled by 1 - decay, and the current token has no separate weight (gated linear attention: Yang et al. 2023).
"""

from localllm.arch.family import Activation, Builder, HyperparameterReader, RecurrentLayerState, Weights
from localllm.arch.rwkv import HEAD_EPSILON, RwkvHyperparameters, collect_lerps, read_rwkv, require_vector, run_decoder

USES = "wkvrg"  # interpolated inputs: of decay, key, value, receptance, gate


def read(fields: HyperparameterReader) -> RwkvHyperparameters:
    return read_rwkv(fields, ["time_mix_extra_dim", "time_decay_extra_dim"])


def forward(b: Builder, w: Weights, h: RwkvHyperparameters) -> Activation:
    return run_decoder(b, w, h, apply_time_mix, apply_channel_mix)


def interpolate_inputs(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation
) -> list[Activation]:
    """Interpolate each token with the previous one, once for each of USES."""
    previous, rank = b.previous(x, state, 1), h.ranks[0]
    y = b.linear(
        b.lerp(x, previous, require_vector(w, h, "time_mix_lerp_x")),
        w.time_mix_w1.require_shape(len(USES) * rank, h.width),
    )
    y = b.head_linear(b.softcap(y, 1.0), w.time_mix_w2.require_shape(len(USES), h.width, rank))
    change, mixed = b.add(previous, b.scale(x, -1.0)), []
    for use, by in enumerate(collect_lerps(w, h, USES)):
        far = b.add_vector(b.slice_columns(y, use * h.width, (use + 1) * h.width), by)
        mixed.append(b.add(x, b.multiply(change, far)))
    return mixed


def apply_time_mix(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the heads' gated outputs."""
    xw, xk, xv, xr, xg = interpolate_inputs(b, w, h, state, x)
    r, k, v = b.linear(xr, w.time_mix_receptance), b.linear(xk, w.time_mix_key), b.linear(xv, w.time_mix_value)
    y = b.softcap(b.linear(xw, w.time_mix_decay_w1.require_shape(h.ranks[1], h.width)), 1.0)
    y = b.exponential(b.add_vector(b.linear(y, w.time_mix_decay_w2), w.time_mix_decay))
    decays, gate = b.exponential(b.scale(y, -1.0)), b.linear(xg, w.time_mix_gate)
    if not h.has_own_network:
        k, v = repeat_for_heads(b, h, k), repeat_for_heads(b, h, v)
        k = b.add(k, b.scale(b.multiply(k, decays), -1.0))
        y = b.gated_linear_attention(b.scale(r, h.head_dim**-0.5), k, v, decays, state, 0)
        return b.linear(b.multiply(y, b.sigmoid(gate)), w.time_mix_output)
    y = b.wkv6(r, k, v, decays, w.time_mix_first, state, 0)
    w.require_biases("time_mix_ln")
    y = b.layer_norm(y, w.time_mix_ln.require_shape(h.width), HEAD_EPSILON, h.head_dim)
    return b.linear(b.swiglu(gate, y), w.time_mix_output)


def repeat_for_heads(b: Builder, h: RwkvHyperparameters, x: Activation) -> Activation:
    """Repeat keys or values for the heads that share them."""
    every = x
    for _ in range(h.heads // h.kv_heads - 1):
        every = b.concat_heads(every, x, h.kv_heads)
    return every


def apply_channel_mix(
    b: Builder, w: Weights, h: RwkvHyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Apply the gated feed-forward network."""
    previous = b.previous(x, state, 2)
    gate = b.sigmoid(
        b.linear(b.lerp(x, previous, require_vector(w, h, "channel_mix_lerp_r")), w.channel_mix_receptance)
    )
    y = b.linear(b.lerp(x, previous, require_vector(w, h, "channel_mix_lerp_k")), w.channel_mix_key)
    return b.multiply(gate, b.linear(b.relu_squared(y), w.channel_mix_value))
