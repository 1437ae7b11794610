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
    dense,
    embedders,
    gemma,
    gemma3n,
    gemma4,
    gpt2,
    gpt_oss,
    hybrids,
    layer_norms,
    llama,
    mamba,
    mamba2,
    mixtures,
    nemotron_h,
    newer,
    olmo,
    phi3,
    qwen,
    qwen_next,
    seeing,
    t5,
)
from localllm.convert.family import Family
from localllm.files.gguf_header import shown

FAMILIES = {
    "AfmoeForCausalLM": mixtures.AFMOE,
    "ApertusForCausalLM": dense.APERTUS,
    "ArceeForCausalLM": newer.ARCEE,
    "BambaForCausalLM": mamba2.BAMBA,
    "BertForMaskedLM": bert.BERT,
    "BertForSequenceClassification": bert.BERT_RANK,
    "BertModel": bert.BERT,
    "BloomForCausalLM": layer_norms.BLOOM,
    "BloomModel": layer_norms.BLOOM,
    "CamembertModel": bert.ROBERTA,
    "Cohere2ForCausalLM": layer_norms.COHERE2,
    "CohereForCausalLM": layer_norms.COMMAND_R,
    "DbrxForCausalLM": mixtures.DBRX,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK2,
    "DeepseekV32ForCausalLM": deepseek.DEEPSEEK32,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK3,
    "Dots1ForCausalLM": newer.DOTS1,
    "Ernie4_5_MoeForCausalLM": mixtures.ERNIE4_5_MOE,
    "Ernie4_5ForCausalLM": newer.ERNIE4_5,
    "Exaone4ForCausalLM": dense.EXAONE4,
    "ExaoneMoeForCausalLM": mixtures.EXAONE_MOE,
    "ExaoneMoEForCausalLM": mixtures.EXAONE_MOE,
    "FalconForCausalLM": layer_norms.FALCON,
    "FalconH1ForCausalLM": mamba2.FALCON_H1,
    "FalconMambaForCausalLM": mamba.FALCON_MAMBA,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Gemma3ForConditionalGeneration": gemma.GEMMA3,
    "Gemma3nForCausalLM": gemma3n.GEMMA3N,
    "Gemma3nForConditionalGeneration": gemma3n.GEMMA3N,
    "Gemma3TextModel": embedders.GEMMA_EMBEDDING,
    "Gemma4ForCausalLM": gemma4.GEMMA4,
    "Gemma4ForConditionalGeneration": gemma4.GEMMA4,
    "GemmaForCausalLM": gemma.GEMMA,
    "Glm4ForCausalLM": dense.GLM4,
    "Glm4MoeForCausalLM": newer.GLM4MOE,
    "Glm4MoeLiteForCausalLM": deepseek.GLM4_LITE,
    "GlmForCausalLM": dense.CHATGLM,
    "GPT2LMHeadModel": gpt2.GPT2,
    "GPTNeoXForCausalLM": layer_norms.GPTNEOX,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "GraniteForCausalLM": llama.GRANITE,
    "GraniteMoeForCausalLM": llama.GRANITEMOE,
    "GraniteMoeHybridForCausalLM": hybrids.GRANITEHYBRID,
    "GraniteMoeSharedForCausalLM": hybrids.GRANITEMOE_SHARED,
    "HunYuanDenseV1ForCausalLM": dense.HUNYUAN_DENSE,
    "HunYuanMoEV1ForCausalLM": dense.HUNYUAN_MOE,
    "HYV3ForCausalLM": mixtures.HY_V3,
    "Idefics3ForConditionalGeneration": llama.IDEFICS3,
    "InternVLForConditionalGeneration": qwen.QWEN3,
    "Jais2ForCausalLM": layer_norms.JAIS2,
    "JambaForCausalLM": hybrids.JAMBA,
    "JinaBertForMaskedLM": embedders.JINA,
    "JinaBertModel": embedders.JINA,
    "Lfm2ForCausalLM": hybrids.LFM2,
    "Lfm2MoeForCausalLM": hybrids.LFM2MOE,
    "Lfm2VlForConditionalGeneration": hybrids.LFM2,
    "Llama4ForCausalLM": mixtures.LLAMA4,
    "Llama4ForConditionalGeneration": mixtures.LLAMA4,
    "LLaMAForCausalLM": llama.LLAMA,
    "LlamaForCausalLM": llama.LLAMA,
    "LlavaForConditionalGeneration": llama.LLAMA,
    "LlavaNextForConditionalGeneration": llama.LLAMA,
    "Mamba2ForCausalLM": mamba2.MAMBA2_ALONE,
    "MambaForCausalLM": mamba.MAMBA,
    "MiniMaxM2ForCausalLM": newer.MINIMAX_M2,
    "Ministral3ForCausalLM": llama.MISTRAL3,
    "Mistral3ForConditionalGeneration": llama.MISTRAL3,
    "MistralForCausalLM": llama.LLAMA,
    "MixtralForCausalLM": llama.MIXTRAL,
    "ModernBertForMaskedLM": bert.MODERN,
    "ModernBertForSequenceClassification": bert.MODERN_RANK,
    "ModernBertModel": bert.MODERN,
    "MPTForCausalLM": layer_norms.MPT,
    "MptForCausalLM": layer_norms.MPT,
    "MT5ForConditionalGeneration": t5.T5,
    "NemotronForCausalLM": layer_norms.NEMOTRON,
    "NemotronHForCausalLM": nemotron_h.NEMOTRON_H,
    "NomicBertModel": embedders.NOMIC_PLAIN,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO2,
    "OlmoeForCausalLM": olmo.OLMOE,
    "OlmoForCausalLM": olmo.OLMO,
    "Phi3ForCausalLM": phi3.PHI3,
    "PhiForCausalLM": layer_norms.PHI2,
    "Qwen2_5_VLForConditionalGeneration": qwen.QWEN2VL,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen2MoeForCausalLM": qwen.QWEN2MOE,
    "Qwen2VLForConditionalGeneration": qwen.QWEN2VL,
    "Qwen3_5ForCausalLM": qwen_next.QWEN35,
    "Qwen3_5ForConditionalGeneration": qwen_next.QWEN35,
    "Qwen3_5MoeForCausalLM": qwen_next.QWEN35MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen_next.QWEN35MOE,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "Qwen3ForSequenceClassification": embedders.QWEN3_CLASSES,
    "Qwen3Model": qwen.QWEN3,
    "Qwen3MoeForCausalLM": qwen.QWEN3MOE,
    "Qwen3NextForCausalLM": qwen_next.QWEN3NEXT,
    "Qwen3VLForConditionalGeneration": qwen.QWEN3VL,
    "Qwen3VLMoeForConditionalGeneration": qwen.QWEN3VLMOE,
    "RobertaForSequenceClassification": bert.ROBERTA_RANK,
    "RobertaModel": bert.ROBERTA,
    "RWForCausalLM": layer_norms.FALCON,
    "SeedOssForCausalLM": newer.SEED_OSS,
    "SmolLM3ForCausalLM": llama.SMOLLM3,
    "SmolVLMForConditionalGeneration": llama.IDEFICS3,
    "SolarOpenForCausalLM": newer.SOLAR_OPEN,
    "StableLMEpochForCausalLM": layer_norms.STABLELM,
    "StableLmForCausalLM": layer_norms.STABLELM,
    "Starcoder2ForCausalLM": gpt2.STARCODER2,
    "T5ForConditionalGeneration": t5.T5,
    "UMT5ForConditionalGeneration": t5.T5,
    "XLMRobertaForSequenceClassification": bert.ROBERTA_RANK,
    "XLMRobertaModel": bert.ROBERTA,
}
# Those of which there are several under one name.
TOLD_APART: dict[str, Callable[[Config], Family]] = {
    **dict.fromkeys(
        [f"{name}ForConditionalGeneration" for name in ("InternVL", "Lfm2Vl", "Llava", "LlavaNext")], seeing.of_text
    ),
    "NemotronHForCausalLM": nemotron_h.of_nemotron_h,
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
