"""The architectures, one module each; general.architecture in a GGUF file names the module to use."""

from importlib import import_module
from typing import cast

from localllm.arch.family import Family
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.metadata import Fields, require_general, require_kinds
from localllm.arch.metadata_consistency import require_agreement, require_supported_values
from localllm.arch.pooling import note_missing_dense
from localllm.errors import UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable

ARCHITECTURES = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "arctic": "arctic",
    "baichuan": "baichuan",
    "arwkv7": "rwkv7",
    "bailingmoe": "deepseek",
    "bailingmoe2": "dots1",
    "bailingmoe3": "bailingmoe3",
    "bitnet": "bitnet",
    "bert": "bert",
    "bloom": "bloom",
    "chameleon": "chameleon",
    "chatglm": "chatglm",
    "codeshell": "codeshell",
    "cogvlm": "cogvlm",
    "cohere2": "cohere2",
    "cohere2moe": "cohere2moe",
    "command-r": "command_r",
    "dbrx": "dbrx",
    "deci": "deci",
    "deepseek": "deepseek",
    "deepseek2": "deepseek2",
    "deepseek32": "deepseek32",
    "deepseek2-ocr": "deepseek",
    "deepseek4": "deepseek4",
    "dots1": "dots1",
    "dots3note": "dots3note",
    "ernie4_5": "llama",
    "ernie4_5-moe": "deepseek",
    "dream": "diffusion_lm",
    "eurobert": "eurobert",
    "exaone": "exaone",
    "exaone-moe": "exaone_moe",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "falcon-h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "gemma-embedding": "gemma_embedding",
    "glm4": "glm4",
    "glm4moe": "glm4moe",
    "glm-dsa": "deepseek32",
    "glm5-next": "glm5_next",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptneox": "gptneox",
    "granite": "granite",
    "granite_swa": "granite_swa",
    "granitehybrid": "granitehybrid",
    "granitemoe": "granite",
    "graniteswitch": "graniteswitch",
    "grok": "grok",
    "grovemoe": "grovemoe",
    "hrm_text": "hrm_text",
    "hunyuan-dense": "hunyuan",
    "hunyuan-moe": "hunyuan",
    "hunyuan_vl": "hunyuan",
    "hy_v3": "dots1",
    "hy_v4": "hy_v4",
    "internlm2": "internlm2",
    "jais": "jais",
    "jais2": "nemotron",
    "jamba": "jamba",
    "jina-bert-v2": "jina_bert",
    "jina-bert-v3": "nomic_bert",
    "kimi-k3": "kimi_k3",
    "kimi-linear": "kimi_linear",
    "laguna": "laguna",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llada": "diffusion_lm",
    "llada-moe": "diffusion_lm",
    "llama": "llama",
    "llama-embed": "eurobert",
    "llama4": "llama4",
    "maincoder": "hunyuan",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "maple": "maple",
    "mellum": "mellum",
    "mimo2": "mimo2",
    "minicpm": "minicpm",
    "minicpm3": "minicpm3",
    "minimax-01": "minimax_01",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "mistral3": "mistral3",
    "mistral4": "deepseek2",
    "modern-bert": "modern_bert",
    "mpt": "mpt",
    "muse-glimmer": "muse_glimmer",
    "nanbeige": "nanbeige",
    "neo-bert": "eurobert",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "nomic-bert": "nomic_bert",
    "nomic-bert-moe": "nomic_bert",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "openelm": "qwen3",
    "orion": "stablelm",
    "paddleocr": "qwen2vl",
    "pangu-embedded": "qwen2",
    "phi2": "phi2",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "plamo": "plamo",
    "plamo2": "plamo2",
    "plamo3": "plamo3",
    "plm": "plm",
    "qwen": "qwen2",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2moe",
    "qwen2vl": "qwen2vl",
    "qwen3": "qwen3",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3moe": "qwen3",
    "qwen3next": "qwen35",
    "qwen3vl": "qwen3vl",
    "qwen3vlmoe": "qwen3vl",
    "qwen4exp": "qwen4exp",
    "refact": "baichuan",
    "rnd1": "diffusion_lm",
    "rwkv6": "rwkv6",
    "rwkv6qwen2": "rwkv6",
    "rwkv7": "rwkv7",
    "seed_oss": "seed_oss",
    "smallthinker": "smallthinker",
    "smollm3": "smollm3",
    "spark2_5": "spark2_5",
    "stablelm": "stablelm",
    "starcoder": "gpt2",
    "starcoder2": "starcoder2",
    "step35": "step35",
    "t5": "t5",
    "t5encoder": "t5",
    "talkie": "talkie",
    "xverse": "llama",
}

SPEECH, DRAFTS = "localllm does not generate speech", "a draft head runs only together with the model it drafts for"
# Further architectures of llama.cpp, and why they do not run.
REFUSED = {
    "clip": "an image encoder does not run on its own (localllm embed takes CLIP models with a text encoder)",
    "dflash": DRAFTS,
    "eagle3": f"{DRAFTS}: use it by --speculate draft:FILE",
    "gemma4-assistant": DRAFTS,
    "gptj": "nothing here computes it, and llama.cpp has only its name",
    "pockettts": SPEECH,
    "qwen3tts": SPEECH,
    "wavtokenizer-dec": SPEECH,
}


def architecture(file: GGUFFile) -> tuple[Family, Hyperparameters]:
    """Return the family of a model, and its hyperparameters.

    Raises ModelError if the architecture is not supported, if metadata or tensors are missing, or if they disagree.
    """
    name = require_general(file)
    if name not in ARCHITECTURES:  # before the metadata is checked: its keys may mean anything
        if name in REFUSED:
            raise UnsupportedError(f"{file.path}: architecture {name} is not supported: {REFUSED[name]}")
        supported = f"docs/what-runs.md lists the {len(ARCHITECTURES)} that are"
        raise UnsupportedError(f"{file.path}: architecture {printable(name)} is not supported ({supported})")
    fields = Fields.of(file)
    require_kinds(fields)
    require_agreement(fields, file.tensors)
    family = cast(Family, import_module(f"localllm.arch.families.{ARCHITECTURES[fields.arch]}"))
    fields.asked.clear()  # forget the names that the checks read
    hyperparameters = family.read(fields)
    require_supported_values(fields)
    if file.tensors:
        note_missing_dense(fields, file.tensors)
    return family, hyperparameters
