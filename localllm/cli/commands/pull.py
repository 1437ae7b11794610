"""localllm pull: download a model from the Hugging Face hub."""

from localllm.cli.open_model import pull_with_progress
from localllm.cli.options.offers import offer_known_models
from localllm.cli.parameters import argument
from localllm.cli.terminal.output import say_dim, write
from localllm.errors import UsageError


def pull(
    names: list[str] = argument(
        "MODEL...",
        "Names from `localllm list --all`, or hf:OWNER/REPOSITORY.",
        offer_known_models,
        also=("-m", "--model"),
    ),
) -> None:
    """Download models from the Hugging Face Hub.

    MODEL is a known name (see `localllm list --all`) or any repository, followed by :QUANTIZATION or by /FILE if you
    want a certain one. A vision model's projector (mmproj) is downloaded too. A repository may also have an adapter
    (LoRA), a GGUF file that other commands take by the same name: --lora hf:OWNER/REPOSITORY. `pull` checks each file's
    size, its SHA-256 as given by the hub, and its header. To resume an interrupted download, run the command again.
    Files go to ~/.local/share/localllm/models, or to the folder in LOCALLLM_MODELS. HF_TOKEN, HF_ENDPOINT and
    HF_HUB_OFFLINE work as in Hugging Face's own programs.

    Examples:
      localllm pull qwen3-4b
      localllm pull qwen3-4b:Q8_0
      localllm pull hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q5_K_M
    """
    from localllm.files.gguf.kinds import OPTIONS, read_kind

    for name in names:
        write(f"{(path := pull_file(name))}\n")
        if kind := read_kind(path):
            say_dim(
                f"this is {'an' if kind[0] == 'a' else 'a'} {kind}: use it with its model and {OPTIONS[kind]} {name}"
            )


def pull_file(name: str) -> str:
    """Pull a model; return the path of its file."""
    from localllm.services.hub.catalogue import load_registry, parse_reference, resolve_alias, resolve_model
    from localllm.services.hub.created_names import find_created

    if created := find_created(resolve_alias(name)):
        return pull_file(created.base)
    resolved = resolve_alias(name)
    reference = parse_reference(resolved)
    if reference is None:
        if resolved.lower() in load_registry():
            raise UsageError(f"{name} is the built-in model; there is nothing to download")
        path = resolve_model(resolved)
        say_dim(f"{resolved} already exists on this computer")
        return path
    return pull_with_progress(reference)
