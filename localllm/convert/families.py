"""The architectures that can be converted, by their names in config.json.

To add one: a Family in dense.py, experts.py or recurrent.py, with what a layer holds under gguf's names (its
TensorNameMap knows the others'), and what its config.json says besides the usual; and an entry here.
"""

from localllm.convert.config import Config
from localllm.convert.dense import GEMMA, GEMMA2, GEMMA3, GPT2, GRANITE, LLAMA, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from localllm.convert.dense import STARCODER2
from localllm.convert.experts import (
    DEEPSEEK2,
    DEEPSEEK3,
    GPT_OSS,
    GPT_OSS_MXFP4,
    GRANITEMOE,
    MIXTRAL,
    OLMOE,
    QWEN2MOE,
    QWEN3MOE,
)
from localllm.convert.family import Family
from localllm.convert.recurrent import MAMBA
from localllm.files.gguf_header import shown

FAMILIES = {
    "DeepseekV2ForCausalLM": DEEPSEEK2,
    "DeepseekV3ForCausalLM": DEEPSEEK3,
    "GPT2LMHeadModel": GPT2,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "GemmaForCausalLM": GEMMA,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeForCausalLM": GRANITEMOE,
    "LLaMAForCausalLM": LLAMA,
    "LlamaForCausalLM": LLAMA,
    "MambaForCausalLM": MAMBA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
    "OlmoeForCausalLM": OLMOE,
    "Phi3ForCausalLM": PHI3,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2MoeForCausalLM": QWEN2MOE,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3MOE,
    "SmolLM3ForCausalLM": SMOLLM3,
    "Starcoder2ForCausalLM": STARCODER2,
}
IN_BLOCKS = {("GptOssForCausalLM", "mxfp4"): GPT_OSS_MXFP4}  # weights that GGUF can have as they are quantized


def family_of(config: Config) -> Family:
    """The family of a checkpoint. Raises ModelError if it is not supported, or its weights are quantized."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise config.refusal(f"architecture {shown(config.architecture)} is not supported (supported: {known})")
    method = config.get("quantization_config")
    name = str(method.get("quant_method") if isinstance(method, dict) else method)
    if method and (config.architecture, name) not in IN_BLOCKS:
        raise config.refusal(f"the weights are quantized ({shown(name)}); the original checkpoint is needed")
    return IN_BLOCKS[config.architecture, name] if method else family
