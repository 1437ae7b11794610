"""dots.note 3 (rednote 2026).

Unlike DeepSeek-V3.2: most layers have a sliding window instead of an indexer, and have latent rows, heads and RoPE of
their own; the rotated key is normalized; a gate for each head.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.arch.attention import RMS_EPSILON, read_windows, scale_heads
from localllm.arch.decoder import compute_logits
from localllm.arch.families.deepseek2 import DeepSeek2Hyperparameters, project_low_rank_queries
from localllm.arch.families.deepseek32 import (
    TYPES,
    IndexerHyperparameters,
    attend_to_selected,
    find_index_state,
    read_indexer,
    select_indexed_keys,
)
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    LatentState,
    Weights,
    frozen,
)
from localllm.arch.feed_forward import apply_feed_forward_or_experts, apply_shared_expert, read_file_routing
from localllm.arch.rope import read_base, read_rope
from localllm.arch.verbs import Routing


@frozen
class Dots3NoteHyperparameters(Hyperparameters):
    epsilon: float
    routing: Routing | None
    latent: tuple[DeepSeek2Hyperparameters, ...]  # of each layer
    windows: tuple[int | None, ...]
    indexer: IndexerHyperparameters

    def list_states(self) -> Sequence[LatentState]:
        sizes = [(h.latent + h.rope.dims, h.latent) for h in self.latent]
        latents = [
            LatentState(n, *size, window) for n, (size, window) in enumerate(zip(sizes, self.windows, strict=True))
        ]
        return [*latents, *self.indexer.list_states()]


def read(fields: HyperparameterReader) -> Dots3NoteHyperparameters:
    common, epsilon = fields.read_common_fields(), fields.read_epsilon(RMS_EPSILON)
    layers, heads = common["layers"], fields.read_counts("attention.head_count", fields.read_layer_count())
    windows = read_windows(fields, period=None)
    chooses = [not window and layer < layers for layer, window in enumerate(windows)]
    rope = read_rope(fields, fields.read_count("rope.dimension_count"), True)
    if rope.yarn or rope.by_factors:
        raise fields.make_unsupported_error(f"{fields.format_key('rope.scaling.type')} must be linear or none")
    local = replace(rope, base=read_base(fields, "rope.freq_base_swa", None))

    def latent(layer: int) -> DeepSeek2Hyperparameters:
        end, turn = ("_swa", local) if windows[layer] else ("", rope)
        key, value = (fields.read_count(f"attention.{side}_length_mla{end}") for side in ("key", "value"))
        if key <= rope.dims:
            raise fields.make_error(f"rope.dimension_count {rope.dims} must be below the key dimension, {key}")
        rank, of_keys = fields.read_count(f"attention.kv_lora_rank{end}"), key - rope.dims
        sizes = {"heads": heads[layer], "key_dim": of_keys, "value_dim": value, "latent": rank, "scale": key**-0.5}
        return DeepSeek2Hyperparameters(**common, **sizes, epsilon=epsilon, keeps_latent=True, rope=turn, routing=None)

    indexer = read_indexer(fields, rope, False, chooses, needs_first=False)
    if indexer.layers != tuple(layer for layer, does in enumerate(chooses) if does):
        raise fields.make_error(
            f"{fields.format_key(TYPES)} must have an indexer in exactly the layers without a window"
        )
    return Dots3NoteHyperparameters(
        **common,
        epsilon=epsilon,
        routing=read_file_routing(fields),
        latent=tuple(map(latent, range(layers))),
        windows=windows[:layers],
        indexer=indexer,
    )


def forward(b: Builder, w: Weights, h: Dots3NoteHyperparameters) -> Activation:
    x = b.embed(w.token_embd, b.ids)
    for state, latent in zip(h.list_layer_states(), h.latent, strict=True):
        block, index = w.get_layer(state.layer), find_index_state(h.indexer, state.layer)
        y = b.rms_norm(x, block.attn_norm, h.epsilon)
        narrow = project_low_rank_queries(b, block, latent.epsilon, y)
        selected = select_indexed_keys(b, block, h.indexer, index, narrow, y) if index else None
        scores = AttentionScores(latent.heads, latent.scale, chosen=selected)
        attended = attend_to_selected(b, block, latent, state, scores, narrow, y, block.attn_k_norm)
        gates = b.sigmoid(b.linear(y, block.attn_gate))
        x = b.add(x, b.linear(scale_heads(b, attended, gates, latent.heads, latent.value_dim), block.attn_output))
        y = b.rms_norm(x, block.ffn_norm, h.epsilon)
        x = b.add(x, apply_feed_forward_or_experts(b, block, h.routing, y, b.swiglu, apply_shared_expert))
    return compute_logits(b, w, h, x)
