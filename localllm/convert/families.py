"""The architectures that can be converted, by their names in config.json.

To add one: a Family in dense.py, experts.py or recurrent.py, with what a layer holds under gguf's names (its
TensorNameMap knows the others'), and what its config.json says besides the usual; and an entry here.
"""

from localllm.convert import dense, experts, recurrent
from localllm.convert.config import Config
from localllm.convert.family import Family
from localllm.files.gguf_header import shown

FAMILIES = {
    "DeepseekV2ForCausalLM": experts.DEEPSEEK2,
    "DeepseekV3ForCausalLM": experts.DEEPSEEK3,
    "GPT2LMHeadModel": dense.GPT2,
    "Gemma2ForCausalLM": dense.GEMMA2,
    "Gemma3ForCausalLM": dense.GEMMA3,
    "Gemma3ForConditionalGeneration": dense.GEMMA3,
    "GemmaForCausalLM": dense.GEMMA,
    "GptOssForCausalLM": experts.GPT_OSS,
    "GraniteForCausalLM": dense.GRANITE,
    "GraniteMoeForCausalLM": experts.GRANITEMOE,
    "LLaMAForCausalLM": dense.LLAMA,
    "LlamaForCausalLM": dense.LLAMA,
    "MambaForCausalLM": recurrent.MAMBA,
    "Ministral3ForCausalLM": dense.MISTRAL3,
    "Mistral3ForConditionalGeneration": dense.MISTRAL3,
    "MistralForCausalLM": dense.LLAMA,
    "MixtralForCausalLM": experts.MIXTRAL,
    "Olmo2ForCausalLM": dense.OLMO2,
    "Olmo3ForCausalLM": dense.OLMO2,
    "OlmoeForCausalLM": experts.OLMOE,
    "Phi3ForCausalLM": dense.PHI3,
    "Qwen2ForCausalLM": dense.QWEN2,
    "Qwen2MoeForCausalLM": experts.QWEN2MOE,
    "Qwen3ForCausalLM": dense.QWEN3,
    "Qwen3MoeForCausalLM": experts.QWEN3MOE,
    "SmolLM3ForCausalLM": dense.SMOLLM3,
    "Starcoder2ForCausalLM": dense.STARCODER2,
}
IN_BLOCKS = {("GptOssForCausalLM", "mxfp4"): experts.GPT_OSS_MXFP4}  # weights that GGUF can have as they are quantized


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
