"""Vision models around a language model of another family: LLaVA, InternVL, LFM2-VL."""

from localllm.convert.config import Config
from localllm.files.gguf.header import printable

KINDS = ("lfm2", "llama", "mistral", "qwen2", "qwen3")


def select(config: Config) -> str:
    """Name the record of the language model by text_config. Raises ModelError."""
    kind = config.section("text_config").get("model_type", "llama")
    if kind not in KINDS:
        raise config.refusal(
            f"text_config: model_type {printable(str(kind))} is not supported ({', '.join(KINDS)} are)"
        )
    return f"vision+{kind}"
