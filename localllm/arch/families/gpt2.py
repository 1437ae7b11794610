"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners), StarCoder (2305.06161).

Unlike llama: a table of positions is added to the embeddings, and there is no RoPE; layer norms; GELU without a gate;
biases everywhere; queries, keys and values from one matrix.
"""

from localllm.arch.attention import LAYER_EPSILON, TransformerHyperparameters
from localllm.arch.decoder import apply_decoder, make_final_layer_norm
from localllm.arch.families.starcoder2 import block
from localllm.arch.family import Activation, Builder, HyperparameterReader, RopeParameters, Weights, frozen


@frozen
class GPT2Hyperparameters(TransformerHyperparameters):
    def get_rope(self, layer: int) -> RopeParameters | None:
        return None


def read(fields: HyperparameterReader) -> GPT2Hyperparameters:
    return GPT2Hyperparameters(
        **GPT2Hyperparameters.read_shared_fields(fields, interleaved=False, epsilon=LAYER_EPSILON)
    )


def forward(b: Builder, w: Weights, h: GPT2Hyperparameters) -> Activation:
    x = b.add(b.embed(w.token_embd, b.ids), b.embed_positions(w.position_embd, b.positions))
    return apply_decoder(b, w, h, block, x, make_final_layer_norm(b, w, h))


CHECKPOINTS = {
    "GPT2LMHeadModel": {
        "layer": "fused_attention feed_forward norms", "whole": {"position_embd": "context width"},
        "transposed": "attn_qkv attn_output ffn_up ffn_down",
        "biased": "fused_attention feed_forward norms output_norm", "read": "@gpt.read_gpt2",
        "defaults": {"tie_word_embeddings": True, "n_positions": 1024},
    },
    "GPTBigCodeForCausalLM": {
        "arch": "starcoder", "like": "GPT2LMHeadModel", "transposed": "", "read": "@gpt.read_starcoder",
    },
}  # fmt: skip
