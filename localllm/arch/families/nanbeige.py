"""Nanbeige 4 (Nanbeige Lab 2025). Like llama, but the stack of layers may be applied several times.

Each pass has keys and values of its own; the final norm is applied between two passes, unless the file skips it.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.attention import TransformerHyperparameters, select_rope_factors
from localllm.arch.families import llama
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, Weights, frozen

MOST_LOOPS = 64  # maximum; real models have 2


@frozen
class NanbeigeHyperparameters(TransformerHyperparameters):
    """The hyperparameters of Nanbeige; attention lists the heads of all layers of all passes."""

    loops: int
    skips_norm: bool

    def list_states(self) -> Sequence[PagedState]:
        """Return the layers' states, once for each pass."""
        a = self.attention
        return [PagedState(place, kv_heads, a.head_dim, a.head_dim) for place, kv_heads in enumerate(a.kv_heads)]


def read(fields: HyperparameterReader) -> NanbeigeHyperparameters:
    h, loops = llama.read(fields), fields.read_integer("num_loops", 1, 1, MOST_LOOPS)
    attention = replace(h.attention, heads=h.attention.heads * loops, kv_heads=h.attention.kv_heads * loops)
    skips_norm = fields.read_flag("skip_loop_final_norm", False)
    return NanbeigeHyperparameters(**{**vars(h), "attention": attention}, loops=loops, skips_norm=skips_norm)


def forward(b: Builder, w: Weights, h: NanbeigeHyperparameters) -> Activation:
    x, factors = b.embed(w.token_embd, b.ids), select_rope_factors(b, w, h)
    for state in h.list_states():
        loop, layer = divmod(state.layer, h.layers)
        if loop and layer == 0 and not h.skips_norm:
            x = b.rms_norm(x, w.output_norm, h.epsilon)
        x = llama.block(b, w.get_layer(layer), h, state, x, factors)
    x = b.rms_norm(b.select(x, b.wanted), w.output_norm, h.epsilon)
    return b.linear(x, w.get("output") or w.token_embd)


CHECKPOINTS = {
    "NanbeigeForCausalLM": {
        "like": "LlamaForCausalLM", "named_as": "llama",
        "keys": {"num_loops": ("num_loops", 1), "skip_loop_final_norm": ("skip_loop_final_norm", False)},
    },
}  # fmt: skip
