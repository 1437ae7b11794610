"""EmbeddingGemma (Schechter Vera et al. 2025, arXiv 2509.20354).

Unlike Gemma 3: attention is bidirectional, windows reach as far ahead as back; two matrices may follow the mean.
"""

from dataclasses import fields as dataclass_fields
from typing import ClassVar

from localllm.arch.encoder import behind, lookahead, own_pooling
from localllm.arch.families import gemma3
from localllm.arch.families.gemma3 import Gemma3
from localllm.arch.family import Activation, Builder, Fields, Weights, frozen


@frozen
class EmbeddingGemma(Gemma3):
    bidirectional: ClassVar[bool] = True

    def window(self, layer: int) -> int | None:
        return behind(self.windows[layer])

    def lookahead(self, layer: int) -> int:
        return lookahead(self.windows[layer])


def read(fields: Fields) -> EmbeddingGemma:
    h = gemma3.read(fields)
    values = {field.name: getattr(h, field.name) for field in dataclass_fields(h)}
    return EmbeddingGemma(**{**values, "pooling": own_pooling(fields)})


def forward(b: Builder, w: Weights, h: EmbeddingGemma) -> Activation:
    return gemma3.forward(b, w, h)


CHECKPOINTS = {
    "Gemma3TextModel": {
        "like": "Gemma3ForCausalLM", "whole": {"output_norm": "width"}, "decodes": False, "prefixes": "model.",
        "projects": True, "sees": False, "only": {"tie_word_embeddings": True, "sliding_window_pattern": 6},
        "keys": {"sliding_window": "attention.sliding_window"}, "read": "@gemma.gemma_embedding",
    },
}  # fmt: skip
