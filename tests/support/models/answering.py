"""Models with an encoder, which reads a text, and a decoder, which writes an answer."""

from collections.abc import Mapping

import numpy as np

from .declaration import EMBEDDING, Declaration, Dims, Model, Shapes, declare
from .golden import prompt
from .parts import GATED, PLAIN, norms

START, READ, WRITTEN = 3, 30, 17  # the answer's first token; tokens of the text, and behind the first of the answer
HEADS = {
    "attn_q.weight": "heads * head_dim, width",
    "attn_k.weight": "heads * head_dim, width",
    "attn_v.weight": "heads * head_dim, width",
    "attn_o.weight": "width, heads * head_dim",
}
CROSSING = {name.replace("attn", "cross_attn"): shape for name, shape in HEADS.items()}


def layers(prefix: str, count: int, layer: Shapes, own_biases: bool) -> dict[str, str]:
    """Of an encoder or a decoder, the first of which has biases; or all."""
    found = {f"{prefix}.blk.{number}.{name}": shape for number in range(count) for name, shape in layer.items()}
    biased = range(count if own_biases else 1)
    return found | {f"{prefix}.blk.{number}.attn_rel_b.weight": "buckets, heads" for number in biased}


def t5(encoder: int, decoder: int, network: Shapes, own_biases: bool = False, more: Shapes | None = None, **dims):
    """So many layers of each."""
    both = {**HEADS, **norms("attn_norm", "ffn_norm"), **network}
    crossing = {**both, **CROSSING, **norms("cross_attn_norm")}
    whole = {**EMBEDDING, **norms("enc.output_norm", "dec.output_norm"), **(more or {})}
    whole |= layers("enc", encoder, both, own_biases) | layers("dec", decoder, crossing, own_biases)

    def metadata(d: Dims) -> Mapping:
        said = {"decoder_block_count": decoder} if decoder != encoder else {}
        said |= {"attention.relative_buckets_count": d.buckets, "decoder_start_token_id": START}
        return said | {"attention.layer_norm_epsilon": 1e-2, "block_count": encoder}

    values = {
        "dec.output_norm.weight": lambda n, shape: n.uniform(shape, 0.5, 1.5) * n.signs(shape),
        "token_embd.weight": lambda n, shape: n.normal(shape, 2.5 * shape[-1] ** -0.5),
    }
    for name in whole:  # scores are not scaled: lest one key be all that is seen
        if name.endswith("attn_q.weight"):
            values[name] = lambda n, shape: n.normal(shape, 0.3 * shape[-1] ** -0.5)
    sizes = {"heads": 4, "head_dim": 16, "buckets": 16, "kv_heads": None, "layers": 0, **dims}
    return declare("t5", {}, whole, metadata, values, **sizes)


ANSWERING: dict[str, Declaration] = {
    "t5": t5(2, 2, PLAIN, context=256),
    "flan_t5": t5(3, 2, GATED, more={"output.weight": "vocab, width"}, context=256, buckets=32, head_dim=24),
    "umt5": t5(2, 2, GATED, own_biases=True, more={"output.weight": "vocab, width"}, context=256, heads=5, head_dim=18),
}
GELU = ["flan_t5", "umt5"]
IN_BLOCKS = ["t5-Q8_0", "umt5-Q4_0"]


def text_and_answer(name: str, model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Return a text's tokens, and the first ones of an answer."""
    tokens = prompt(name, model.metadata[f"{model.arch}.vocab_size"] - START - 1) + START + 1
    return tokens[:READ], np.concatenate(([START], tokens[READ : READ + WRITTEN])).astype(np.int32)
