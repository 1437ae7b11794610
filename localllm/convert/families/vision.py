"""Vision and audio models around a language model of another family: LLaVA, InternVL, LFM2-VL and others."""

import re
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.families import dense, hybrids, llama, qwen, qwen_next
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.rope_scaling import SECTIONS
from localllm.files.gguf.header import printable

READERS = {
    "lfm2": hybrids.LFM2,
    "llama": llama.LLAMA,
    "mistral": llama.LLAMA,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
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


PAINTS = re.compile(r"(model\.)?(aligner|vqmodel|generation_(embeddings|aligner|head))\..*")
JANUS = replace(llama.LLAMA, sees=True, unread=PAINTS, defaults=OF_LLAMA)


def paddleocr(config: Config) -> CheckpointFacts:
    """Read PaddleOCR-VL's language model: ERNIE 4.5 with M-RoPE on pairs half a head apart."""
    config.only("use_bias", False)
    return decoder(config, scalings=(SECTIONS,))


PADDLEOCR = replace(
    llama.ERNIE4_5,
    arch="paddleocr",
    read=paddleocr,
    sees=True,
    unread=re.compile(r"(mlp_AR|model\.projector)\..*"),
    defaults={**llama.ERNIE4_5.defaults, "head_dim": 128},
)
SOUNDS = re.compile(r"(model\.)?audio_tower\..*")
EXAONE4_5 = replace(dense.EXAONE4, sees=True)
MINICPMV4_6 = replace(qwen_next.QWEN35, unread=re.compile(r"(model\.)?merger\..*"))
QWEN2_AUDIO = replace(qwen.QWEN2, sees=True, unread=SOUNDS)
VOXTRAL = replace(llama.LLAMA, sees=True, unread=SOUNDS)
