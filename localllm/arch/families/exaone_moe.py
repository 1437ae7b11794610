"""K-EXAONE (LG AI Research 2026).

Unlike dots.llm1: three of four layers have a sliding window, and only they have RoPE; files may have factors for
frequencies, and MTP layers.
"""

from localllm.arch.attention import Windowed, read_windows, rope_factors
from localllm.arch.decoder import decoder
from localllm.arch.families.dots1 import block
from localllm.arch.feed_forward import read_own_routing
from localllm.arch.metadata import Fields
from localllm.arch.rope import Rope
from localllm.arch.verbs import Activation, Builder
from localllm.arch.weights import Weights
from localllm.frozen import frozen


@frozen
class EXAONEMoE(Windowed):
    def rope(self, layer: int) -> Rope | None:
        return self.attention.rope if self.windows[layer] else None


def read(fields: Fields) -> EXAONEMoE:
    """Read the hyperparameters. Raises ModelError."""
    shared = EXAONEMoE.shared_fields(fields, interleaved=False, rotates_all=True)
    return EXAONEMoE(**shared, windows=read_windows(fields, period=4), routing=read_own_routing(fields))


def forward(b: Builder, w: Weights, h: EXAONEMoE) -> Activation:
    """Compute the logits of the requested tokens."""
    return decoder(b, w, h, block, factors=rope_factors(b, w, h))
