"""The architectures, one file each; a file's general.architecture names the one to use."""

from importlib import import_module
from types import ModuleType

from localllm.arch.agreement import require_agreement
from localllm.arch.fields import Fields
from localllm.arch.general import require_general
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.kinds import require_kinds
from localllm.errors import UnsupportedError
from localllm.files.gguf_file import GGUFFile
from localllm.files.gguf_header import shown

ARCHITECTURES = {
    "bitnet": "bitnet",
    "cohere2": "cohere2",
    "command-r": "command_r",
    "deepseek2": "deepseek2",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptneox": "gptneox",
    "granite": "granite",
    "granitemoe": "granite",
    "internlm2": "internlm2",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llama": "llama",
    "llama4": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minicpm": "minicpm",
    "mistral3": "mistral3",
    "mpt": "mpt",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi2": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3moe": "qwen3",
    "qwen3next": "qwen35",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


def architecture(file: GGUFFile) -> tuple[ModuleType, Hyperparameters]:
    """The module for a model (its `read(fields)` and `forward(builder, weights, hyperparameters)`), and what it reads.

    Raises ModelError if the architecture is not supported, or the file lacks what it needs or has what it cannot mean.
    """
    name = require_general(file)
    if name not in ARCHITECTURES:  # whose metadata may mean anything
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"{file.path}: architecture {shown(name)} is not supported (supported: {known})")
    fields = Fields.of(file)
    require_kinds(fields)
    require_agreement(fields, file.tensors)
    module = import_module(f"localllm.arch.{ARCHITECTURES[fields.arch]}")
    return module, module.read(fields)
