"""Diffusion models: LLaDA (Nie et al. 2025, arXiv 2502.09992), Dream (Ye et al. 2025, arXiv 2508.15487), RND1.

They fill masked positions instead of continuing a text. LLaDA-MoE and RND1 (Radical Numerics 2025) have experts.

Unlike llama and Qwen 2 and 3, whose layers they have: attention is bidirectional.
"""

from typing import ClassVar

from localllm.arch.attention import Transformer
from localllm.arch.families import llama, qwen3
from localllm.arch.feed_forward import read_routing
from localllm.arch.metadata import Fields
from localllm.arch.verbs import FULL_ATTENTION, Activation, Builder
from localllm.arch.weights import Weights
from localllm.frozen import frozen

MIXTURES = {"llada-moe": False, "rnd1": True}  # whether experts' weights are normalized


@frozen
class Masked(Transformer):
    bidirectional: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    def lookahead(self, layer: int) -> int:
        return FULL_ATTENTION


def read(fields: Fields) -> Masked:
    """Read the hyperparameters. Raises ModelError."""
    fields.flag("attention.causal", False)
    shared = Masked.shared_fields(fields, interleaved=fields.arch == "llada", rotates_all=True)
    routing = read_routing(fields, normalized=MIXTURES.get(fields.arch, True))
    if (routing is None) != (fields.arch not in MIXTURES):
        raise fields.error(f"{fields.key('expert_count')} does not fit an {fields.arch} model")
    return Masked(**shared, routing=routing)


def forward(b: Builder, w: Weights, h: Masked) -> Activation:
    """Compute the logits of the requested tokens."""
    return (qwen3 if h.routing else llama).forward(b, w, h)
