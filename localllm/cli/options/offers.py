"""Shell completions of values: callbacks for `autocompletion` of options and arguments."""

from collections.abc import Callable, Sequence

Words = list[tuple[str, str]]


def make_offer(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a callback that offers these words."""

    def offer(incomplete: str) -> list[str]:
        return [*words]

    return offer


def offer_models(incomplete: str) -> Words:
    """Offer the names of models on disk, and the user's aliases with their targets.

    Names with a colon are omitted, since bash begins a new word at it.
    """
    from localllm.files.models_folder import get_created_path, list_created_names
    from localllm.files.settings import load_settings
    from localllm.services.hub.catalogue import list_models_on_disk

    names = {name: str(get_created_path(name)) for name in list_created_names()}
    names |= {model.name: str(model.path) for model in list_models_on_disk()} | dict(load_settings().aliases)
    return sorted((name, about) for name, about in names.items() if ":" not in name)


def offer_known_models(incomplete: str) -> Words:
    """Offer the names of models on disk and of models that can be pulled."""
    from localllm.services.hub.catalogue import load_registry

    return sorted(
        ({name: model.description for name, model in load_registry().items()} | dict(offer_models(""))).items()
    )


def offer_commands(incomplete: str) -> Words:
    from localllm.cli.registry import COMMANDS, get_summary

    return [(name, get_summary(name)) for name in COMMANDS]


def offer_config_arguments(incomplete: str) -> Words:
    """Offer the arguments of `localllm config`."""
    return [("path", ""), *offer_commands("")]


def offer_sessions(incomplete: str) -> list[str]:
    from localllm.services.sessions import list_names

    return [*list_names()]


def offer_prompts(incomplete: str) -> list[str]:
    """Offer the names of templates for `run`."""
    from localllm.services.prompt_templates import list_names

    return list_names()


def offer_formats(incomplete: str) -> list[str]:
    """Offer the types of `quantize` once a letter was typed; before that, the shell offers files."""
    from localllm.quant.formats import RECIPES

    return [*RECIPES] if incomplete else []


def offer_templates(incomplete: str) -> list[str]:
    from localllm.text.builtin_templates import BUILTIN_TEMPLATES

    return [*BUILTIN_TEMPLATES]
