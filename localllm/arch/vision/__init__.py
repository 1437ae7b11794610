"""The vision encoders, one module each; clip.projector_type in a GGUF file names the module to use.

Each module has MARKS, the control tokens that it needs, and these functions:

- `read(fields)`: read the hyperparameters.
- `prepare(h, picture)`: cut an image into pictures, and name the tokens that represent them.
- `encode(b, w, h, x)`: the transformer, in verbs.
- `merge_patches(h, x, grid)`: merge neighbouring patches into one row, in NumPy.
- `project(b, w, h, x)`: project to the width of the language model's embeddings, in verbs.

Gemma 3's also has `prepare_crops(h, picture)`: `prepare` with pan-and-scan crops. Files are llama.cpp's mmproj-*.gguf.
"""

from importlib import import_module
from types import ModuleType

from localllm.arch.metadata import HyperparameterReader, require_general
from localllm.arch.vision.hyperparameters import VisionHyperparameters, read_projector_type
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable

FAMILIES = {
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "lfm2": "lfm2vl",
    "mlp": "llava",
    "pixtral": "pixtral",
    "qwen2vl_merger": "qwen2vl",
    "qwen2.5vl_merger": "qwen2vl",
    "qwen3vl_merger": "qwen3vl",
}
KINDS = "mmproj", "model"  # values of general.type in files with a projector
CLIP = "clip"  # the value of general.architecture in all of them


def load_projector(file: GGUFFile) -> tuple[ModuleType, VisionHyperparameters]:
    """Return a projector's module and its hyperparameters.

    Raises ModelError for a file that is not a projector, UnsupportedError for an unsupported one.
    """
    if require_general(file, KINDS) != CLIP:
        raise ModelError(f"{file.path}: expected a vision projector (mmproj), found a language model")
    fields = HyperparameterReader(file.metadata, file.path, 0)
    if not fields.read_flag("has_vision_encoder", False):
        raise UnsupportedError(f"{file.path}: the projector must have a vision encoder")
    name = read_projector_type(fields)
    if name not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise UnsupportedError(
            f"{file.path}: projectors of the type {printable(name)} are not supported ({supported} are)"
        )
    module = import_module(f"localllm.arch.vision.{FAMILIES[name]}")
    return module, module.read(fields)
