"""localllm stop: unload a model of a running server."""

from dataclasses import replace

from localllm.cli.options.offers import offer_models
from localllm.cli.options.one_shot import KEY, read_api_key
from localllm.cli.parameters import argument, option
from localllm.cli.terminal.output import say_dim


def stop(
    name: str = argument("NAME", "Model name, as the server lists it.", offer_models),
    *,
    endpoint: str = option(
        "--endpoint",
        "Address of the server.  [default: http://127.0.0.1:11435]",
        "URL",
        default="http://127.0.0.1:11435",
    ),
    api_key_file: str | None = option("--api-key-file", f"File with the server's API key.  [default: ${KEY}]", "FILE"),
) -> None:
    """Unload a model of a running `localllm serve`.

    Answers that are being generated are finished first. The next request loads the model again.

    Examples:
      localllm stop qwen3-4b
    """
    from localllm.services.remote.http import Endpoint

    url = endpoint.rstrip("/").removesuffix("/v1")
    server = replace(Endpoint.parse(url, read_api_key(api_key_file)), url=url)
    answer = server.post("/api/generate", {"model": name, "keep_alive": 0})
    say_dim(f"{answer.get('model', name)} is unloaded")
