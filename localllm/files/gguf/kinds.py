"""Recognize GGUF files that are not models: adapters and control vectors."""

import os
from collections.abc import Mapping

from localllm.errors import ModelError
from localllm.files.gguf.file import GGUFFile

ADAPTER, CONTROL_VECTOR = "adapter", "control vector"
OPTIONS = {ADAPTER: "--lora", CONTROL_VECTOR: "--control-vector"}  # that take such files


def get_kind(metadata: Mapping[str, object]) -> str:
    """Return "adapter", "control vector", or "" for any other file."""
    type, arch = (metadata.get(f"general.{name}") for name in ("type", "architecture"))
    if isinstance(type, str) and type == "adapter":  # a damaged file may have an array
        return ADAPTER
    return CONTROL_VECTOR if isinstance(arch, str) and arch == "controlvector" else ""


def read_kind(path: str | os.PathLike[str]) -> str:
    """Return what get_kind returns for a file; "" if it cannot be read."""
    return read_kind_and_format(path)[0]


def read_kind_and_format(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return what get_kind returns for a file, and its format, such as Q4_K_M; "" if it cannot be read."""
    try:
        with GGUFFile.open(path, ("general.type", "general.architecture", "general.file_type")) as file:
            return get_kind(file.metadata), file.type_name
    except ModelError:
        return "", ""
