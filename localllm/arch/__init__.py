"""The architectures, one module each, which general.architecture in a GGUF file names."""

from functools import partial
from importlib import import_module
from typing import Any

from localllm.arch.decoder import apply_decoder, note_missing_dense
from localllm.arch.family import Family
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.metadata import (
    HyperparameterReader,
    require_agreement,
    require_general,
    require_supported_values,
    require_types,
)
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable

# Architectures in a module of their name, with "_" for "-".
NAMED_AS_MODULES = """
    afmoe apertus arcee arctic baichuan bailingmoe3 bert bitnet bloom chameleon chatglm codeshell cogvlm cohere2moe
    command-r dbrx deci deepseek deepseek2 deepseek32 deepseek4 dots1 dots3note eurobert exaone exaone-moe exaone4
    falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite
    granite_swa granitehybrid graniteswitch grok grovemoe hrm_text hy_v4 jais jamba kimi-k3 kimi-linear laguna lfm2
    llama llama4 mamba mamba2 maple mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3
    modern-bert mpt muse-glimmer nanbeige nemotron nemotron_h nomic-bert olmo olmo2 olmoe phi2 phi3 phimoe plamo
    plamo2 plamo3 plm qwen2 qwen2moe qwen3 qwen35 qwen3vl qwen4exp rwkv6 rwkv7 seed_oss smallthinker smollm3
    spark2_5 stablelm starcoder2 step35 t5 talkie
"""
ARCHITECTURES = {
    **{name: name.replace("-", "_") for name in NAMED_AS_MODULES.split()},
    "arwkv7": "rwkv7", "bailingmoe": "deepseek", "bailingmoe2": "dots1", "cohere2": "command_r",
    "deepseek2-ocr": "deepseek", "dream": "diffusion_lm", "ernie4_5": "llama", "ernie4_5-moe": "deepseek",
    "gemma-embedding": "gemma3", "glm-dsa": "deepseek32", "granitemoe": "granite", "hunyuan-dense": "hunyuan",
    "hunyuan-moe": "hunyuan", "hunyuan_vl": "hunyuan", "hy_v3": "dots1", "internlm2": "llama", "jais2": "nemotron",
    "jina-bert-v2": "jina_bert", "jina-bert-v3": "nomic_bert", "lfm2moe": "lfm2", "llada": "diffusion_lm",
    "llada-moe": "diffusion_lm", "llama-embed": "eurobert", "maincoder": "hunyuan", "mistral4": "deepseek2",
    "nemotron_h_moe": "nemotron_h", "neo-bert": "eurobert", "nomic-bert-moe": "nomic_bert", "openelm": "qwen3",
    "orion": "stablelm", "paddleocr": "qwen2", "pangu-embedded": "qwen2", "qwen": "qwen2", "qwen2vl": "qwen2",
    "qwen35moe": "qwen35", "qwen3moe": "qwen3", "qwen3next": "qwen35", "qwen3vlmoe": "qwen3vl",
    "refact": "baichuan", "rnd1": "diffusion_lm", "rwkv6qwen2": "rwkv6", "starcoder": "gpt2", "t5encoder": "t5",
    "xverse": "llama",
}  # fmt: skip

SPEECH, DRAFTS = "localllm does not generate speech", "a draft head runs only together with the model it drafts for"
# Further architectures of llama.cpp, and why they do not run.
REFUSED = {
    "controlvector": "this is a control vector, not a model: use its model with --control-vector FILE",
    "clip": "an image encoder does not run on its own (localllm embed takes CLIP models with a text encoder)",
    "dflash": DRAFTS,
    "eagle3": f"{DRAFTS}: use it by --speculate draft:FILE",
    "gemma4-assistant": DRAFTS,
    "gptj": "llama.cpp has only its name",
    "pockettts": SPEECH,
    "qwen3tts": SPEECH,
    "wavtokenizer-dec": SPEECH,
}


def load_architecture(file: GGUFFile) -> tuple[Family, Hyperparameters]:
    """Return the family of a model, and its hyperparameters.

    Raises ModelError if the architecture is not supported, if metadata or tensors are missing, or if they disagree.
    """
    name = require_general(file)
    if name not in ARCHITECTURES:  # before the metadata is checked: its keys may mean anything
        if name in REFUSED:
            raise UnsupportedError(f"{file.path}: architecture {name} is not supported: {REFUSED[name]}")
        supported = f"docs/what-runs.md lists the {len(ARCHITECTURES)} that are"
        raise UnsupportedError(f"{file.path}: architecture {printable(name)} is not supported ({supported})")
    fields = HyperparameterReader.from_file(file)
    require_types(fields)
    require_agreement(fields, file.tensors)
    family = load_family(fields.arch)
    fields.asked.clear()  # forget the names that the checks read
    hyperparameters = family.read(fields)
    require_supported_values(fields)
    if file.tensors:
        note_missing_dense(fields, file.tensors)
    return family, hyperparameters


def load_family(architecture: str) -> Family:
    """Import the module of a supported architecture; without a `forward` of its own, it is a decoder of its `block`."""
    family: Any = import_module(f"localllm.arch.families.{ARCHITECTURES[architecture]}")
    if not hasattr(family, "forward"):
        family.forward = partial(apply_decoder, block=family.block)
    return family
