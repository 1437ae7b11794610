"""Models that make a row of numbers of each text: one declaration per family and variant, and what llama.cpp makes."""

from dataclasses import dataclass

import numpy as np

from .answering import HEADS, layers
from .declaration import EMBEDDING, TIED, UNTIED, Dims, Model, Shapes, declare
from .golden import FOLDER
from .numbers import Numbers
from .parts import ATTENTION, EXPERTS, GATED, HALVES, HEAD_NORMS, JOINED, NORMS, PLAIN, POST_NORMS, biased, norms

LENGTHS = 1, 3, 24, 40, 60  # tokens of the texts, which are read in one run
MEAN, CLS, LAST, RANK = 1, 2, 3, 4  # tokenizer's numbers of poolings

TYPES = {"tokenizer.ggml.token_type_count": 2}
BOTH_WAYS = {"attention.causal": False, **TYPES}
EMBEDDINGS = {**EMBEDDING, "token_types.weight": "2, width", **biased(norms("token_embd_norm"))}
POSITIONS = {**EMBEDDINGS, "position_embd.weight": "context, width"}
BEHIND = biased(norms("attn_output_norm", "layer_output_norm"))
BERT = {**biased(ATTENTION), **biased(PLAIN), **BEHIND}
FULL = {"norm": "layer", "kv_heads": None, "context": 128}
HEAD = {"cls.weight": "width, width", "cls.bias": "width", "cls.output.weight": "1, width", "cls.output.bias": "1"}
WIDTHS = {
    "position_embd.weight": lambda n, shape: n.normal(shape, 0.3),
    "token_types.weight": lambda n, s: n.normal(s, 0.3),
}


def pooled(number: int, **more) -> dict:
    """Metadata of an encoder."""
    return {**BOTH_WAYS, "pooling_type": number, **more}


def experts(d: Dims, number: int) -> Shapes:
    """Every other layer has some."""
    layer = {**biased(JOINED), **BEHIND}
    if number % 2 == 0:
        return {**layer, **biased(PLAIN)}
    stacks = {"ffn_up_exps.weight": "experts, hidden, width", "ffn_down_exps.weight": "experts, width, hidden"}
    return {**layer, "ffn_gate_inp.weight": "experts, width", **stacks}


def modern(d: Dims, number: int) -> Shapes:
    """Declare a layer of ModernBERT, whose first layer has no norm in front."""
    return {**JOINED, **HALVES, **(NORMS if number else norms("ffn_norm"))}


JINA = {**biased(ATTENTION), **biased(GATED, "ffn_down"), **BEHIND}
JINA_CODE = {
    **biased(ATTENTION), **biased(HALVES, "ffn_down"), **BEHIND, **biased(norms("attn_norm_2")),
    **biased({"attn_q_norm.weight": "width", "attn_k_norm.weight": "width"}),
}  # fmt: skip
JINA3 = {**biased(JOINED), **biased(PLAIN), **BEHIND}
MODERN = {**EMBEDDING, **norms("token_embd_norm", "output_norm")}
MODERN_FIELDS = {"attention.sliding_window_pattern": 3, "rope.freq_base": 1e5, "rope.freq_base_swa": 1e3,
                 "rope.scaling.type": "none"}  # fmt: skip
MODERN_SIZES = {**FULL, "layers": 4, "window": 12, "rotated": 32}
GEMMA = {**NORMS, **ATTENTION, **HEAD_NORMS, **GATED, **POST_NORMS}
GEMMA_FIELDS = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 3}
GEMMA_SIZES = {"layers": 4, "width": 64, "heads": 2, "kv_heads": 1, "head_dim": 64, "rotated": 64, "window": 12}
QWEN = {**NORMS, **ATTENTION, **GATED, **HEAD_NORMS}
QWEN_SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64, "context": 128}
EURO_FIELDS = {"rope.freq_base": 2.5e5, "rope.scaling.type": "none"}
EURO_SIZES = {"heads": 6, "kv_heads": 2, "context": 128}
NEO = {**EMBEDDING, **norms("enc.output_norm")}
NEO_FIELDS = {"rope.freq_base": 1e4, "rope.scaling.type": "none"}
NEO_SIZES = {"heads": 3, "kv_heads": None, "context": 128, "layers": 3}
T5_WHOLE = {**EMBEDDING, **norms("enc.output_norm"), **layers("enc", 2, {**HEADS, **NORMS, **PLAIN}, False)}
T5_FIELDS = {"attention.relative_buckets_count": 16, "pooling_type": MEAN, "block_count": 2, "attention.causal": False}
T5_SIZES = {"heads": 4, "head_dim": 16, "buckets": 16, "kv_heads": None, "layers": 0, "context": 128}
T5_QUERIES = [name for name in T5_WHOLE if name.endswith("attn_q.weight")]
T5_VALUES = {name: lambda n, shape: n.normal(shape, 0.3 * shape[-1] ** -0.5) for name in T5_QUERIES}

ENCODERS = {
    "bert": declare("bert", BERT, POSITIONS, pooled(MEAN), WIDTHS, **FULL),
    "bert_cls": declare("bert", BERT, POSITIONS, pooled(CLS), WIDTHS, **FULL, width=64, heads=2),
    "bert_rank": declare("bert", BERT, {**POSITIONS, **HEAD}, pooled(RANK), WIDTHS, **FULL),
    "nomic_bert": declare(
        "nomic-bert", {**JOINED, **GATED, **BEHIND}, EMBEDDINGS, pooled(MEAN, **{"rope.freq_base": 1e3}), WIDTHS, **FULL
    ),
    "nomic_bert_moe": declare(
        "nomic-bert-moe", experts, EMBEDDINGS, pooled(MEAN, moe_every_n_layers=2), WIDTHS, **FULL, layers=4, experts=6
    ),
    "jina_bert": declare("jina-bert-v2", JINA, EMBEDDINGS, pooled(MEAN), WIDTHS, **FULL),
    "jina_bert_code": declare("jina-bert-v2", JINA_CODE, EMBEDDINGS, pooled(MEAN), WIDTHS, **FULL),
    "jina_bert3": declare("jina-bert-v3", JINA3, EMBEDDINGS, pooled(MEAN), WIDTHS, **FULL),
    "modern_bert": declare("modern-bert", modern, MODERN, pooled(CLS, **MODERN_FIELDS), **MODERN_SIZES),
    "modern_bert_silu": declare(
        "modern-bert", modern, MODERN, pooled(MEAN, **MODERN_FIELDS, hidden_activation="silu"), **MODERN_SIZES
    ),
    "modern_bert_rank": declare(
        "modern-bert", modern, {**MODERN, **{key: HEAD[key] for key in HEAD if key != "cls.bias"}, **norms("cls.norm")},
        pooled(RANK, **MODERN_FIELDS), **MODERN_SIZES,
    ),
    "gemma_embedding": declare("gemma-embedding", GEMMA, TIED, pooled(MEAN, **GEMMA_FIELDS), **GEMMA_SIZES),
    "eurobert": declare("eurobert", {**NORMS, **ATTENTION, **GATED}, TIED, pooled(MEAN, **EURO_FIELDS), **EURO_SIZES),
    "eurobert_last": declare(
        "eurobert", {**NORMS, **ATTENTION, **GATED}, TIED, {**TYPES, "pooling_type": LAST, **EURO_FIELDS}, **EURO_SIZES
    ),
    "neo_bert": declare("neo-bert", {**NORMS, **JOINED, **HALVES}, NEO, pooled(CLS, **NEO_FIELDS), **NEO_SIZES),
    "neo_bert_rank": declare(
        "neo-bert", {**NORMS, **JOINED, **HALVES}, {**NEO, **HEAD}, pooled(RANK, **NEO_FIELDS), **NEO_SIZES
    ),
    "llama_embed": declare(
        "llama-embed", {**NORMS, **ATTENTION, **GATED}, {**TIED, "rope_freqs.weight": "head_dim // 2"}, pooled(MEAN),
        **EURO_SIZES,
    ),
    "llama_embed_experts": declare(
        "llama-embed", {**NORMS, **ATTENTION, **EXPERTS}, UNTIED, pooled(LAST), **EURO_SIZES, experts=5
    ),
    "t5encoder": declare("t5encoder", {}, T5_WHOLE, T5_FIELDS, T5_VALUES, **T5_SIZES),
    "qwen3_embedding": declare("qwen3", QWEN, TIED, {"pooling_type": LAST, "rope.freq_base": 1e6}, **QWEN_SIZES),
    "qwen3_rank": declare(
        "qwen3", QWEN, {**TIED, "cls.output.weight": "2, width"},
        {"pooling_type": RANK, "classifier.output_labels": ["yes", "no"]}, **QWEN_SIZES,
    ),
}  # fmt: skip
GELU = [
    name
    for name in ENCODERS
    if not name.startswith(("nomic_bert", "qwen3", "eurobert", "neo", "llama", "t5")) and not name.endswith("silu")
]
GELU.append("nomic_bert_moe")
ROWS_IN_BLOCKS = ["eurobert-Q8_0", "neo_bert-Q8_0", "llama_embed-Q4_0", "t5encoder-Q5_1"]


@dataclass(frozen=True)
class RowsGolden:
    """The recorded rows.

    Attributes:
        rows: float32 [texts, width] of llama.cpp.  digest: of the model.
    """

    rows: np.ndarray
    digest: str

    @classmethod
    def load(cls, name: str) -> "RowsGolden":
        with np.load(FOLDER / f"{name}.npz") as file:
            return cls(file["rows"], str(file["digest"]))

    def save(self, name: str) -> None:
        np.savez(FOLDER / f"{name}.npz", rows=self.rows, digest=self.digest)


def texts(name: str, model: Model) -> list[np.ndarray]:
    """Token ids of a model's texts."""
    vocab = model.metadata[f"{model.arch}.vocab_size"]
    return [Numbers(0, name, f"text {length}").integers(length, vocab).astype(np.int64) for length in LENGTHS]
