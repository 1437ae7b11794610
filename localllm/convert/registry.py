"""The architectures that can be converted, by their names in config.json.

To add one: a record at the end of the family's file (localllm/arch/checkpoint.py says what it may say).
"""

from collections.abc import Callable
from difflib import get_close_matches

from localllm.convert.config import Config
from localllm.convert.families import (
    bert,
    embedders,
    gemma3n,
    gemma4,
    gpt_oss,
    hrm_text,
    hybrids,
    mamba,
    mamba2,
    nemotron_h,
    qwen4,
    qwen35,
    t5,
    vision,
)
from localllm.convert.family import Family
from localllm.convert.quantized import find_method, quant_method
from localllm.convert.records import family_named, records
from localllm.files.gguf.header import printable

FAMILIES = {
    "BambaForCausalLM": mamba2.BAMBA,
    "BertForMaskedLM": bert.BERT,
    "BertForSequenceClassification": bert.BERT_RANK,
    "BertModel": bert.BERT,
    "CamembertModel": bert.ROBERTA,
    "DistilBertForMaskedLM": bert.DISTILBERT,
    "DistilBertForSequenceClassification": bert.DISTILBERT,
    "DistilBertModel": bert.DISTILBERT,
    "EuroBertModel": embedders.EUROBERT,
    "FalconH1ForCausalLM": mamba2.FALCON_H1,
    "FalconMambaForCausalLM": mamba.FALCON_MAMBA,
    "Gemma3nForCausalLM": gemma3n.GEMMA3N,
    "Gemma3nForConditionalGeneration": gemma3n.GEMMA3N,
    "Gemma4ForCausalLM": gemma4.GEMMA4,
    "Gemma4ForConditionalGeneration": gemma4.GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": gemma4.GEMMA4,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "GraniteMoeHybridForCausalLM": hybrids.GRANITEHYBRID,
    "HrmTextForCausalLM": hrm_text.HRM_TEXT,
    "JambaForCausalLM": hybrids.JAMBA,
    "JinaBertForMaskedLM": embedders.JINA,
    "JinaBertModel": embedders.JINA,
    "Lfm2ForCausalLM": hybrids.LFM2,
    "LFM2ForCausalLM": hybrids.LFM2,
    "Lfm2MoeForCausalLM": hybrids.LFM2MOE,
    "Lfm2VlForConditionalGeneration": hybrids.LFM2,
    "Mamba2ForCausalLM": mamba2.MAMBA2_ALONE,
    "MambaForCausalLM": mamba.MAMBA,
    "MambaLMHeadModel": mamba.MAMBA,
    "MiniCPMV4_6ForConditionalGeneration": vision.MINICPMV4_6,
    "ModernBertForMaskedLM": bert.MODERN,
    "ModernBertForSequenceClassification": bert.MODERN_RANK,
    "ModernBertModel": bert.MODERN,
    "MT5ForConditionalGeneration": t5.T5,
    "NemotronHForCausalLM": nemotron_h.NEMOTRON_H,
    "NomicBertModel": embedders.NOMIC_PLAIN,
    "Qwen3_5ForCausalLM": qwen35.QWEN35,
    "Qwen3_5ForConditionalGeneration": qwen35.QWEN35,
    "Qwen3_5MoeForCausalLM": qwen35.QWEN35MOE,
    "Qwen3_5MoeForConditionalGeneration": qwen35.QWEN35MOE,
    "Qwen4ExpForCausalLM": qwen4.QWEN4EXP,
    "Qwen4ExpForConditionalGeneration": qwen4.QWEN4EXP,
    "Qwen3ForSequenceClassification": embedders.QWEN3_CLASSES,
    "Qwen3NextForCausalLM": qwen35.QWEN3NEXT,
    "RobertaForSequenceClassification": bert.ROBERTA_RANK,
    "RobertaModel": bert.ROBERTA,
    "T5EncoderModel": t5.T5_ENCODER,
    "T5ForConditionalGeneration": t5.T5,
    "T5WithLMHeadModel": t5.T5,
    "UMT5ForConditionalGeneration": t5.T5,
    "UMT5Model": t5.T5,
    "XLMRobertaForSequenceClassification": bert.ROBERTA_RANK,
    "XLMRobertaModel": bert.ROBERTA,
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
