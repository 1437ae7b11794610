"""What sentence-transformers' files say of a checkpoint: how rows become one, and what stands before a text.

modules.json lists the modules and their folders; config_sentence_transformers.json has the prompts.
Source: https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

import json
from pathlib import Path
from typing import Any

from localllm.convert.files import read_json, read_text, understood
from localllm.errors import ModelError

POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}  # llama.cpp's numbers
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
PROMPT = "localllm.prompt."  # before a role: keys of GGUF files that localllm writes


def pooling_type(folder: Path) -> int | None:
    """The number of the pooling; None if no file tells. Raises ModelError for one that GGUF cannot tell."""
    path = folder / "modules.json"
    text = read_text(path)
    if text is None:
        return None
    with understood(path):
        kinds = {module["type"].rpartition(".")[2]: module["path"] for module in json.loads(text)}
    if "Pooling" not in kinds:
        return None
    path = folder / kinds["Pooling"] / "config.json"
    if kinds["Pooling"].startswith(("/", "..")):
        raise ModelError(f"{folder / 'modules.json'}: a module lies in another place, {kinds['Pooling']}")
    said = read_json(path) or {}
    chosen = [name for flag, name in FLAGS.items() if said.get(flag) is True] or [str(said.get("pooling_mode"))]
    others = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS or len(others) > 1:
        raise ModelError(f"{path}: only the mean, the first and the last token are supported as poolings")
    return POOLINGS[chosen[0]]


def prompts(folder: Path) -> dict[str, Any]:
    """What stands before queries and documents, as keys of a GGUF file."""
    path = folder / "config_sentence_transformers.json"
    with understood(path):
        found = (read_json(path) or {}).get("prompts") or {}
        texts = {role: found[name] for role, names in ROLES.items() for name in names if found.get(name)}
    return {f"{PROMPT}{role}": text for role, text in texts.items() if isinstance(text, str)}


ROLES = {"query": ("search_query", "query"), "document": ("search_document", "passage", "document")}
