"""Falcon H1 (TII 2025, arXiv 2507.22448).

Unlike llama: every layer has Mamba 2 beside attention, with the same input; rotated pairs are half a head apart.
"""

from collections.abc import Sequence

from localllm.arch.attention import TransformerHyperparameters, attend, project_qkv
from localllm.arch.decoder import compute_logits
from localllm.arch.families.mamba2 import Mamba2Sizes, apply_mamba2, read_mamba2_sizes
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


@frozen
class FalconH1Hyperparameters(TransformerHyperparameters):
    space: Mamba2Sizes

    def pair_states(self) -> list[tuple[PagedState, RecurrentLayerState]]:
        """Pair each layer's KV state with Mamba 2's state."""
        return [(state, self.space.get_state(state.layer)) for state in super().list_states()]

    def list_states(self) -> Sequence[PagedState | RecurrentLayerState]:  # type: ignore[override]
        return [state for pair in self.pair_states() for state in pair]


def read(fields: HyperparameterReader) -> FalconH1Hyperparameters:
    return FalconH1Hyperparameters(
        **FalconH1Hyperparameters.read_shared_fields(fields, interleaved=False), space=read_mamba2_sizes(fields)
    )


def forward(b: Builder, w: Weights, h: FalconH1Hyperparameters) -> Activation:
    x = b.embed(w.token_embd, b.ids)
    for paged, recurrent in h.pair_states():
        x = block(b, w.get_layer(paged.layer), h, paged, recurrent, x)
    return compute_logits(b, w, h, x)


def block(
    b: Builder, w: Weights, h: FalconH1Hyperparameters, paged: PagedState, recurrent: RecurrentLayerState, x: Activation
) -> Activation:
    y = b.rms_norm(x, w.attn_norm, h.epsilon)
    attended = b.linear(attend(b, h, paged, *project_qkv(b, w, h, paged.layer, y)), w.attn_output)
    x = b.add(x, b.add(attended, apply_mamba2(b, w, h.space, h.epsilon, recurrent, y)))
    return b.add(x, apply_gated_feed_forward(b, w, b.rms_norm(x, w.require_exact("ffn_norm"), h.epsilon), b.swiglu))


CHECKPOINTS = {
    "FalconH1ForCausalLM": {
        "layer": "norms attention @mamba.list_falcon_h1_tensors gated", "bare": "ffn_norm",
        "only": {
            "attention_bias": False, "mlp_bias": False, "projectors_bias": False, "mamba_proj_bias": False,
            "mamba_conv_bias": True,
        },
        "amounts": {"vocab_size": "vocab"}, "read": "@mamba.read_falcon_h1", "defaults": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
