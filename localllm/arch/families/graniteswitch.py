"""Granite Switch (IBM 2026): Granite 4.1 with LoRA adapters in the file, switched on by tokens.

Unlike granite: every matrix has a low-rank one for each adapter (LoRA, Hu et al. 2021, arXiv 2106.09685); number 0, of
zeros, stands for none. Each adapter has a control token, which another token replaces as the model's input. An
attention head without weights finds the last control token: queries are 1, keys are large for control tokens and small
for others, values are the adapters' numbers. Its output, rounded, is the number of the token's adapter.
"""

from collections.abc import Sequence

import numpy as np

from localllm.arch.attention import attend, select_rope_factors
from localllm.arch.decoder import compute_logits
from localllm.arch.families.granite import GraniteHyperparameters, read_scales
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    Choice,
    HyperparameterReader,
    PagedState,
    Weight,
    Weights,
    frozen,
)
from localllm.arch.verbs import Routing
from localllm.files.gguf.file import Tensor
from localllm.quant.formats import BY_NAME

LOOKING = 16  # length of the head that finds the control token; only its first number is used
UP = 1 + 2**-23  # factor by which a number halfway between two adapters is rounded up
MOST = 4096


@frozen
class GraniteSwitchHyperparameters(GraniteHyperparameters):
    """The hyperparameters of Granite Switch.

    Attributes:
        tokens: each adapter's control token.  instead: the token that replaces it.
        gain: the absolute value of keys in the head that finds the control token.
    """

    tokens: tuple[int, ...]
    instead: tuple[int, ...]
    rank: int
    gain: float

    def list_states(self) -> Sequence[PagedState]:
        return [*super().list_states(), PagedState(self.layers, 1, LOOKING, LOOKING)]


def read(fields: HyperparameterReader) -> GraniteSwitchHyperparameters:
    common = GraniteSwitchHyperparameters.read_shared_fields(fields, interleaved=True, rotates_all=True)
    count, lists = fields.read_count("adapters.count"), []
    for name in ("adapters.token_ids_activate", "adapters.token_ids_substitute"):
        ids = fields.read_array(name, "iu", f"{count} tokens").tolist()
        if len(ids) != count or count > MOST or not all(0 <= token < fields.vocab_size for token in ids):
            raise fields.make_value_error(name, f"{count} token ids up to {fields.vocab_size - 1}")
        lists.append(tuple(ids))
    if len({*lists[0]}) < count:
        raise fields.make_error(
            f"{fields.format_key('adapters.token_ids_activate')} must have a different token for each adapter"
        )
    scales = read_scales(fields, common["attention"].head_dim)
    if scales["routing"]:
        raise fields.make_error(f"{fields.format_key('expert_count')} must be 0")
    gain = fields.read_factor("adapters.router_gain", 15.0)
    return GraniteSwitchHyperparameters(
        **common,
        **scales,
        tokens=lists[0],
        instead=lists[1],
        rank=fields.read_count("adapters.lora_rank"),
        gain=gain,
        logit_scale=fields.read_factor("logit_scale"),
    )


def forward(b: Builder, w: Weights, h: GraniteSwitchHyperparameters) -> Activation:
    replaced = np.arange(h.vocab_size)
    replaced[[*h.tokens]] = h.instead
    x = b.scale(b.embed(w.token_embd, b.replace_ids(b.ids, replaced)), h.embedding_scale)
    choice, factors = select_adapters(b, h), select_rope_factors(b, w, h)
    for state in h.list_states()[:-1]:
        layer = w.get_layer(state.layer)
        y = b.rms_norm(x, layer.attn_norm, h.epsilon)
        sizes = (h.attention.heads[state.layer], state.kv_heads, state.kv_heads)
        parts = layer.attn_qkv.split(*(heads * state.key_dim for heads in sizes))
        q, k, v = (
            apply_linear_with_adapter(b, layer, h, choice, y, part, f"attn_{name}")
            for part, name in zip(parts, "qkv", strict=True)
        )
        y = attend(b, h, state, q, k, v, factors)
        y = apply_linear_with_adapter(b, layer, h, choice, y, layer.attn_output, "attn_output")
        x = b.add(x, b.scale(y, h.residual_scale))
        y = b.rms_norm(x, layer.ffn_norm, h.epsilon)
        gate, up = (
            apply_linear_with_adapter(b, layer, h, choice, y, layer.require(name), name)
            for name in ("ffn_gate", "ffn_up")
        )
        y = apply_linear_with_adapter(b, layer, h, choice, b.swiglu(gate, up), layer.ffn_down, "ffn_down")
        x = b.add(x, b.scale(y, h.residual_scale))
    return b.scale(compute_logits(b, w, h, x), 1 / h.logit_scale)


def select_adapters(b: Builder, h: GraniteSwitchHyperparameters) -> Choice:
    """Select each token's adapter: the head's output, rounded to an index."""
    numbers = np.zeros(h.vocab_size, np.int64)
    numbers[[*h.tokens]] = np.arange(1, len(h.tokens) + 1)
    adapter_ids, slots = b.replace_ids(b.ids, numbers), np.arange(len(h.tokens) + 1)
    q, k, v = (
        b.embed_kinds(make_table(name, first, LOOKING), adapter_ids)
        for name, first in (("query", slots * 0 + 1), ("key", np.where(slots > 0, h.gain, -h.gain)), ("value", slots))
    )
    mean = b.attend(q, k, v, h.list_states()[-1], AttentionScores(1, 1.0))
    means = b.linear(b.scale(mean, UP), make_table("every", slots * 0 + 1, LOOKING))
    away = b.add_vector(means, -slots.astype(np.float32))
    return b.route(b.scale(b.multiply(away, away), -1.0), Routing(len(slots), 1))


def make_table(name: str, first: np.ndarray, columns: int) -> Weight:
    """Make a matrix of `columns` columns: the first is `first`, the others are zeros."""
    values = np.zeros((len(first), columns), np.float32)
    values[:, 0] = first
    return Weight(Tensor(f"adapters.{name}", BY_NAME["F32"], values.shape, values.view(np.uint8)))


def apply_linear_with_adapter(
    b: Builder, w: Weights, h: GraniteSwitchHyperparameters, choice: Choice, x: Activation, matrix: Weight, name: str
) -> Activation:
    """Multiply x by a matrix, and add the product with the LoRA matrices of the token's adapter."""
    low, high = w.require_exact(f"{name}.lora_a"), w.require_exact(f"{name}.lora_b")
    slots = len(h.tokens) + 1
    low.require_shape(slots, h.rank, matrix.shape[1])
    high.require_shape(slots, matrix.shape[0], h.rank)
    y = b.expert_linear(b.expert_linear(b.gather(x, choice), low, choice), high, choice)
    return b.add(b.linear(x, matrix), b.scatter(y, choice))
