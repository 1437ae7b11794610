"""GroveMoE (Wu et al. 2025, arXiv 2508.07785).

Unlike in Qwen 3 with experts, the experts' input also goes through smaller experts, each of which belongs to a group of
experts. A smaller expert is used if an expert of its group was selected; as in llama.cpp, its weight is the score of
the expert that has its number.
"""

from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, attend, normalize_heads, project_qkv
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen
from localllm.arch.feed_forward import apply_experts, collect_expert_matrices, read_routing
from localllm.arch.verbs import Routing


@frozen
class GroveMoEHyperparameters(TransformerHyperparameters):
    """The hyperparameters of GroveMoE.

    Attributes:
        small: routing to the smaller experts.  small_scale: factor of their outputs.
    """

    small: Routing
    small_scale: float


def read(fields: HyperparameterReader) -> GroveMoEHyperparameters:
    common = GroveMoEHyperparameters.read_shared_fields(fields, interleaved=False, rotates_all=True)
    routing, together = read_routing(fields), fields.read_count("experts_per_group")
    if routing is None or routing.groups > 1 or routing.experts % together:
        raise fields.make_error(
            f"expert_count {fields.read_count('expert_count', 0)} must be divisible by experts_per_group {together}, "
            "with one expert group"
        )
    small = replace(routing, together=together, used=min(routing.used, routing.experts // together))
    return GroveMoEHyperparameters(
        **common, routing=routing, small=small, small_scale=fields.read_number("expert_group_scale")
    )


def block(b: Builder, w: Weights, h: GroveMoEHyperparameters, state: PagedState, x: Activation) -> Activation:
    assert h.routing
    q, k, v = project_qkv(b, w, h, state.layer, b.rms_norm(x, w.attn_norm, h.epsilon))
    q, k = normalize_heads(b, w, h, q, k)
    x = b.add(x, b.linear(attend(b, h, state, q, k, v), w.attn_output))
    y = b.rms_norm(x, w.ffn_norm, h.epsilon)
    logits = b.linear(y, w.ffn_gate_inp)
    y = apply_experts(b, collect_expert_matrices(b, w, h.routing.experts), b.route(logits, h.routing), y, b.swiglu)
    small = [w.ffn_gate_chexps, w.ffn_up_chexps, w.ffn_down_chexps]
    return b.add(x, b.add(y, b.scale(apply_experts(b, small, b.route(logits, h.small), y, b.swiglu), h.small_scale)))
