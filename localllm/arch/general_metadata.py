"""The general.* keys, which describe a file of any architecture.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#general-metadata
"""

import re

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata_reader import Checked, is_text, is_whole, number_of_strings, show

ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
TEXTS = ("author", "basename", "description", "doi", "finetune", "license", "license.link", "license.name", "name",
         "organization", "quantized_by", "repo_url", "size_label", "type", "url", "uuid", "version")  # fmt: skip
LISTS = ("datasets", "languages", "tags")
COUNTS = ("file_type", "parameter_count", "quantization_version")
MODELS = ("model", "vocab")  # types; others are parts of models, or about them


def require_general(file: GGUFFile, kinds: tuple[str, ...] = MODELS) -> str:
    """Return the architecture's name, and note general metadata of an unexpected form.

    Raises ModelError for what is none of these kinds of files.
    """
    general = Checked(file.metadata, "general.", file.path, file.oddities)
    for name in filter(general.has, (*TEXTS, *LISTS)):
        key = f"general.{name}"
        if not is_text(file.metadata, key) and (name in TEXTS or number_of_strings(file.metadata, key) is None):
            general.oddities.note(f"{key} is not a {'text' if name in TEXTS else 'list of texts'}")
    for name in filter(general.has, COUNTS):
        value = general.raw(name)
        if not is_whole(value) or not 0 <= value < 1 << 63:
            general.oddities.note(f"general.{name} is not a number from 0 up")
    if (kind := general.text("type", "model")) not in kinds:
        raise general.error(f"a file of the type {show(kind)}, not a model")
    name = general.raw("architecture")
    if not isinstance(name, str):
        raise ModelError(f"{file.path}: the metadata has no string general.architecture; is this a language model?")
    if not ARCHITECTURE.fullmatch(name):
        raise ModelError(f"{file.path}: general.architecture: {printable(name)} is not the name of an architecture")
    return name
