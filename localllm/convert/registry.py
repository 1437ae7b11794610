"""The architectures that can be converted, by their names in config.json.

To add one: a record at the end of the family's file (localllm/arch/checkpoint.py says what it may say).
"""

from collections.abc import Callable
from difflib import get_close_matches

from localllm.convert.config import Config
from localllm.convert.families import (
    baichuan,
    bailing,
    bert,
    bitnet,
    codeshell,
    deepseek,
    deepseek1,
    embedders,
    exaone,
    gemma,
    gemma3n,
    gemma4,
    glm4_moe,
    gpt2,
    gpt_oss,
    hrm_text,
    hybrids,
    internlm2,
    kimi,
    latent,
    mamba,
    mamba2,
    minimax,
    mixtures,
    muse,
    nemotron_h,
    phi3,
    plm,
    qwen4,
    qwen_next,
    smallthinker,
    sparse,
    t5,
    vision,
    windowed,
)
from localllm.convert.family import Family
from localllm.convert.quantized import find_method, quant_method
from localllm.convert.records import family_named, records
from localllm.files.gguf.header import printable

FAMILIES = {
    "AfmoeForCausalLM": mixtures.AFMOE,
    "BaichuanForCausalLM": baichuan.BAICHUAN,
    "BaiChuanForCausalLM": baichuan.BAICHUAN,
    "BailingMoeForCausalLM": bailing.BAILINGMOE,
    "BailingMoeV2ForCausalLM": bailing.BAILINGMOE2,
    "BambaForCausalLM": mamba2.BAMBA,
    "BertForMaskedLM": bert.BERT,
    "BertForSequenceClassification": bert.BERT_RANK,
    "BertModel": bert.BERT,
    "BitNetForCausalLM": bitnet.BITNET,
    "BitnetForCausalLM": bitnet.BITNET,
    "CamembertModel": bert.ROBERTA,
    "CodeShellForCausalLM": codeshell.CODESHELL,
    "Cohere2MoeForCausalLM": windowed.COHERE2MOE,
    "DbrxForCausalLM": mixtures.DBRX,
    "DeepseekForCausalLM": deepseek1.DEEPSEEK,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK2,
    "DeepseekV32ForCausalLM": deepseek.DEEPSEEK32,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK3,
    "DistilBertForMaskedLM": bert.DISTILBERT,
    "DistilBertForSequenceClassification": bert.DISTILBERT,
    "DistilBertModel": bert.DISTILBERT,
    "Dots1ForCausalLM": glm4_moe.DOTS1,
    "Ernie4_5_MoeForCausalLM": mixtures.ERNIE4_5_MOE,
    "EuroBertModel": embedders.EUROBERT,
    "ExaoneForCausalLM": exaone.EXAONE,
    "ExaoneMoeForCausalLM": mixtures.EXAONE_MOE,
    "ExaoneMoEForCausalLM": mixtures.EXAONE_MOE,
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
    "Gemma4UnifiedForConditionalGeneration": gemma4.GEMMA4,
    "Glm4MoeForCausalLM": glm4_moe.GLM4MOE,
    "Glm4MoeLiteForCausalLM": deepseek.GLM4_LITE,
    "Glm4vMoeForConditionalGeneration": glm4_moe.GLM4VMOE,
    "Glm5NextForConditionalGeneration": sparse.GLM5_NEXT,
    "GlmMoeDsaForCausalLM": deepseek.GLM_DSA,
    "GPT2LMHeadModel": gpt2.GPT2,
    "GPTBigCodeForCausalLM": gpt2.STARCODER,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "GPTRefactForCausalLM": codeshell.REFACT,
    "GraniteMoeHybridForCausalLM": hybrids.GRANITEHYBRID,
    "GraniteMoeSWAForCausalLM": windowed.GRANITEMOE_SWA,
    "GraniteSWAForCausalLM": windowed.GRANITE_SWA,
    "HrmTextForCausalLM": hrm_text.HRM_TEXT,
    "HYV3ForCausalLM": mixtures.HY_V3,
    "HYV4ForCausalLM": latent.HY_V4,
    "InternLM2ForCausalLM": internlm2.INTERNLM2,
    "JambaForCausalLM": hybrids.JAMBA,
    "JinaBertForMaskedLM": embedders.JINA,
    "JinaBertModel": embedders.JINA,
    "KimiLinearForCausalLM": kimi.KIMI_LINEAR,
    "KimiLinearModel": kimi.KIMI_LINEAR,
    "LagunaForCausalLM": windowed.LAGUNA,
    "Lfm2ForCausalLM": hybrids.LFM2,
    "LFM2ForCausalLM": hybrids.LFM2,
    "Lfm2MoeForCausalLM": hybrids.LFM2MOE,
    "Lfm2VlForConditionalGeneration": hybrids.LFM2,
    "Llama4ForCausalLM": mixtures.LLAMA4,
    "Llama4ForConditionalGeneration": mixtures.LLAMA4,
    "Mamba2ForCausalLM": mamba2.MAMBA2_ALONE,
    "MambaForCausalLM": mamba.MAMBA,
    "MambaLMHeadModel": mamba.MAMBA,
    "MellumForCausalLM": windowed.MELLUM,
    "MiMoV2FlashForCausalLM": windowed.MIMO2,
    "MiMoV2ForCausalLM": windowed.MIMO2,
    "MiniCPM3ForCausalLM": latent.MINICPM3,
    "MiniCPMV4_6ForConditionalGeneration": vision.MINICPMV4_6,
    "MiniMaxM1ForCausalLM": minimax.MINIMAX01,
    "MiniMaxM2ForCausalLM": minimax.MINIMAX_M2,
    "MiniMaxM3SparseForCausalLM": sparse.MINIMAX_M3,
    "MiniMaxM3SparseForConditionalGeneration": sparse.MINIMAX_M3,
    "MiniMaxText01ForCausalLM": minimax.MINIMAX01,
    "ModernBertForMaskedLM": bert.MODERN,
    "ModernBertForSequenceClassification": bert.MODERN_RANK,
    "ModernBertModel": bert.MODERN,
    "MT5ForConditionalGeneration": t5.T5,
    "MuseGlimmerForConditionalGeneration": muse.MUSE_GLIMMER,
    "NemotronHForCausalLM": nemotron_h.NEMOTRON_H,
    "NomicBertModel": embedders.NOMIC_PLAIN,
    "Phi3ForCausalLM": phi3.PHI3,
    "PhiMoEForCausalLM": phi3.PHIMOE,
    "PLMForCausalLM": plm.PLM,
    "Qwen3_5ForCausalLM": qwen_next.QWEN35,
    "Qwen3_5ForConditionalGeneration": qwen_next.QWEN35,
    "Qwen3_5MoeForCausalLM": qwen_next.QWEN35MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen_next.QWEN35MOE,
    "Qwen4ExpForCausalLM": qwen4.QWEN4EXP,
    "Qwen4ExpForConditionalGeneration": qwen4.QWEN4EXP,
    "Qwen3ForSequenceClassification": embedders.QWEN3_CLASSES,
    "Qwen3NextForCausalLM": qwen_next.QWEN3NEXT,
    "RobertaForSequenceClassification": bert.ROBERTA_RANK,
    "RobertaModel": bert.ROBERTA,
    "SmallThinkerForCausalLM": smallthinker.SMALLTHINKER,
    "SolarOpenForCausalLM": glm4_moe.SOLAR_OPEN,
    "T5EncoderModel": t5.T5_ENCODER,
    "T5ForConditionalGeneration": t5.T5,
    "T5WithLMHeadModel": t5.T5,
    "UMT5ForConditionalGeneration": t5.T5,
    "UMT5Model": t5.T5,
    "XLMRobertaForSequenceClassification": bert.ROBERTA_RANK,
    "XLMRobertaModel": bert.ROBERTA,
    "YoutuForCausalLM": deepseek.YOUTU,
}
# Architectures that several families share.
AMBIGUOUS: dict[str, Callable[[Config], Family]] = {
    **dict.fromkeys(
        [f"{name}ForConditionalGeneration" for name in ("InternVL", "Lfm2Vl", "Llava", "LlavaNext")],
        vision.select_text_family,
    ),
    "NemotronHForCausalLM": nemotron_h.select_nemotron_h,
    "NomicBertModel": embedders.select_nomic,
    "Qwen3ForCausalLM": embedders.select_qwen3,
}
KEEP_BLOCKS = {("GptOssForCausalLM", "mxfp4"): gpt_oss.GPT_OSS_MXFP4}  # quantized weights that GGUF can hold unchanged


def class_names() -> set[str]:
    """Return the names in config.json of all architectures that can be converted."""
    return {*FAMILIES, *records()}


def family_of(config: Config) -> Family:
    """Find the family of a checkpoint. Raises ModelError if it, or how its weights are quantized, is not supported."""
    name = config.architecture
    select = AMBIGUOUS.get(name)
    family = select(config) if select else family_named(name) if name in records() else FAMILIES.get(name)
    if family is None:
        names = class_names()
        near = get_close_matches(name, names) or ["LlamaForCausalLM"]
        supported = f"{', '.join(near)} and {len(names) - len(near)} others are"
        if not name:
            raise config.refusal('no "architectures", which names the model class, e.g. ["LlamaForCausalLM"]')
        raise config.refusal(f"architecture {printable(name)} is not supported ({supported})")
    of_method = KEEP_BLOCKS.get((name, quant_method(config)))
    if of_method is None:
        find_method(config)
    return of_method or family
