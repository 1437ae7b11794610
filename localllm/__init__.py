"""Large language models from GGUF files, on your own computer.

    import localllm
    with localllm.open("model.gguf") as model:
        for piece in model.chat([{"role": "user", "content": "Hi"}], max_tokens=64):
            print(piece, end="", flush=True)

Importing localllm does not import NumPy: open, Model and Tokenizer are imported on first use.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from localllm.errors import ContextError, LocalllmError, MemoryLimitError, ModelError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from localllm.api import Model
    from localllm.api import open_model as open
    from localllm.text.tokenizer import Tokenizer

    __version__: str

__all__ = [
    "ContextError",
    "LocalllmError",
    "MemoryLimitError",
    "Model",
    "ModelError",
    "Tokenizer",
    "UsageError",
    "__version__",
    "builtin_model",
    "open",
]

# In the repository, quant/ is next to this folder; it is installed as localllm.quant.
if not os.path.isdir(os.path.join(__path__[0], "quant")):
    __path__.append(os.path.dirname(__path__[0]))

_LAZY = {
    "open": "localllm.services.hub.open_by_name:open_model",
    "Model": "localllm.api:Model",
    "Tokenizer": "localllm.text.tokenizer:Tokenizer",
}
# Names that open a model in other packages.
_ELSEWHERE = {"AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "LLM", "Llama", "load", "load_model", "pipeline"}


def builtin_model() -> "Path":
    """Return the path of the tiny model that comes with localllm and answers questions about it."""
    from pathlib import Path

    return Path(__file__).parent / "data" / "guide.gguf"


if not TYPE_CHECKING:  # type checkers see the imports above and report every other name

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name == "__version__":
            from importlib.metadata import version

            value: object = version("localllm")
        elif name in _LAZY:
            module, _, attribute = _LAZY[name].partition(":")
            value = getattr(import_module(module), attribute)
        else:
            hint = ": use localllm.open(MODEL)" if name in _ELSEWHERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, including those not imported yet."""
    return [*__all__]
