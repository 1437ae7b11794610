"""Read the files of sentence-transformers: pooling, projections and prompts of an embedding model.

modules.json lists the modules and their folders; config_sentence_transformers.json has the prompts. Source:
https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

import json
from pathlib import Path

from localllm.convert.files import read_json, read_text, report_as_model_error
from localllm.convert.safetensors_files import StoredTensor, read_header
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}  # llama.cpp's numbers
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
PROMPT = "localllm.prompt."  # localllm's GGUF keys, followed by a role
ROLES = {"query": ("search_query", "query"), "document": ("search_document", "passage", "document")}
READ = "Transformer", "Pooling", "Normalize", "Dense"  # types of modules that are converted
DENSE = "dense_2", "dense_3"  # GGUF names of the Dense modules, the usual folder's first


def list_modules(folder: Path) -> list[tuple[str, Path]]:
    """List the type and folder of each module, in order; empty without modules.json. Raises ModelError."""
    path = folder / "modules.json"
    text = read_text(path)
    if text is None:
        return []
    with report_as_model_error(path):
        kinds = [(str(module["type"]).rpartition(".")[2], Path(module["path"])) for module in json.loads(text)]
    for _, place in kinds:
        if place.anchor or ".." in place.parts:  # on Windows "/x" and "c:x" are not absolute
            raise ModelError(f"{path}: the folder of a module must be relative (found {printable(str(place))})")
    return [(kind, folder / place) for kind, place in kinds]


def warn_unconverted(folder: Path) -> list[str]:
    """Return a warning for each module that has no counterpart in GGUF."""
    return [
        f"the module {printable(kind)} of modules.json is ignored"
        for kind, _ in list_modules(folder)
        if kind not in READ
    ]


def read_pooling_type(folder: Path) -> int | None:
    """Return GGUF's id of the pooling type; None if no file declares one. Raises ModelError for any other pooling."""
    place = dict(list_modules(folder)).get("Pooling")
    if place is None:
        return None
    path = place / "config.json"
    settings = read_json(path) or {}
    modes = [name for flag, name in FLAGS.items() if settings.get(flag) is True] or [str(settings.get("pooling_mode"))]
    enabled = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in POOLINGS or len(enabled) > 1:
        raise ModelError(f"{path}: the pooling must be mean, cls or lasttoken")
    return POOLINGS[modes[0]]


def load_projections(folder: Path, are_known: bool) -> dict[str, StoredTensor]:
    """Return the matrices of Dense modules by their GGUF names.

    are_known: whether readers of the architecture support them. Raises ModelError if not, and for a matrix with a bias
    or an activation, which GGUF cannot express.
    """
    tensors: dict[str, StoredTensor] = {}
    for kind, place in list_modules(folder):
        if kind != "Dense":
            continue
        settings = read_json(place / "config.json") or {}
        activation = str(settings.get("activation_function", "Tanh")).rpartition(".")[2]
        name = DENSE[0] if place.name == "2_Dense" else DENSE[1]
        if not are_known or settings.get("bias", True) or activation != "Identity" or name in tensors:
            raise ModelError(
                f"{place}: a Dense module must have no bias and the activation Identity, and its architecture one"
            )
        matrix = read_header(place / "model.safetensors").get("linear.weight")
        if matrix is None or matrix.shape != (settings.get("out_features"), settings.get("in_features")):
            raise ModelError(f"{place}: linear.weight must exist, with the sizes in config.json")
        tensors[name] = matrix
    return tensors


def read_prompts(folder: Path) -> dict[str, object]:
    """Read the prefixes of queries and documents as localllm's GGUF keys."""
    path = folder / "config_sentence_transformers.json"
    with report_as_model_error(path):
        prompts_here = (read_json(path) or {}).get("prompts") or {}
        texts = {role: prompts_here[name] for role, names in ROLES.items() for name in names if prompts_here.get(name)}
    return {f"{PROMPT}{role}": text for role, text in texts.items() if isinstance(text, str)}
