"""Vision and audio models around a language model of another family: LLaVA, InternVL, LFM2-VL and others."""

import re
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.family import Family
from localllm.convert.records import family_named
from localllm.files.gguf.header import printable

READERS = {
    "lfm2": family_named("Lfm2ForCausalLM"),
    "llama": family_named("LlamaForCausalLM"),
    "mistral": family_named("LlamaForCausalLM"),
    "qwen2": family_named("Qwen2ForCausalLM"),
    "qwen3": family_named("Qwen3ForCausalLM"),
}
# transformers' defaults of text_config.
OF_LLAMA: dict[str, object] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
OF_MISTRAL = {**OF_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 1 << 17}
DEFAULTS: dict[str, dict[str, object]] = {"llama": OF_LLAMA, "mistral": OF_MISTRAL}
LINE_END = re.compile(r"(model\.)?image_newline")


def select_text_family(config: Config) -> Family:
    """Select the language model's family by text_config. Raises ModelError."""
    kind = config.section("text_config").get("model_type", "llama")
    family = READERS.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise config.refusal(
            f"text_config: model_type {printable(str(kind))} is not supported ({', '.join(READERS)} are)"
        )
    defaults = {**family.defaults, **DEFAULTS.get(kind, {})}
    return replace(family, sees=True, unread=LINE_END, defaults=defaults)
