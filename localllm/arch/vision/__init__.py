"""The vision encoders, one file each; a file's clip.projector_type names the one to use.

A family's file has MARKS: control tokens that it needs; `read(fields)`; `prepared(h, picture)`: into which pictures an
image is cut, and which tokens represent them; `tower(b, w, h, x)`: the transformer, in verbs; `gathered(h, x, grid)`:
which of its rows become one, in NumPy; and `project(b, w, h, x)`: rows as a language model reads them, in verbs. Gemma
3's also has `panned(h, picture)`: as `prepare`, with crops.

Files are those that llama.cpp writes (mmproj-*.gguf).
"""

from importlib import import_module
from types import ModuleType

from localllm.arch.metadata import Fields, require_general
from localllm.arch.vision.hyperparameters import Vision, projector_type
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
KINDS = "mmproj", "model"  # what files with a projector say that they are
CLIP = "clip"  # and their architecture, whatever it is


def projector(file: GGUFFile) -> tuple[ModuleType, Vision]:
    """Return the family's module, and its hyperparameters.

    Raises ModelError for what is no projector or is not supported.
    """
    if require_general(file, KINDS) != CLIP:
        raise ModelError(f"{file.path}: this is a language model, not a vision projector (mmproj)")
    fields = Fields(file.metadata, file.path, 0)
    if not fields.flag("has_vision_encoder", False):
        raise UnsupportedError(f"{file.path}: a projector without a vision encoder")
    name = projector_type(fields)
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedError(
            f"{file.path}: projectors of the type {printable(name)} are not supported; supported: {known}"
        )
    module = import_module(f"localllm.arch.vision.{FAMILIES[name]}")
    return module, module.read(fields)
