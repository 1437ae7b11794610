"""Opening a model by its name, as commands do it."""

import functools
import os
from typing import Any

from localllm import api
from localllm.services.catalogue import resolve


@functools.wraps(api.open_model)
def open_model(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> api.Model:
    """The same by a name, too: of a known model, an alias, or hf:OWNER/REPOSITORY, that is on this computer."""
    return api.open_model(resolve(path) if isinstance(path, str) else path, *arguments, **options)
