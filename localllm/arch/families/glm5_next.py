"""GLM 5.3 Flash (Zhipu AI 2026).

Some layers are Kimi Linear's, with a state matrix for each head, the others DeepSeek-V3.2's, with an indexer. Unlike
there, attention has no RoPE, and the indexer selects pools of a few tokens, whose key is a gated mean of the tokens'.
Four residual streams, mixed by a matrix whose rows and columns sum to 1 (manifold-constrained hyper-connections: Xie et
al. 2025, arXiv 2512.24880).
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from localllm.arch.attention import LAYER_EPSILON, RMS_EPSILON
from localllm.arch.decoder import ignore_mtp_layers
from localllm.arch.families.deepseek2 import project_low_rank_queries
from localllm.arch.families.deepseek32 import TYPES
from localllm.arch.families.kimi_linear import apply_delta_heads, compute_log_decays
from localllm.arch.families.maple import make_limited_swiglu
from localllm.arch.families.step35 import read_activation_limits
from localllm.arch.family import (
    Activation,
    AttentionScores,
    Builder,
    HyperparameterReader,
    Hyperparameters,
    LatentState,
    RecurrentLayerState,
    State,
    Weights,
)
from localllm.arch.feed_forward import SIGMOID, apply_feed_forward_or_experts, apply_shared_expert, read_file_routing
from localllm.arch.hyper_connections import concat_streams
from localllm.arch.verbs import Routing
from localllm.frozen import frozen

KEY_EPSILON = 1e-6  # of the heads' L2 norm, and the default for the norm of an indexer's keys
MAX_STREAMS, MAX_ITERATIONS = 16, 1000
LOWEST = 1e3  # magnitude of a lower bound; e^-1000 is 0


@frozen
class PoolIndexerHyperparameters:
    """An indexer, which selects `count` pools of `size` tokens.

    Attributes:
        heads, dim: its heads and their dimension.  epsilon: of the norm of its keys.
    """

    heads: int
    dim: int
    size: int
    count: int
    epsilon: float


@frozen
class MixedStreamHyperparameters:
    """Residual streams (hyper-connections), mixed by matrices that Sinkhorn iterations normalize."""

    count: int
    iterations: int
    epsilon: float


@frozen
class Glm5NextHyperparameters(Hyperparameters):
    """The hyperparameters of GLM 5.3.

    Attributes:
        attends, chooses: by layer, whether it has attention, and an indexer.  heads: heads of both types of layers.
        lowest: the lower bound of the decays' logarithms, None for none.
        limits: by layer, limits of gates and up projections, for experts and for dense networks.
    """

    epsilon: float
    attends: tuple[bool, ...]
    chooses: tuple[bool, ...]
    heads: int
    key_dim: int
    value_dim: int
    latent: int
    delta_dim: int
    taps: int
    lowest: float | None
    pools: PoolIndexerHyperparameters
    streams: MixedStreamHyperparameters
    routing: Routing | None
    limits: tuple[tuple[float, ...], tuple[float, ...]]

    def list_states(self) -> Sequence[State]:
        """Return the states of all layers.

        An attention layer has latent rows and, with an indexer, the indexer's keys and the last tokens of a pool; any
        other has the last queries, keys and values for its convolutions, and the heads' matrices.
        """
        return [state for layer in range(self.layers) for state in self.get_layer_states(layer)]

    def get_layer_states(self, layer: int) -> list[State]:
        """Return a layer's states."""
        if not self.attends[layer]:
            window = (self.taps - 1, self.heads * self.delta_dim)
            return [RecurrentLayerState(layer, (window, window, window, (self.heads, self.delta_dim, self.delta_dim)))]
        states: list[State] = [LatentState(layer, self.latent, self.latent)]
        if self.chooses[layer]:
            states.append(LatentState(layer, self.pools.dim, self.pools.dim, is_index=True))
            states.append(RecurrentLayerState(layer, ((self.pools.size - 1, 2 * self.pools.dim),)))
        return states


def read(fields: HyperparameterReader) -> Glm5NextHyperparameters:
    common, layers, lowest = (
        fields.read_common_fields(),
        fields.read_layer_count(),
        fields.read_raw("kda.gate_lower_bound"),
    )
    if lowest is not None and not (isinstance(lowest, float) and -LOWEST <= lowest < 0):
        raise fields.make_value_error("kda.gate_lower_bound", f"a number from {-LOWEST:g} up to 0")
    if fields.read_count("rope.dimension_count", 0):
        raise fields.make_unsupported_error(f"{fields.format_key('rope.dimension_count')} must be 0")
    kv_heads = fields.read_counts("attention.head_count_kv", layers, 0)
    attends = tuple(map(bool, kv_heads[: common["layers"]]))
    chooses = attends
    if fields.read_raw(TYPES) is not None:
        types = fields.read_array(TYPES, "biu", f"yes or no for each of {common['layers']} layers").tolist()
        if len(types) < common["layers"]:
            raise fields.make_value_error(TYPES, f"yes or no for each of {common['layers']} layers")
        chooses = tuple(bool(does and chooses) for does, chooses in zip(attends, types, strict=False))
    if any(attends) and not chooses[attends.index(True)]:
        raise fields.make_value_error(TYPES, "yes for the first layer that attends")
    of_experts = read_activation_limits(fields, "swiglu_clamp_exp", layers)
    of_others = (
        read_activation_limits(fields, "swiglu_clamp_shexp", layers) if fields.has("swiglu_clamp_shexp") else of_experts
    )
    return Glm5NextHyperparameters(
        **common,
        epsilon=fields.read_epsilon(RMS_EPSILON),
        attends=attends,
        chooses=chooses,
        heads=fields.read_count("attention.head_count"),
        key_dim=fields.read_count("attention.key_length_mla"),
        value_dim=fields.read_count("attention.value_length_mla"),
        latent=fields.read_count("attention.kv_lora_rank"),
        delta_dim=fields.read_count("kda.head_dim"),
        taps=fields.read_count("ssm.conv_kernel"),
        lowest=lowest,
        pools=read_pool_indexer(fields),
        streams=read_mixed_streams(fields),
        routing=read_file_routing(fields, SIGMOID),
        limits=(of_experts, of_others),
    )


def read_pool_indexer(fields: HyperparameterReader) -> PoolIndexerHyperparameters:
    """Read the attention.indexer.* keys. Raises ModelError."""
    names = ("head_count", "key_length", "kpool", "top_k")
    heads, dim, size, count = (fields.read_count(f"attention.indexer.{name}") for name in names)
    if size < 2 or count % size:
        raise fields.make_error(
            f"attention.indexer.kpool must be at least 2 and divide attention.indexer.top_k {count} (found {size})"
        )
    if not fields.read_flag("attention.indexer.kpool_select_tail", False):
        raise fields.make_unsupported_error(f"{fields.format_key('attention.indexer.kpool_select_tail')} must be true")
    epsilon = fields.read_epsilon(LAYER_EPSILON) if fields.has(LAYER_EPSILON) else KEY_EPSILON
    return PoolIndexerHyperparameters(heads, dim, size, count // size, epsilon)


def read_mixed_streams(fields: HyperparameterReader) -> MixedStreamHyperparameters:
    """Read the hyper_connection.* keys. Raises ModelError."""
    count, iterations = (fields.read_count(f"hyper_connection.{name}") for name in ("count", "sinkhorn_iterations"))
    if count > MAX_STREAMS or iterations > MAX_ITERATIONS:
        raise fields.make_unsupported_error(
            f"hyper_connection.count must be at most {MAX_STREAMS}, and sinkhorn_iterations at most {MAX_ITERATIONS} "
            f"(found {count}, {iterations})"
        )
    return MixedStreamHyperparameters(count, iterations, fields.read_number("hyper_connection.epsilon"))


def forward(b: Builder, w: Weights, h: Glm5NextHyperparameters) -> Activation:
    ignore_mtp_layers(b, w, h)
    x, selected = concat_streams(b, [b.embed(w.token_embd, b.ids)] * h.streams.count), None
    for layer in range(h.layers):
        block, states = w.get_layer(layer), h.get_layer_states(layer)
        y, add = enter_sublayer(b, block, h, x, "attn")
        y = b.rms_norm(y, block.attn_norm, h.epsilon)
        if h.attends[layer]:
            narrow = project_low_rank_queries(b, block, h.epsilon, y)
            selected = select_pools(b, block, h.pools, states, narrow, y) if h.chooses[layer] else selected
            y = attend_to_latents(
                b, block, h, states[0], AttentionScores(h.heads, h.key_dim**-0.5, chosen=selected), narrow, y
            )
        else:
            y = apply_delta_rule(b, block, h, states[0], y)
        x = add(b.linear(y, block.attn_output))
        y, add = enter_sublayer(b, block, h, x, "ffn")
        x = add(apply_feed_forward(b, block, h, layer, b.rms_norm(y, block.ffn_norm, h.epsilon)))
    x, width = b.select(x, b.wanted), h.width
    parts = [b.slice_columns(x, i * width, (i + 1) * width) for i in range(h.streams.count)]
    mean = b.scale(reduce(b.add, parts), 1 / h.streams.count)
    return b.linear(b.rms_norm(mean, w.output_norm, h.epsilon), w.output)


def enter_sublayer(
    b: Builder, w: Weights, h: Any, x: Activation, name: str
) -> tuple[Activation, Callable[[Activation], Activation]]:
    """Return the input of a sublayer, and a function that adds the sublayer's output to the streams."""
    n, streams = h.streams.count, h.streams
    fn, scale, base = (w.require(f"hc_{name}_{part}") for part in ("fn", "scale", "base"))
    factors, offsets = scale.require_shape(3).read_vector(), base.require_shape((2 + n) * n).read_vector()
    b.ignore(scale, base)
    mixes = b.linear(b.rms_norm(x, None, h.epsilon), fn.require_shape((2 + n) * n, n * h.width))

    def part(number: int, first: int, end: int) -> Activation:
        y = b.scale(b.slice_columns(mixes, first, end), float(factors[number]))
        return b.add_vector(y, offsets[first:end])

    of_sum = b.add_scalar(b.sigmoid(part(0, 0, n)), streams.epsilon)
    of_adding = b.scale(b.sigmoid(part(1, n, 2 * n)), 2.0)
    of_streams = b.sinkhorn(part(2, 2 * n, (2 + n) * n), n, streams.iterations, streams.epsilon)

    def add(y: Activation) -> Activation:
        return b.add(b.mix_streams(y, of_adding, 1), b.mix_streams(x, of_streams, n))

    return b.mix_streams(x, of_sum, n), add


def select_pools(
    b: Builder,
    w: Weights,
    pools: PoolIndexerHyperparameters,
    states: Sequence[State],
    narrow: Activation,
    x: Activation,
) -> Activation:
    """Select the keys that tokens attend to.

    The heads' weights are not scaled, as that has no effect.
    """
    w.require_biases("indexer.k_norm")
    norm = w.require("indexer.k_norm").require_shape(pools.dim)
    k = b.layer_norm(b.linear(x, w.require("indexer.attn_k")), norm, pools.epsilon)
    gates, places = b.linear(x, w.require("indexer_compressor_gate")), w.require("indexer_compressor_ape")
    k = b.gated_mean(b.concat_heads(k, gates, 1), places, states[2])  # type: ignore[arg-type]
    q, weights = b.linear(narrow, w.require("indexer.attn_q_b")), b.linear(x, w.require("indexer.proj"))
    return b.select_keys(q, k, weights, states[1], pools.count, pools.size)  # type: ignore[arg-type]


def attend_to_latents(
    b: Builder,
    w: Weights,
    h: Glm5NextHyperparameters,
    state: Any,
    scores: AttentionScores,
    narrow: Activation,
    x: Activation,
) -> Activation:
    """Compute the heads' outputs from latent rows.

    Queries are multiplied by the keys' matrices, and results by the values' matrices.
    """
    latent = b.rms_norm(b.linear(x, w.attn_kv_a_mqa), w.attn_kv_a_norm, h.epsilon)
    q = b.head_linear(b.linear(narrow, w.attn_q_b), w.attn_k_b.require_shape(h.heads, h.latent, h.key_dim))
    return b.head_linear(
        b.attend(q, latent, None, state, scores), w.attn_v_b.require_shape(h.heads, h.value_dim, h.latent)
    )


def apply_delta_rule(b: Builder, w: Weights, h: Glm5NextHyperparameters, state: Any, x: Activation) -> Activation:
    """Compute the outputs of heads with state matrices, normalized and gated."""
    decays, gate = compute_log_decays(b, w, h, x), b.linear(b.linear(x, w.ssm_g_a), w.ssm_g_b)
    return apply_delta_heads(b, w, h, state, x, b.exponential(decays), gate, KEY_EPSILON)


def apply_feed_forward(b: Builder, w: Weights, h: Glm5NextHyperparameters, layer: int, x: Activation) -> Activation:
    """Apply a dense network, or experts and a shared one, with clamped gates."""
    of_experts, of_others = (make_limited_swiglu(b, limits[layer]) for limits in h.limits)
    if not any(w.get(name, by_layer=True) for name in ("ffn_gate_inp", "ffn_down_exps")):
        return apply_feed_forward_or_experts(b, w, None, x, of_others)
    w.require_biases("exp_probs_b")
    return b.add(apply_feed_forward_or_experts(b, w, h.routing, x, of_experts), apply_shared_expert(b, w, x, of_others))


CHECKPOINTS = {
    "Glm5NextForConditionalGeneration": {
        "layer": "norms @deepseek.list_glm5_next_tensors", "sees": True, "named_as": "deepseek2",
        "only": {
            "mhc": True, "mla_use_nope": True, "qk_rope_head_dim": 0, "attention_bias": False,
            "index_kpool_always_select_tail": True, "num_nextn_predict_layers": 0,
        },
        "amounts": {"vocab_size": "vocab"}, "read": "@deepseek.read_glm5_next", "defaults": {"rms_norm_eps": 1e-5},
    },
}  # fmt: skip
