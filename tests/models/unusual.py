"""Models whose layers are neither those of Llama nor of Mamba: several streams, RWKV, linear attention."""

from .declaration import TIED, Dims, declare
from .parts import ATTENTION, GATED, HEAD_NORMS, NORMS, POST_NORMS, norms

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


UNUSUAL = {
    "gemma3n": gemma3n({"rope.freq_base": 1e6, "attention.sliding_window": 9}, layers=6),
    "gemma3n_shared": gemma3n(
        {"rope.freq_base": 1e6, "activation_sparsity_scale": cuts(23), "altup.num_inputs": 4, "altup.active_idx": 0},
        layers=23, window=20, width=32, hidden=48,
    ),
}  # fmt: skip
GELU = {name for name in UNUSUAL if name.startswith("gemma3n")}
