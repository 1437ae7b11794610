"""Opens a model by its name, as commands do; `localllm.open`."""

import functools
import os
import warnings
from typing import Any

from localllm import api
from localllm.services.catalogue import resolve


@functools.wraps(api.open_model)
def open_model(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> api.Model:
    """Open a model by path, known name, alias, or hf:OWNER/REPOSITORY, if it is on this computer."""
    if "uploading" in options:  # its name before 0.3
        warnings.warn("the argument uploading is named on_upload now", DeprecationWarning, stacklevel=2)
        options["on_upload"] = options.pop("uploading")
    model = api.open_model(resolve(path) if isinstance(path, str) else path, *arguments, **options)
    for warning in model.warnings:
        warnings.warn(warning, stacklevel=2)
    return model


open_model.__name__ = open_model.__qualname__ = "open"  # as localllm has it
