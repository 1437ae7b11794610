"""The architectures that can be converted, by their names in config.json.

To add one: a record at the end of the family's file (localllm/arch/checkpoint.py says what it may say).
"""

from collections.abc import Callable
from difflib import get_close_matches

from localllm.convert.config import Config
from localllm.convert.families import (
    bert,
    embedders,
    vision,
)
from localllm.convert.family import Family
from localllm.convert.quantized import find_method, quant_method
from localllm.convert.records import family_named, function, records
from localllm.files.gguf.header import printable

FAMILIES = {
    "BertForMaskedLM": bert.BERT,
    "BertForSequenceClassification": bert.BERT_RANK,
    "BertModel": bert.BERT,
    "CamembertModel": bert.ROBERTA,
    "DistilBertForMaskedLM": bert.DISTILBERT,
    "DistilBertForSequenceClassification": bert.DISTILBERT,
    "DistilBertModel": bert.DISTILBERT,
    "EuroBertModel": embedders.EUROBERT,
    "JinaBertForMaskedLM": embedders.JINA,
    "JinaBertModel": embedders.JINA,
    "ModernBertForMaskedLM": bert.MODERN,
    "ModernBertForSequenceClassification": bert.MODERN_RANK,
    "ModernBertModel": bert.MODERN,
    "NomicBertModel": embedders.NOMIC_PLAIN,
    "Qwen3ForSequenceClassification": embedders.QWEN3_CLASSES,
    "RobertaForSequenceClassification": bert.ROBERTA_RANK,
    "RobertaModel": bert.ROBERTA,
    "XLMRobertaForSequenceClassification": bert.ROBERTA_RANK,
    "XLMRobertaModel": bert.ROBERTA,
}
# Architectures that several families share.
AMBIGUOUS: dict[str, Callable[[Config], Family]] = {
    **dict.fromkeys(
        [f"{name}ForConditionalGeneration" for name in ("InternVL", "Lfm2Vl", "Llava", "LlavaNext")],
        vision.select_text_family,
    ),
    "NomicBertModel": embedders.select_nomic,
    "Qwen3ForCausalLM": embedders.select_qwen3,
}


def class_names() -> set[str]:
    """Return the names in config.json of all architectures that can be converted."""
    return {name.partition("+")[0] for name in (*FAMILIES, *records())}


def keeps_blocks(config: Config) -> bool:
    """Return whether GGUF can hold a checkpoint's quantized weights unchanged."""
    return f"{config.architecture}+{quant_method(config)}" in records()


def family_of(config: Config) -> Family:
    """Find the family of a checkpoint. Raises ModelError if it, or how its weights are quantized, is not supported."""
    name = config.architecture
    if name not in (names := class_names()):
        near = get_close_matches(name, names) or ["LlamaForCausalLM"]
        supported = f"{', '.join(near)} and {len(names) - len(near)} others are"
        if not name:
            raise config.refusal('no "architectures", which names the model class, e.g. ["LlamaForCausalLM"]')
        raise config.refusal(f"architecture {printable(name)} is not supported ({supported})")
    if keeps_blocks(config):
        return family_named(f"{name}+{quant_method(config)}")
    select = AMBIGUOUS.get(name)
    family = select(config) if select else selected(config) if name in records() else FAMILIES[name]
    find_method(config)
    return family


def selected(config: Config) -> Family:
    """Return the family that the record names."""
    name = config.architecture
    select = records()[name][1].get("select")
    return family_named(function(select)(config) if select else name)
