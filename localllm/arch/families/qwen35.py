"""Qwen3-Next (Alibaba 2025) and Qwen 3.5 (2026), with experts or without.

Unlike Qwen 3: three layers of four have Gated DeltaNet instead of attention: a state matrix for each head, updated by
the gated delta rule (Yang et al. 2024, arXiv 2412.06464). The heads' outputs are gated in all layers.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from localllm.arch.attention import RMS_EPSILON, TransformerHyperparameters, attend, normalize_heads, read_attention
from localllm.arch.decoder import MtpOutput, apply_mtp_layer
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import Gate, apply_feed_forward_or_experts, apply_gated_shared_expert, read_routing
from localllm.arch.metadata import format_value
from localllm.arch.recurrent_verbs import HeadState
from localllm.arch.rope import add_sections


@frozen
class DeltaNetHyperparameters:
    """The heads of layers with the delta rule.

    Head i has the keys of head (i / repeat) mod `key_heads`.

    Attributes:
        taps: kernel size of the convolution before the delta rule.
    """

    heads: int
    key_heads: int
    repeat: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    def get_state(self, layer: int) -> RecurrentLayerState:
        """Return a layer's state: the heads' matrices, and the last queries, keys and values."""
        windows = [(self.taps - 1, columns) for columns in self.parts]
        return RecurrentLayerState(layer, (*windows, (self.heads, self.key_dim, self.value_dim)))


@frozen
class Qwen35Hyperparameters(TransformerHyperparameters):
    """The hyperparameters of Qwen 3.5.

    Attributes:
        attends: by layer, whether it has attention instead of the delta rule.
    """

    delta: DeltaNetHyperparameters
    attends: tuple[bool, ...]
    score_scale: float

    @property
    def scale(self) -> float:
        return self.score_scale

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the state of each layer: keys and values, or the delta rule's."""
        return [s if self.attends[s.layer] else self.delta.get_state(s.layer) for s in super().list_states()]


def read(fields: HyperparameterReader) -> Qwen35Hyperparameters:
    common, attention = fields.read_common_fields(), read_attention(fields, interleaved=False)
    return Qwen35Hyperparameters(
        **common,
        attention=replace(attention, rope=add_sections(fields, attention.rope, interleaved=True)),
        epsilon=fields.read_epsilon(RMS_EPSILON),
        delta=read_delta_net(fields),
        attends=read_attention_layers(fields, common["layers"]) + (True,) * common["mtp_layers"],
        score_scale=fields.read_number("attention.scale", 0.0) or attention.head_dim**-0.5,
        routing=read_routing(fields, scale=fields.read_number("expert_weights_scale", 0.0) or 1.0),
    )


def read_delta_net(fields: HyperparameterReader) -> DeltaNetHyperparameters:
    """Read the ssm.* keys. In Qwen3-Next, heads that share keys are neighbours. Raises ModelError."""
    heads, key_heads = fields.read_count("ssm.time_step_rank"), fields.read_count("ssm.group_count")
    inner = fields.read_count("ssm.inner_size")
    if inner % heads or heads % key_heads:
        raise fields.make_error(
            f"ssm.inner_size {inner} must be divisible by ssm.time_step_rank {heads}, and that by ssm.group_count "
            f"{key_heads}"
        )
    repeat = heads // key_heads if fields.arch == "qwen3next" else 1
    key_dim, taps = fields.read_count("ssm.state_size"), fields.read_count("ssm.conv_kernel")
    return DeltaNetHyperparameters(heads, key_heads, repeat, key_dim, inner // heads, taps)


def read_attention_layers(fields: HyperparameterReader, layers: int, interval: int = 4) -> tuple[bool, ...]:
    """Read which layers have attention: the last one of every period, or those listed.

    Raises ModelError.
    """
    recurrent, name = fields.read_raw("attention.recurrent_layers"), "attention.recurrent_layers"
    if isinstance(recurrent, np.ndarray):
        return tuple(not value for value in recurrent[:layers])
    if recurrent is not None:
        raise fields.make_error(f"{fields.format_key(name)} must be a list of layers (found {format_value(recurrent)})")
    interval = fields.read_count("full_attention_interval", interval)
    return tuple((layer + 1) % interval == 0 for layer in range(layers))


def block(
    b: Builder, w: Weights, h: Qwen35Hyperparameters, state: PagedState | RecurrentLayerState, x: Activation
) -> Activation:
    mix = apply_delta_net if isinstance(state, RecurrentLayerState) else apply_gated_attention
    x = b.add(x, mix(b, w, h, state, b.rms_norm(x, w.attn_norm, h.epsilon)))  # type: ignore[arg-type]
    y = b.rms_norm(x, w.post_attention_norm, h.epsilon)
    return b.add(x, apply_feed_forward_or_experts(b, w, h.routing, y, b.swiglu, apply_gated_shared_expert))


def draft(b: Builder, w: Weights, h: Qwen35Hyperparameters, hidden: Activation) -> MtpOutput:
    return apply_mtp_layer(b, w, h, hidden, block)


def apply_gated_attention(
    b: Builder,
    w: Weights,
    h: Qwen35Hyperparameters,
    state: PagedState,
    x: Activation,
    selected: Activation | None = None,
) -> Activation:
    """Compute the heads' gated outputs.

    A gate follows each head's query. selected: see Scores.chosen.
    """
    queries, head_dim = b.linear(x, w.attn_q), h.attention.head_dim
    q, gate = (b.slice_columns(queries, first, first + head_dim, 2 * head_dim) for first in (0, head_dim))
    q, k = normalize_heads(b, w, h, q, b.linear(x, w.attn_k))
    y = attend(b, h, state, q, k, b.linear(x, w.attn_v), chosen=selected)
    return b.linear(b.multiply(y, b.sigmoid(gate)), w.attn_output)


def apply_delta_net(
    b: Builder,
    w: Weights,
    h: Qwen35Hyperparameters,
    state: RecurrentLayerState,
    x: Activation,
    gate: Gate | None = None,
) -> Activation:
    """Compute the heads' outputs, normalized and gated.

    gate: the activation, b.swiglu if None.
    """
    d, parts = h.delta, zip(w.attn_qkv.split(*h.delta.parts), w.ssm_conv1d.split(*h.delta.parts), strict=True)
    q, k, v = (b.convolve(b.linear(x, part), taps, state, number) for number, (part, taps) in enumerate(parts))
    q = b.scale(normalize_to_unit(b, h, q), d.key_dim**-0.5)
    strength, steps = compute_strengths_and_decays(b, w, d, x)
    w.require_biases("ssm_dt")
    steps, strength = b.softplus(steps, w.get_bias("ssm_dt")), b.sigmoid(strength)
    heads = HeadState(state, 3, w.require_exact("ssm_a"), d.key_heads, d.repeat)
    y = b.delta_rule(q, normalize_to_unit(b, h, k), v, steps, strength, heads)
    y = b.rms_norm(y, w.ssm_norm, h.epsilon, d.value_dim)
    return b.linear((gate or b.swiglu)(b.linear(x, w.attn_gate), y), w.ssm_out)


def compute_strengths_and_decays(b: Builder, w: Weights, d: DeltaNetHyperparameters, x: Activation) -> list[Activation]:
    """Compute the heads' write strengths and decays, by one matrix each or one for both.

    A fused matrix alternates between strengths and decays for each group of heads that share keys.
    """
    if not (fused := w.get("ssm_ba", by_layer=True)):
        return [b.linear(x, w.ssm_beta), b.linear(x, w.ssm_alpha)]
    both, heads = b.linear(x, fused), d.heads // d.key_heads
    return [b.slice_columns(both, first, first + heads, 2 * heads) for first in (0, heads)]


def normalize_to_unit(b: Builder, h: Qwen35Hyperparameters, x: Activation) -> Activation:
    """Normalize heads to length 1."""
    key_dim = h.delta.key_dim
    return b.scale(b.rms_norm(x, None, h.epsilon / key_dim, key_dim), key_dim**-0.5)


CHECKPOINTS = {
    "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration": {
        "layer": "@qwen.qwen35_layer gated", "offset_norms": True, "sees": True, "named": "@qwen.rename_mtp",
        "scalings": "mrope", "partial_rope": True, "only": {"attention_bias": False, "mtp_num_hidden_layers": (0, 1)},
        "read": "@qwen.read_qwen35",
        "defaults": {
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "head_dim": 256, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 32768,
        },
    },
    "MiniCPMV4_6ForConditionalGeneration": {"like": "Qwen3_5ForCausalLM", "unread": r"(model\.)?merger\..*"},
    "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration": {
        "arch": "qwen35moe", "like": "Qwen3_5ForCausalLM", "layer": "@qwen.qwen35_layer @qwen.list_experts",
        "read": "@qwen.read_qwen35moe",
    },
    "Qwen3NextForCausalLM": {
        "arch": "qwen3next", "like": "Qwen3_5ForCausalLM", "layer": "@qwen.qwen3next_layer @qwen.list_experts",
        "sees": False, "scalings": "linear yarn", "read": "@qwen.read_qwen3next",
    },
}  # fmt: skip
