"""PLaMo 2 (Preferred Networks 2024, arXiv 2509.04897).

Unlike Jamba: norms after both sublayers, too; heads of queries and keys are normalized, each with weights of its own;
Mamba's columns form heads with one decay rate each; the scan's inputs are normalized.
"""

from collections.abc import Sequence

from localllm.arch.attention import RMS_EPSILON, AttentionHyperparameters, TransformerHyperparameters, attend
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_gated_feed_forward
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.rope import read_rope

LEAST_RANK = 64  # of the time steps' projection


@frozen
class Plamo2Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of PLaMo 2.

    Attributes:
        inner, scan_heads, state_size, taps: Mamba's columns, heads, state size and convolution length.
    """

    inner: int
    scan_heads: int
    state_size: int
    taps: int

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or a convolution's last inputs and the heads' states."""
        heads = self.scan_heads, self.state_size, self.inner // self.scan_heads
        shapes = (self.taps - 1, self.inner), heads
        return [
            state if state.kv_heads else RecurrentLayerState(state.layer, shapes) for state in super().list_states()
        ]


def read(fields: HyperparameterReader) -> Plamo2Hyperparameters:
    common, head_dim = fields.read_common_fields(), fields.read_count("attention.key_length")
    heads, kv_heads = (fields.read_counts(f"attention.head_count{kv}", common["layers"], 0) for kv in ("", "_kv"))
    if any(
        bool(count) != bool(shared) or (shared and count % shared)
        for count, shared in zip(heads, kv_heads, strict=True)
    ):
        raise fields.make_error(
            f"{fields.format_key('attention.head_count')} and {fields.format_key('attention.head_count_kv')} "
            "are inconsistent"
        )
    inner, scan_heads = fields.read_count("ssm.inner_size"), fields.read_count("ssm.time_step_rank")
    if inner % scan_heads or fields.read_count("ssm.group_count", 0):
        raise fields.make_error(
            f"ssm.inner_size {inner} must be divisible by ssm.time_step_rank {scan_heads}, and ssm.group_count be 0"
        )
    if fields.read_count("attention.value_length", head_dim) != head_dim:
        raise fields.make_unsupported_error("attention.value_length must equal attention.key_length")
    return Plamo2Hyperparameters(
        **common,
        attention=AttentionHyperparameters(
            heads, kv_heads, head_dim, read_rope(fields, head_dim, interleaved=False), head_dim
        ),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        inner=inner,
        scan_heads=scan_heads,
        state_size=fields.read_count("ssm.state_size"),
        taps=fields.read_count("ssm.conv_kernel"),
    )


def block(
    b: Builder, w: Weights, h: Plamo2Hyperparameters, state: PagedState | RecurrentLayerState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    y = (
        apply_mamba_heads(b, w, h, state, y)
        if isinstance(state, RecurrentLayerState)
        else apply_attention(b, w, h, state, y)
    )
    return add_feed_forward(b, w, h, b.add(x, b.rms_norm(y, w.require_exact("post_attention_norm"), h.epsilon)))


def add_feed_forward(b: Builder, w: Weights, h: TransformerHyperparameters, x: Activation) -> Activation:
    """Apply the feed-forward network with its norms, and add the output to x."""
    y = apply_gated_feed_forward(b, w, b.rms_norm(x, w.ffn_norm, h.epsilon), b.swiglu)
    return b.add(x, b.rms_norm(y, w.require_exact("post_ffw_norm"), h.epsilon))


def apply_attention(b: Builder, w: Weights, h: Plamo2Hyperparameters, state: PagedState, x: Activation) -> Activation:
    """Compute the heads' outputs."""
    heads, shared, head_dim = h.attention.heads[state.layer], state.kv_heads, state.key_dim
    parts = w.attn_qkv.split(heads * head_dim, shared * head_dim, shared * head_dim)
    q, k, v = (b.linear(x, part) for part in parts)
    of_q, of_k = w.attn_q_norm.require_shape(heads, head_dim), w.attn_k_norm.require_shape(shared, head_dim)
    q, k = b.rms_norm(q, of_q.flatten(), h.epsilon, head_dim), b.rms_norm(k, of_k.flatten(), h.epsilon, head_dim)
    return b.linear(attend(b, h, state, q, k, v), w.attn_output)


def apply_mamba_heads(
    b: Builder, w: Weights, h: Plamo2Hyperparameters, state: RecurrentLayerState, x: Activation
) -> Activation:
    """Compute the gated outputs of Mamba's heads."""
    both, size = b.linear(x, w.ssm_in.require_shape(2 * h.inner, h.width)), h.inner // h.scan_heads
    gate, inner = b.slice_columns(both, 0, size, 2 * size), b.slice_columns(both, size, 2 * size, 2 * size)
    inner, rank = b.convolve(inner, w.ssm_conv1d, state), max(LEAST_RANK, h.width // 16)
    of_scan = [b.linear(inner, part) for part in w.ssm_x.split(h.state_size, h.state_size, rank)]
    norms = [w.require_exact(f"ssm_{name}_norm") for name in ("b", "c", "dt")]
    keys, queries, steps = (b.rms_norm(x, norm, h.epsilon) for x, norm in zip(of_scan, norms, strict=True))
    w.require_biases("ssm_dt")
    steps = b.softplus(b.linear(steps, w.ssm_dt.require_shape(h.scan_heads, rank)))
    heads = HeadState(state, 1, w.require_exact("ssm_a").require_shape(h.scan_heads), 1, h.scan_heads)
    y = b.state_space(inner, steps, keys, queries, w.require_exact("ssm_d").require_shape(h.scan_heads), heads)
    return b.linear(b.swiglu(gate, y), w.ssm_out)
