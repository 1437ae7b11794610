"""localllm pull: bring a model from the Hugging Face hub."""

from typing import Annotated

from localllm.cli.command import argument
from localllm.cli.pulling import pull_shown
from localllm.cli.terminal import write
from localllm.errors import UsageError


def pull(model: Annotated[str, argument("MODEL", "A known name, or hf:OWNER/REPOSITORY.")]) -> None:
    """Bring a model from the Hugging Face hub, and print its path.

    \b
    localllm pull qwen3-4b                    a known one: see `localllm list --all`
    localllm pull qwen3-4b:Q8_0               in another quantization
    localllm pull hf:OWNER/REPOSITORY         any; with :Q8_0 or /FILE.gguf behind it

    Everything is checked: the size, the SHA-256 that the hub says, the header. After Ctrl-C, a broken connection or
    worse, the same command goes on where it stopped. Files go to ~/.local/share/localllm/models, or where
    LOCALLLM_MODELS says. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold as in Hugging Face's programs.
    """
    from localllm.services.catalogue import aliased, known_models, of_nothing, referred

    name = aliased(model)
    reference = referred(name)
    if reference is None:
        if name.lower() in known_models():
            raise UsageError(f"{model} comes with localllm: there is nothing to pull")
        raise of_nothing(name)
    write(pull_shown(reference) + "\n")
