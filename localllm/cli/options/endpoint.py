"""Options for a server in place of a local model."""

import os
from typing import TYPE_CHECKING, Any

from localllm.cli.parameters import group, option
from localllm.cli.terminal.output import say
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.cli.options.shared import Answers, EngineGroup
    from localllm.services.remote.http import Endpoint

KEY = "LOCALLLM_API_KEY"


@group
class EndpointGroup:
    """Remote server instead of a local model."""

    endpoint: str | None = option(
        "--endpoint", "OpenAI-compatible server, e.g. http://127.0.0.1:8000; MODEL is then one of its models.", "URL"
    )
    api_key_file: str | None = option("--api-key-file", f"File with the server's API key.  [default: ${KEY}]", "FILE")

    def place(self) -> "Endpoint | None":
        if self.endpoint is None:
            if self.api_key_file is not None:
                raise UsageError("api_key_file needs --endpoint URL")
            return None
        from localllm.services.remote.http import Endpoint

        return Endpoint.of(self.endpoint, key_of(self.api_key_file))


def key_of(file: str | None) -> str | None:
    """Return the API key from a file, or from the environment. Raises UsageError."""
    if file is None:
        return os.environ.get(KEY) or None
    from localllm.files.text_file import read_keys

    return read_keys(file)[0]


def open_remote(
    place: "Endpoint", model: str | None, choices: "Answers", engine: "EngineGroup | None" = None, **refused: object
) -> Any:
    """Open a RemoteModel, which has the methods of a local model, at an endpoint.

    Warns of options about weights, which have no effect. refused: options by name that would change the answer and must
    not
    be set. Raises UsageError, EndpointError.
    """
    from localllm.services.remote.model import RemoteModel

    for name, value in refused.items():
        if value:
            raise UsageError(f"{name} is not available with --endpoint: the server sets it")
    if engine is not None and (ignored := about_weights(engine)):
        say(f"localllm: ignored (no effect with --endpoint): {', '.join(ignored)}")
    return RemoteModel(place, model, choices.shape.form())


def about_weights(engine: "EngineGroup") -> list[str]:
    """Return the given options about weights and the KV cache, which a server ignores."""
    usual = type(engine)(cache=type(engine.cache)(), rope=type(engine.rope)())
    names = {"context": "-c", "threads": "-t", "device": "--device", "gpu_layers": "-ngl"}
    ignored = [text for name, text in names.items() if getattr(engine, name) != getattr(usual, name)]
    caches = ["--kv-type"] if vars(engine.cache) != vars(usual.cache) else []
    return [*ignored, *caches, *(["--rope-scaling"] if engine.rope.scaling() else [])]
