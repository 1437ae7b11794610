"""Nemotron H (NVIDIA 2025, arXiv 2504.03624) and Nemotron 3 Nano and Super (2025), with experts.

Every layer is one of three: attention without RoPE, Mamba 2, or an ungated feed-forward network with squared ReLU.
Experts, which may read and write fewer columns, are added to a shared one.
"""

from collections.abc import Sequence

from localllm.arch.attention import (
    LAYER_EPSILON,
    RMS_EPSILON,
    TransformerHyperparameters,
    attend,
    project_qkv,
    read_attention,
)
from localllm.arch.decoder import compute_logits
from localllm.arch.families.mamba2 import Mamba2Sizes, apply_mamba2, read_mamba2_sizes
from localllm.arch.family import (
    Activation,
    Builder,
    HyperparameterReader,
    PagedState,
    RecurrentLayerState,
    RopeParameters,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import SIGMOID, apply_ungated_feed_forward, read_routing
from localllm.arch.verbs import Routing


@frozen
class NemotronHHyperparameters(TransformerHyperparameters):
    space: Mamba2Sizes
    feeds: tuple[bool, ...]  # by layer, whether it is a feed-forward network
    narrow: int  # width of the experts' inputs and outputs, 0 for the model's width

    def get_rope(self, layer: int) -> RopeParameters | None:
        return None

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        """Return the states of attention layers and of Mamba 2's; the other layers have none."""
        mixers = [state for state in super().list_states() if not self.feeds[state.layer]]
        return [state if state.kv_heads else self.space.get_state(state.layer) for state in mixers]


def read(fields: HyperparameterReader) -> NemotronHHyperparameters:
    normalized = fields.read_flag("expert_weights_norm", False)
    scale = fields.read_number("expert_weights_scale", 0.0) or 1.0
    return NemotronHHyperparameters(
        **fields.read_common_fields(),
        attention=read_attention(fields, interleaved=False, every_layer=False),
        epsilon=fields.read_epsilon(RMS_EPSILON if fields.has(RMS_EPSILON) else LAYER_EPSILON),
        routing=read_routing(fields, SIGMOID, normalized, scale),
        space=read_mamba2_sizes(fields),
        feeds=tuple(length > 0 for length in fields.read_counts("feed_forward_length", fields.read_layer_count(), 0)),
        narrow=fields.read_count("moe_latent_size", 0),
    )


def forward(b: Builder, w: Weights, h: NemotronHHyperparameters) -> Activation:
    x, states = b.embed(w.token_embd, b.ids), {state.layer: state for state in h.list_states()}
    for layer in range(h.layers):
        block = w.get_layer(layer)
        x = b.add(x, apply_mixer(b, block, h, states.get(layer), b.rms_norm(x, block.attn_norm, h.epsilon)))
    return compute_logits(b, w, h, x)


def apply_mixer(
    b: Builder, w: Weights, h: NemotronHHyperparameters, state: PagedState | RecurrentLayerState | None, x: Activation
) -> Activation:
    """Compute the output of a layer without the residual."""
    if isinstance(state, RecurrentLayerState):
        w.require("ssm_norm")
        return apply_mamba2(b, w, h.space, h.epsilon, state, x)
    if state:
        return b.linear(attend(b, h, state, *project_qkv(b, w, h, state.layer, x)), w.attn_output)
    return (
        apply_experts_and_shared(b, w, h, h.routing, x)
        if h.routing
        else apply_ungated_feed_forward(b, w, x, b.relu_squared)
    )


def apply_experts_and_shared(
    b: Builder, w: Weights, h: NemotronHHyperparameters, routing: Routing, x: Activation
) -> Activation:
    """Apply each token's experts and the shared one."""
    w.require_biases("exp_probs_b")
    choice = b.route(b.linear(x, w.ffn_gate_inp), routing, w.get_bias("exp_probs_b"))
    rows = b.gather(b.linear(x, w.ffn_latent_down) if h.narrow else x, choice)
    y = b.relu_squared(b.expert_linear(rows, w.ffn_up_exps, choice))
    y = b.scatter(b.expert_linear(y, w.ffn_down_exps, choice), choice)
    beside = b.linear(b.relu_squared(b.linear(x, w.ffn_up_shexp)), w.ffn_down_shexp)
    return b.add(b.linear(y, w.ffn_latent_up) if h.narrow else y, beside)


PLAIN = {
    "attention_bias": False, "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "use_conv_bias": True,
    "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "moe_latent_size": (),
}  # fmt: skip
EXPERTS = {
    "ffn_gate_inp": "experts width",
    "ffn_up_exps": "mixer.experts.up_proj.weight: experts expert_hidden width",
    "ffn_down_exps": "mixer.experts.down_proj.weight: experts width expert_hidden",
    "ffn_up_shexp": "shared_hidden width",
    "ffn_down_shexp": "width shared_hidden",
    "exp_probs_b.bias": "mixer.gate.e_score_correction.bias: experts",
}
CHECKPOINTS = {
    "NemotronHForCausalLM": {
        "select": "@mamba.select_nemotron_h", "layer": "attn_norm @mamba.list_nemotron_h_tensors",
        "parts": {"feeds": ("feed_forward", "")},
        "rotated": True,  # as llama.cpp's converter writes them; no score changes
        "only": PLAIN, "amounts": {"vocab_size": "vocab"}, "read": "@mamba.read_nemotron_h",
        "defaults": {
            "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mamba_num_heads": 128, "mamba_head_dim": 64,
        },
    },
    "NemotronHForCausalLM+experts": {
        "arch": "nemotron_h_moe", "like": "NemotronHForCausalLM", "parts": {"feeds": (" ".join(EXPERTS), "")},
        "tensors": EXPERTS, "only": {**PLAIN, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        "read": "@mamba.read_nemotron_h_moe",
    },
}  # fmt: skip
