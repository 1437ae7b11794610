"""The architectures that can be converted, by their names in config.json.

To add one: a Family in a file here, with what a layer holds under gguf's names (its TensorNameMap knows the others'),
and what its config.json says besides the usual; and an entry in the table.
"""

from collections.abc import Callable
from difflib import get_close_matches

from localllm.convert.config import Config
from localllm.convert.families import (
    bert,
    deepseek,
    embedders,
    gemma,
    gpt2,
    gpt_oss,
    hybrids,
    llama,
    mamba,
    mamba2,
    newer,
    olmo,
    phi3,
    qwen,
    t5,
)
from localllm.convert.family import Family
from localllm.files.gguf_header import shown

FAMILIES = {
    "BertForMaskedLM": bert.BERT,
    "BertForSequenceClassification": bert.BERT_RANK,
    "BertModel": bert.BERT,
    "CamembertModel": bert.ROBERTA,
    "ArceeForCausalLM": newer.ARCEE,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK2,
    "DeepseekV32ForCausalLM": deepseek.DEEPSEEK32,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK3,
    "Dots1ForCausalLM": newer.DOTS1,
    "Ernie4_5ForCausalLM": newer.ERNIE4_5,
    "FalconH1ForCausalLM": mamba2.FALCON_H1,
    "GPT2LMHeadModel": gpt2.GPT2,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3,
    "Gemma3TextModel": embedders.GEMMA_EMBEDDING,
    "GemmaForCausalLM": gemma.GEMMA,
    "Glm4MoeForCausalLM": newer.GLM4MOE,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "GraniteForCausalLM": llama.GRANITE,
    "GraniteMoeForCausalLM": llama.GRANITEMOE,
    "GraniteMoeHybridForCausalLM": hybrids.GRANITEHYBRID,
    "Idefics3ForConditionalGeneration": llama.IDEFICS3,
    "JambaForCausalLM": hybrids.JAMBA,
    "JinaBertForMaskedLM": embedders.JINA,
    "JinaBertModel": embedders.JINA,
    "Lfm2ForCausalLM": hybrids.LFM2,
    "LLaMAForCausalLM": llama.LLAMA,
    "LlamaForCausalLM": llama.LLAMA,
    "Mamba2ForCausalLM": mamba2.MAMBA2_ALONE,
    "MambaForCausalLM": mamba.MAMBA,
    "Ministral3ForCausalLM": llama.MISTRAL3,
    "Mistral3ForConditionalGeneration": llama.MISTRAL3,
    "MiniMaxM2ForCausalLM": newer.MINIMAX_M2,
    "MistralForCausalLM": llama.LLAMA,
    "MixtralForCausalLM": llama.MIXTRAL,
    "ModernBertForMaskedLM": bert.MODERN,
    "ModernBertForSequenceClassification": bert.MODERN_RANK,
    "ModernBertModel": bert.MODERN,
    "NomicBertModel": embedders.NOMIC_PLAIN,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO2,
    "OlmoeForCausalLM": olmo.OLMOE,
    "Phi3ForCausalLM": phi3.PHI3,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen2MoeForCausalLM": qwen.QWEN2MOE,
    "Qwen2VLForConditionalGeneration": qwen.QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": qwen.QWEN2VL,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3ForSequenceClassification": embedders.QWEN3_CLASSES,
    "Qwen3Model": qwen.QWEN3,
    "Qwen3MoeForCausalLM": qwen.QWEN3MOE,
    "RobertaForSequenceClassification": bert.ROBERTA_RANK,
    "RobertaModel": bert.ROBERTA,
    "SeedOssForCausalLM": newer.SEED_OSS,
    "SmolVLMForConditionalGeneration": llama.IDEFICS3,
    "SmolLM3ForCausalLM": llama.SMOLLM3,
    "Starcoder2ForCausalLM": gpt2.STARCODER2,
    "MT5ForConditionalGeneration": t5.T5,
    "T5ForConditionalGeneration": t5.T5,
    "UMT5ForConditionalGeneration": t5.T5,
    "XLMRobertaForSequenceClassification": bert.ROBERTA_RANK,
    "XLMRobertaModel": bert.ROBERTA,
}
# Those of which there are several under one name.
TOLD_APART: dict[str, Callable[[Config], Family]] = {
    "NomicBertModel": embedders.of_nomic,
    "Qwen3ForCausalLM": embedders.of_qwen3,
}
IN_BLOCKS = {("GptOssForCausalLM", "mxfp4"): gpt_oss.GPT_OSS_MXFP4}  # weights that GGUF can have as they are quantized


def family_of(config: Config) -> Family:
    """The family of a checkpoint. Raises ModelError if it is not supported, or its weights are quantized."""
    told_apart = TOLD_APART.get(config.architecture)
    family = told_apart(config) if told_apart else FAMILIES.get(config.architecture)
    if family is None:
        near = get_close_matches(config.architecture, FAMILIES) or ["LlamaForCausalLM"]
        known = f"{', '.join(near)} and {len(FAMILIES) - len(near)} others are"
        raise config.refusal(f"architecture {shown(config.architecture)} is not supported ({known})")
    method = config.get("quantization_config")
    name = str(method.get("quant_method") if isinstance(method, dict) else method)
    if method and (config.architecture, name) not in IN_BLOCKS:
        raise config.refusal(f"the weights are quantized ({shown(name)}); the original checkpoint is needed")
    return IN_BLOCKS[config.architecture, name] if method else family
