"""Random models with recurrent layers of any dimensions: architecture, metadata, tensors."""

from types import SimpleNamespace

import numpy as np

from localllm.files.gguf.file import Tensor
from localllm.files.gguf.metadata import Irregularities
from localllm.quant.formats import BY_NAME

Parts = tuple[dict, dict[str, np.ndarray]]
VOCABULARY = 45


class Random:
    """A source of random tensors."""

    def __init__(self, seed: int = 0):
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return self._random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def norm(self, *shape: int) -> np.ndarray:
        return self._random.uniform(0.5, 2, shape).astype(np.float32)

    def rates(self, *shape: int) -> np.ndarray:
        return -self._random.uniform(0.01, 0.5, shape).astype(np.float32)


def common(random: Random, width: int, layers: int, vocabulary: int, context: int) -> Parts:
    metadata = {"context_length": context, "embedding_length": width, "block_count": layers}
    tensors = {"token_embd.weight": random.matrix(vocabulary, width)}
    tensors |= {f"blk.{layer}.attn_norm.weight": random.norm(width) for layer in range(layers)}
    return metadata | {"attention.layer_norm_rms_epsilon": 1e-4}, tensors


def feed_forward(random: Random, width: int, hidden: int, norm: str) -> dict[str, np.ndarray]:
    tensors = {f"ffn_{name}.weight": random.matrix(hidden, width) for name in ("gate", "up")}
    return tensors | {"ffn_down.weight": random.matrix(width, hidden), f"{norm}.weight": random.norm(width)}


def in_layer(layer: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"blk.{layer}.{name}": values for name, values in tensors.items()}


def mamba(width=40, inner=72, state=5, taps=3, rank=6, layers=2, normalized=False, vocabulary=VOCABULARY, context=700):
    random = Random()
    metadata, tensors = common(random, width, layers, vocabulary, context)
    metadata |= {"ssm.inner_size": inner, "ssm.state_size": state, "ssm.conv_kernel": taps, "ssm.time_step_rank": rank}
    metadata["ssm.dt_b_c_rms"] = normalized
    tensors["output_norm.weight"] = random.norm(width)
    for layer in range(layers):
        tensors |= in_layer(layer, {
            "ssm_in.weight": random.matrix(2 * inner, width),
            "ssm_conv1d.weight": random.matrix(inner, taps), "ssm_conv1d.bias": random.norm(inner),
            "ssm_x.weight": random.matrix(rank + 2 * state, inner),
            "ssm_dt.weight": random.matrix(inner, rank), "ssm_dt.bias": random.norm(inner),
            "ssm_a": random.rates(inner, state), "ssm_d": random.norm(inner),
            "ssm_out.weight": random.matrix(width, inner),
        })  # fmt: skip
    return "mamba", metadata, tensors


def mamba2(width=40, heads=6, head_dim=12, groups=2, state=20, taps=4, layers=2, norm=True):
    random, inner = Random(), heads * head_dim
    columns = inner + 2 * groups * state
    metadata, tensors = common(random, width, layers, VOCABULARY, 700)
    metadata |= {"ssm.inner_size": inner, "ssm.state_size": state, "ssm.conv_kernel": taps}
    metadata |= {"ssm.time_step_rank": heads, "ssm.group_count": groups}
    tensors |= {"output_norm.weight": random.norm(width), "output.weight": random.matrix(VOCABULARY, width)}
    for layer in range(layers):
        tensors |= in_layer(layer, {
            "ssm_in.weight": random.matrix(inner + columns + heads, width),
            "ssm_conv1d.weight": random.matrix(columns, taps), "ssm_conv1d.bias": random.norm(columns),
            "ssm_dt.bias": random.norm(heads), "ssm_a": random.rates(heads, 1), "ssm_d": random.norm(heads, 1),
            "ssm_out.weight": random.matrix(width, inner),
        })  # fmt: skip
        if norm:
            tensors[f"blk.{layer}.ssm_norm.weight"] = random.norm(groups, inner // groups)
    return "mamba2", metadata, tensors


def attention(random: Random, width: int, heads: int, kv_heads: int, head_dim: int, gates: bool) -> dict:
    return {
        "attn_q.weight": random.matrix((1 + gates) * heads * head_dim, width),
        "attn_k.weight": random.matrix(kv_heads * head_dim, width),
        "attn_v.weight": random.matrix(kv_heads * head_dim, width),
        "attn_q_norm.weight": random.norm(head_dim), "attn_k_norm.weight": random.norm(head_dim),
        "attn_output.weight": random.matrix(width, heads * head_dim),
    }  # fmt: skip


def lfm2(width=48, heads=4, kv_heads=(0, 2, 0), taps=3, hidden=56, window=0):
    random = Random()
    metadata, tensors = common(random, width, len(kv_heads), VOCABULARY, 700)
    metadata |= {"attention.head_count": heads, "attention.head_count_kv": np.array(kv_heads, np.int32)}
    metadata |= {"shortconv.l_cache": taps, "attention.sliding_window": window, "feed_forward_length": hidden}
    tensors["token_embd_norm.weight"] = random.norm(width)
    for layer, count in enumerate(kv_heads):
        tensors |= in_layer(layer, feed_forward(random, width, hidden, "ffn_norm"))
        tensors |= in_layer(layer, attention(random, width, heads, count, width // heads, False) if count else {
            "shortconv.conv.weight": random.matrix(width, taps),
            "shortconv.in_proj.weight": random.matrix(3 * width, width),
            "shortconv.out_proj.weight": random.matrix(width, width),
        })  # fmt: skip
    return "lfm2", metadata, tensors


def qwen35(
    width=64, heads=4, kv_heads=2, head_dim=16, sections=(2, 1, 1, 0), delta_heads=6, key_heads=2, key_dim=12,
    value_dim=24, taps=3, hidden=96, layers=3, interval=2, vocabulary=VOCABULARY, context=700,
):  # fmt: skip
    random, keys, values = Random(), key_heads * key_dim, delta_heads * value_dim
    metadata, tensors = common(random, width, layers, vocabulary, context)
    metadata |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "feed_forward_length": hidden}
    metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    metadata |= {"rope.dimension_count": head_dim // 2, "rope.dimension_sections": np.array(sections, np.int32)}
    metadata |= {"full_attention_interval": interval, "ssm.conv_kernel": taps, "ssm.state_size": key_dim}
    metadata |= {"ssm.inner_size": values, "ssm.time_step_rank": delta_heads, "ssm.group_count": key_heads}
    tensors["output_norm.weight"] = random.norm(width)
    for layer in range(layers):
        tensors |= in_layer(layer, feed_forward(random, width, hidden, "post_attention_norm"))
        attends = (layer + 1) % interval == 0
        tensors |= in_layer(layer, attention(random, width, heads, kv_heads, head_dim, True) if attends else {
            "attn_qkv.weight": random.matrix(2 * keys + values, width),
            "attn_gate.weight": random.matrix(values, width),
            "ssm_conv1d.weight": random.matrix(2 * keys + values, taps),
            "ssm_dt.bias": random.norm(delta_heads), "ssm_a": random.rates(delta_heads),
            "ssm_beta.weight": random.matrix(delta_heads, width), "ssm_alpha.weight": random.matrix(delta_heads, width),
            "ssm_norm.weight": random.norm(value_dim), "ssm_out.weight": random.matrix(width, values),
        })  # fmt: skip
    return "qwen35", metadata, tensors


def with_experts(arch: str, model, experts=5, used=2, hidden=32, dense=0):
    """Turn a model into one with experts except in the first `dense` layers."""
    _, metadata, tensors = model
    random, width, layers = Random(1), metadata["embedding_length"], metadata["block_count"]
    metadata = metadata | {"expert_count": experts, "expert_used_count": used, "expert_feed_forward_length": hidden}
    if arch == "lfm2moe":
        metadata |= {"expert_gating_func": 2, "leading_dense_block_count": dense, "feed_forward_length": 56}
    else:
        metadata["expert_shared_feed_forward_length"] = hidden
    moved = [f"blk.{layer}.ffn_{part}.weight" for layer in range(dense, layers) for part in ("gate", "up", "down")]
    tensors = {name: values for name, values in tensors.items() if name not in moved}
    for layer in range(dense, layers):
        stacks = {part: (hidden, width) if part != "down" else (width, hidden) for part in ("gate", "up", "down")}
        tensors |= in_layer(layer, {"ffn_gate_inp.weight": random.matrix(experts, width)})
        for part, size in stacks.items():
            stack = np.stack([random.matrix(*size) for _ in range(experts)])
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = stack
            if arch != "lfm2moe":
                tensors[f"blk.{layer}.ffn_{part}_shexp.weight"] = random.matrix(*size)
        more = {"exp_probs_b.bias": random.norm(experts) / 10} if arch == "lfm2moe" else {
            "ffn_gate_inp_shexp.weight": random.matrix(1, width)[0]
        }  # fmt: skip
        tensors |= in_layer(layer, more)
    return arch, metadata, tensors


def qwen3next(**sizes):
    """Take strengths and steps from one matrix, and positions without sections."""
    arch, metadata, tensors = with_experts("qwen3next", qwen35(**sizes))
    metadata = {name: value for name, value in metadata.items() if name != "rope.dimension_sections"}
    for layer in range(metadata["block_count"]):
        parts = [tensors.pop(f"blk.{layer}.ssm_{name}.weight", None) for name in ("beta", "alpha")]
        if parts[0] is not None:
            tensors[f"blk.{layer}.ssm_ba.weight"] = np.concatenate(parts)
    return arch, metadata, tensors


def file_of(arch: str, metadata: dict, tensors: dict[str, np.ndarray], place=lambda data: data) -> SimpleNamespace:
    """Return a stand-in for a file; place(data) may move a tensor's bytes."""
    named = {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in metadata.items()}}
    tensors_placed = {}
    for name, values in tensors.items():
        data = place(np.ascontiguousarray(values)).view(np.uint8)
        tensors_placed[name] = Tensor(name, BY_NAME["F32"], values.shape, data.reshape(*values.shape[:-1], -1))
    return SimpleNamespace(path="random", metadata=named, tensors=tensors_placed, oddities=Irregularities(), nbytes=0)


MODELS = {
    "mamba": mamba(),
    "mamba, one tap": mamba(taps=1, state=16, inner=80, rank=1),
    "mamba, normalized": mamba(normalized=True),
    "mamba2": mamba2(),
    "mamba2, one group": mamba2(heads=5, head_dim=16, groups=1, state=16, taps=2),
    "mamba2, a group each": mamba2(heads=3, head_dim=40, groups=3, state=7, norm=False),
    "lfm2": lfm2(),
    "lfm2, attention first": lfm2(heads=3, kv_heads=(3, 1, 0, 0), taps=2),
    "lfm2, windows": lfm2(kv_heads=(0, 0, 4), taps=5, window=20),
    "lfm2, attention only": lfm2(kv_heads=(2, 2)),
    "qwen35": qwen35(),
    "qwen35, pairs of no axis": qwen35(sections=(1, 1, 1, 1), interval=3),
    "qwen35, as many keys": qwen35(delta_heads=3, key_heads=3, key_dim=16, value_dim=16, interval=1, layers=2),
    "qwen35, one key": qwen35(delta_heads=4, key_heads=1, key_dim=33, value_dim=7, interval=4, taps=4),
    "qwen35moe": with_experts("qwen35moe", qwen35()),
    "qwen3next": qwen3next(),
    "lfm2moe": with_experts("lfm2moe", lfm2(), dense=1),
}
