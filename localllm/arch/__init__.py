"""The architectures, one module each; general.architecture in a GGUF file names the module to use."""

from importlib import import_module
from typing import cast

from localllm.arch.family import Family
from localllm.arch.hyperparameters import Hyperparameters
from localllm.arch.metadata import Fields, require_general, require_kinds
from localllm.arch.metadata_consistency import require_agreement, require_supported_values
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
    """numbers share a scale: x = scale * (256 * high + low).

    In runs with more tokens than both planes are multiplied for, two neighbouring scales are replaced by one if they
    are of about the same size: gemm_int8.py takes 5 % less time then. The high plane's error becomes 3.5e-5 of a
    product's mean square instead of 2.9e-5 (normally distributed numbers). If all neighbours shared a scale, the errors
    of a real model's logits would grow by half; as it is they do not grow, because the few columns with large numbers
    keep scales of their own.

    The high plane alone is the usual int8 quantization (with the scale 256 times as large). Products with both planes
    are practically exact and cost two dot products instead of one; matmul_quantized.py says which kernels use both.
    Where one of the 32 is not finite, the scale is NaN, and so is every product.

    The bytes are striped like the codes of weights (group_format.py): in each 256 columns, numbers 8 q to 8 q + 7 of
    all eight runs of 32 follow each other; columns that make no whole 256 are striped two runs at a time.

    Where words are multiplied (avx2_dots.py), both planes are also written as one plane of 16-bit words, striped in the
    same way; of every 4 columns, the even ones come first.

    Next to the codes are scaled sums of both planes and of the high one, per 32 and per 16 numbers: they are multiplied
    with minimums, and with the offsets of the weights' codes. Scales and sums have a place for every 16 numbers, like
    the lanes of striped dot products, so what belongs to 32 numbers is stored twice. The excess is the high plane's
    sums of integers per 32, times the negative offset of the weights' bytes in gemm_int8.py; where words are
    multiplied, it is the sums of integers per 16, in 16 bits.
    """
    name = require_general(file)
    if name not in ARCHITECTURES:  # before the metadata is checked: its keys may mean anything
        if name in REFUSED:
            raise UnsupportedError(f"{file.path}: architecture {name} is not supported: {REFUSED[name]}")
        known = f"docs/what-runs.md lists the {len(ARCHITECTURES)} that are"
        raise UnsupportedError(f"{file.path}: architecture {printable(name)} is not supported ({known})")
    fields = Fields.of(file)
    require_kinds(fields)
    require_agreement(fields, file.tensors)
    family = cast(Family, import_module(f"localllm.arch.families.{ARCHITECTURES[fields.arch]}"))
    fields.asked.clear()  # forget the names that the checks read
    hyperparameters = family.read(fields)
    require_supported_values(fields)
    return family, hyperparameters
