"""Open LoRA adapters: GGUF files, or folders that PEFT has saved."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.engine.adapter_file import read_adapter
from localllm.engine.adapters import Adapter
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.engine.adapters import ShapedTensor


def open_adapters(
    wanted: "Sequence[tuple[Adapter | str, float]]",
    metadata: Mapping[str, object],
    tensors: "Mapping[str, ShapedTensor]",
) -> tuple[tuple[Adapter, float], ...]:
    """Open adapters for a model, each with its scale.

    wanted: paths or already opened adapters, with their scales. Raises ModelError for an invalid adapter, UsageError
    for two adapters of the same name.
    """
    opened = [
        (each if isinstance(each, Adapter) else open_adapter(each, metadata, tensors), scale) for each, scale in wanted
    ]
    names = [adapter.name for adapter, _ in opened]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two adapters are called {name!r}: rename one of the files")
    return tuple(opened)


def open_adapter(path: str, metadata: Mapping[str, object], tensors: "Mapping[str, ShapedTensor]") -> Adapter:
    """Open an adapter from a GGUF file or a PEFT folder.

    metadata, tensors: of the model that it is for, needed to convert a PEFT folder. Raises ModelError.
    """
    if os.path.isdir(path):
        from localllm.convert.peft import open_peft  # rarely used

        return open_peft(path, metadata, tensors)
    return read_adapter(path)
