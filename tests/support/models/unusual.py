"""Models whose layers are neither those of Llama nor of Mamba: several streams, RWKV, linear attention."""

from .declaration import EMBEDDING, TIED, UNTIED, Dims, Shapes, declare
from .parts import ATTENTION, GATED, HEAD_NORMS, NORMS, POST_NORMS, biased, norms

STREAMS = {
    **TIED,
    "altup_proj.weight": "3, width, width",
    "altup_unembd_proj.weight": "3, width, width",
    "per_layer_token_embd.weight": "vocab, 256 * layers",
    "per_layer_model_proj.weight": "256 * layers, width",
    "per_layer_proj_norm.weight": "256",
}
OF_STREAMS = {
    **norms("laurel_post_norm", "altup_router_norm", "post_norm", "altup_correct_scale"),
    "inp_gate.weight": "256, width",
    "proj.weight": "width, 256",
    "altup_correct_coef.weight": "4, 4",
    "altup_predict_coef.weight": "16, 4",
    "altup_router.weight": "4, width",
    "laurel_l.weight": "64, width",
    "laurel_r.weight": "width, 64",
}

CALM = {  # lest errors grow from layer to layer
    "altup_predict_coef.weight": lambda n, shape: n.normal(shape, 0.1),
    "altup_correct_coef.weight": lambda n, shape: n.normal(shape, 0.3),
    "altup_correct_scale.weight": lambda n, shape: n.uniform(shape, 0.5, 1.5),
    "post_norm.weight": lambda n, shape: n.uniform(shape, 0.2, 0.5),
    "post_ffw_norm.weight": lambda n, shape: n.uniform(shape, 0.2, 0.5),
    "post_attention_norm.weight": lambda n, shape: n.uniform(shape, 0.2, 0.5),
}


def gemma3n(metadata: dict, **dims):
    """Heads that read the keys and values of earlier layers have matrices for their own as well, in files."""
    layer = {**ATTENTION, **HEAD_NORMS, **NORMS, **POST_NORMS, **GATED, **OF_STREAMS}

    def all_metadata(d: Dims) -> dict:
        shared = {"attention.shared_kv_layers": max(d.layers - 20, 0)} if d.layers > 20 else {}
        return {"embedding_length_per_layer_input": 256, **shared, **metadata}

    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "width": 40, "hidden": 72}
    return declare("gemma3n", layer, STREAMS, all_metadata, CALM, **{**sizes, **dims})


def cuts(layers: int) -> list[float]:
    """As converted files say where gates are cut."""
    return [1.6448533535003662 if layer < 10 else -float("inf") for layer in range(layers)]


NORMED = {**EMBEDDING, **biased(norms("token_embd_norm", "output_norm")), "output.weight": "vocab, width"}
HEAD_NORM = biased(norms("time_mix_ln"))
HALVES = biased(norms("attn_norm", "attn_norm_2"))  # norms of both halves of a layer
READING = {
    "time_mix_receptance.weight": "width, width",
    "time_mix_key.weight": "kv * dim, width",
    "time_mix_value.weight": "kv * dim, width",
    "time_mix_output.weight": "width, width",
}
CHANNEL_MIX = {
    "channel_mix_lerp_k.weight": "1, 1, width",
    "channel_mix_key.weight": "hidden, width",
    "channel_mix_value.weight": "width, hidden",
}
RWKV6 = {
    **READING,
    "time_mix_w1.weight": "5 * rank, width",
    "time_mix_w2.weight": "5, width, rank",
    "time_mix_lerp_x.weight": "1, 1, width",
    "time_mix_lerp_fused.weight": "5, 1, 1, width",
    "time_mix_decay.weight": "width",
    "time_mix_decay_w1.weight": "decay_rank, width",
    "time_mix_decay_w2.weight": "width, decay_rank",
    "time_mix_gate.weight": "width, width",
}
RWKV7 = {
    **READING,
    **{f"time_mix_{name}0.weight": "width" for name in "wav"},
    **{f"time_mix_{name}1.weight": f"{rank}, width" for name, rank in (("w", "rank"), ("a", "rank2"))},
    **{f"time_mix_{name}2.weight": f"width, {rank}" for name, rank in (("w", "rank"), ("a", "rank2"))},
    "time_mix_lerp_fused.weight": "6, 1, 1, width",
    **{f"time_mix_{name}.weight": "width" for name in ("k_k", "k_a", "r_k")},
}
GATE = {"time_mix_g1.weight": "gate_rank, width", "time_mix_g2.weight": "width, gate_rank"}
FIVE_LERPS = {"time_mix_lerp_fused.weight": "5, 1, 1, width"}
OLD_LERPS = {f"time_mix_lerp_{name}.weight": "1, 1, width" for name in "wkvrg"}
OF_RWKV = {
    "time_mix_decay.weight": lambda n, shape: n.uniform(shape, -3, 0.5),
    **{f"time_mix_lerp_{name}.weight": lambda n, shape: n.uniform(shape, -0.2, 1.2) for name in ("fused", *"xwkvrg")},
    "time_mix_first.weight": lambda n, shape: n.normal(shape, 1),
    **{f"time_mix_{name}0.weight": lambda n, shape: n.normal(shape, 1) for name in "wav"},
    **{f"time_mix_{name}.weight": lambda n, shape: n.uniform(shape, 0.4, 1.2) for name in ("k_k", "k_a")},
    "time_mix_r_k.weight": lambda n, shape: n.normal(shape, 0.3),
    **{f"channel_mix_lerp_{name}.weight": lambda n, shape: n.uniform(shape, 0, 1) for name in "kr"},
}


def rwkv(arch: str, layer: Shapes, whole: Shapes, metadata, **dims):
    """metadata: a function of the dimensions; heads are in no hyperparameter."""

    def all_metadata(d: Dims) -> dict:
        return {"wkv.head_size": d.dim, **metadata(d)}

    sizes = {"width": 96, "dim": 32, "heads": 0, "kv_heads": None, "hidden": 80, "norm": "layer"}
    return declare(arch, layer, whole, all_metadata, OF_RWKV, **{**sizes, **dims})


def of_rwkv6(d: Dims) -> dict:
    return {"time_mix_extra_dim": d.rank, "time_decay_extra_dim": d.decay_rank}


def of_rwkv7(d: Dims) -> dict:
    ranks = {"decay": d.rank, "iclr": d.rank2, "value_residual_mix": d.rank3, "gate": d.gate_rank}
    return {f"attention.{name}_lora_rank": rank for name, rank in ranks.items() if rank}


def rwkv7(arch: str, more: Shapes, whole: Shapes, metadata: dict, **dims):
    """Declare RWKV 7.

    The first layer has unused matrices for a residual, like others or of the learning rates' rank.
    """

    def layer(d: Dims, number: int) -> Shapes:
        rank = "rank3" if number else "rank2"
        residual = {"time_mix_v1.weight": f"{rank}, width", "time_mix_v2.weight": f"width, {rank}"}
        return {**RWKV7, **residual, **more}

    sizes = {"rank": 10, "rank2": 7, "rank3": 5, "gate_rank": 12}
    sizes |= {"dim": 64, "width": 128, "kv": 2}  # llama.cpp computes nonsense for other heads
    return rwkv(arch, layer, whole, lambda d: {**of_rwkv7(d), **metadata}, **{**sizes, **dims})


OWN6 = {**RWKV6, "time_mix_first.weight": "width // dim, dim", **HEAD_NORM, **HALVES, **CHANNEL_MIX}
OWN6 |= {"channel_mix_receptance.weight": "width, width", "channel_mix_lerp_r.weight": "1, 1, width"}
WITHOUT_FUSED = {name: shape for name, shape in OWN6.items() if "fused" not in name}
SHARED_KEYS = {**biased(RWKV6, "time_mix_key", "time_mix_value", "time_mix_receptance"), **NORMS, **GATED}
UNUSUAL = {
    "gemma3n": gemma3n({"rope.freq_base": 1e6, "attention.sliding_window": 9}, layers=6),
    "gemma3n_shared": gemma3n(
        {"rope.freq_base": 1e6, "activation_sparsity_scale": cuts(23), "altup.num_inputs": 4, "altup.active_idx": 0},
        layers=23, window=20, width=32, hidden=48,
    ),
    "rwkv6": rwkv("rwkv6", OWN6, NORMED, of_rwkv6, rank=6, decay_rank=9, kv=3),
    "rwkv6_rescaled": rwkv(
        "rwkv6", {**WITHOUT_FUSED, **OLD_LERPS}, NORMED, lambda d: {**of_rwkv6(d), "rescale_every_n_layers": 2},
        rank=6, decay_rank=7, kv=5, layers=3, width=80, dim=16,
    ),
    "rwkv6qwen2": rwkv(
        "rwkv6qwen2", SHARED_KEYS, UNTIED,
        lambda d: {**of_rwkv6(d), "token_shift_count": 1, "attention.head_count_kv": d.kv},
        rank=6, decay_rank=9, dim=16, kv=2, norm="rms",
    ),
    "rwkv7": rwkv7("rwkv7", {**HEAD_NORM, **GATE, **HALVES, **CHANNEL_MIX}, NORMED, {}),
    "arwkv7": rwkv7("arwkv7", {**GATE, **NORMS, **GATED}, UNTIED, {"token_shift_count": 1}, norm="rms"),
    "arwkv7_ungated": rwkv7(
        "arwkv7", {**FIVE_LERPS, **HEAD_NORM, **NORMS, **GATED}, UNTIED, {"token_shift_count": 1}, norm="rms",
        gate_rank=0, width=192, kv=3,
    ),
}  # fmt: skip
GELU = {name for name in UNUSUAL if name.startswith("gemma3n")}
