"""What a file says of itself, whatever its architecture: the general.* keys.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#general-metadata
"""

import re

from localllm.errors import ModelError
from localllm.files.checked import Checked, is_text, number_of_strings, show
from localllm.files.gguf_file import GGUFFile
from localllm.files.gguf_header import shown

ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
TEXTS = ("author", "basename", "description", "doi", "finetune", "license", "license.link", "license.name", "name",
         "organization", "quantized_by", "repo_url", "size_label", "type", "url", "uuid", "version")  # fmt: skip
LISTS = ("datasets", "languages", "tags")
COUNTS = ("file_type", "parameter_count", "quantization_version")
MODELS = ("model", "vocab")  # types; others are parts of models, or about them


def require_general(file: GGUFFile, kinds: tuple[str, ...] = MODELS) -> str:
    """The name of the architecture. Raises ModelError for a key of the wrong kind, and for what is none of these kinds
    of files."""
    general = Checked(file.metadata, "general.", file.path)
    for name in filter(general.has, (*TEXTS, *LISTS)):
        key = f"general.{name}"
        if not is_text(file.metadata, key) and (name in TEXTS or number_of_strings(file.metadata, key) is None):
            raise general.wrong(name, "a text" if name in TEXTS else "an array of strings")
    for name in filter(general.has, COUNTS):
        general.whole(name, None, 0, (1 << 63) - 1)
    if (kind := general.text("type", "model")) not in kinds:
        raise general.error(f"a file of the type {show(kind)}, not a model")
    name = general.raw("architecture")
    if not isinstance(name, str):
        raise ModelError(f"{file.path}: no text general.architecture in the metadata; not a language model?")
    if not ARCHITECTURE.fullmatch(name):
        raise ModelError(f"{file.path}: general.architecture: {shown(name)} is no name of an architecture")
    return name
