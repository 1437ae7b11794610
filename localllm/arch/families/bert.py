"""BERT (Devlin et al. 2018, arXiv 1810.04805) and XLM-RoBERTa (Conneau et al. 2019, arXiv 1911.02116).

MiniLM, BGE, E5, GTE and Arctic have this architecture.

Unlike llama: attention is bidirectional; a table of positions is added to the embeddings, and there is no RoPE;
layer norms after each sublayer (post-norm); GELU without a gate; biases everywhere.
"""

from localllm.arch.attention import attend, project_qkv
from localllm.arch.decoder import pool_texts
from localllm.arch.encoder import EncoderHyperparameters, embed_tokens, read_encoder_fields
from localllm.arch.family import Activation, Builder, HyperparameterReader, PagedState, RopeParameters, Weights, frozen
from localllm.arch.feed_forward import apply_ungated_feed_forward


@frozen
class BERTHyperparameters(EncoderHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return None


def read(fields: HyperparameterReader) -> BERTHyperparameters:
    return BERTHyperparameters(**read_encoder_fields(fields))


def forward(b: Builder, w: Weights, h: BERTHyperparameters) -> Activation:
    x = b.add(embed_tokens(b, w), b.embed_positions(w.position_embd, b.positions))
    x = b.layer_norm(x, w.token_embd_norm, h.epsilon)
    for state in h.list_states():
        layer = w.get_layer(state.layer)
        x = apply_attention(b, layer, h, state, x)
        x = b.layer_norm(
            b.add(apply_ungated_feed_forward(b, layer, x, b.gelu_erf), x), layer.layer_output_norm, h.epsilon
        )
    return pool_texts(b, w, h, x)


def apply_attention(b: Builder, w: Weights, h: EncoderHyperparameters, state: PagedState, x: Activation) -> Activation:
    """Add attention's output to x, and normalize."""
    q, k, v = project_qkv(b, w, h, state.layer, x)
    y = b.linear(attend(b, h, state, q, k, v), w.attn_output)
    return b.layer_norm(b.add(y, x), w.attn_output_norm, h.epsilon)


OTHER_HEADS = r"(pooler|cls|lm_head|head|decoder)\..*|embeddings\.position_ids"  # for masked words and other tasks
TABLES = {"token_types": "types width", "token_embd_norm": "width", "position_embd": "context width"}
TABLES_BEHIND = {
    **TABLES,
    "position_embd": "@bert.skip_padding_rows position_embd.weight[positions width]: context width",
}
HEAD = {
    "cls.weight": "width width",
    "cls.bias": "width",
    "cls.output.weight": "labels width",
    "cls.output.bias": "labels",
}
CHECKPOINTS = {
    "BertModel BertForMaskedLM": {
        "layer": "attention feed_forward norms_of_encoder", "whole": TABLES,
        "biased": "attention feed_forward norms_of_encoder token_embd_norm", "decodes": False,
        "prefixes": "bert. roberta. distilbert.", "unread": OTHER_HEADS, "read": "@bert.read_bert",
    },
    "RobertaModel CamembertModel XLMRobertaModel": {
        "like": "BertModel", "whole": TABLES_BEHIND, "read": "@bert.read_roberta",
    },
    "DistilBertModel DistilBertForMaskedLM DistilBertForSequenceClassification": {
        "like": "BertModel", "whole": {"token_embd_norm": "width", "position_embd": "context width"},
        "unread": rf"{OTHER_HEADS}|vocab_.*|(pre_)?classifier\..*", "read": "@bert.read_distilbert",
    },
    "BertForSequenceClassification": {
        "like": "BertModel", "whole": {**TABLES, **HEAD},
        "renamed": {"pooler.dense": "cls", "classifier": "cls.output"}, "unread": r"embeddings\.position_ids",
        "read": "@bert.read_rank",
    },
    "RobertaForSequenceClassification XLMRobertaForSequenceClassification": {
        "like": "RobertaModel", "whole": {**TABLES_BEHIND, **HEAD},
        "renamed": {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}, "read": "@bert.read_roberta_rank",
    },
}  # fmt: skip
