"""Open a model by its name, as the commands do; implements `localllm.open`."""

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from localllm import api
from localllm.errors import UnknownOptionError
from localllm.services.hub.catalogue import resolve_adapter, resolve_model
from localllm.services.hub.name_settings import describe_unused_parts
from localllm.services.hub.name_values import load_name_values

if TYPE_CHECKING:
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Generation


@functools.wraps(api.open_model)
def open_model(path: str | os.PathLike[str], *arguments: Any, **options: Any) -> api.Model:
    """Open a model by path, known name, alias, or hf:OWNER/REPOSITORY, if it is on this computer.

    The name's settings in config.toml and in Ollama's store apply to arguments that are not given.
    """
    if "uploading" in options:  # its name before 0.3
        warnings.warn("the argument uploading was renamed to on_upload", DeprecationWarning, stacklevel=2)
        options["on_upload"] = options.pop("uploading")
    refuse_unknown_names(options)
    if not isinstance(path, str):
        model = api.open_model(path, *arguments, **options)
    else:
        resolved, values = resolve_model(path), load_name_values(path)
        explicit = {*options, *list(inspect.signature(api.open_model).parameters)[1 : 1 + len(arguments)]}
        options |= {name: value for name, value in values.opening.items() if name not in explicit}
        for name in ("lora", "control_vector"):
            if name in options:
                options[name] = {resolve_adapter(path): scale for path, scale in api.parse_scales(options[name])}
        model = api.open_model(resolved, *arguments, **options)
        model.session.defaults = values.defaults.fill_unset(model.session.defaults)
        is_chosen = bool(options.get("chat_template"))
        model.warnings += [
            *values.warnings,
            *describe_unused_parts(path, resolved, model.tokenizer.chat_template, is_chosen),
        ]
    model.receipt_maker = make_receipt
    for warning in model.warnings:
        warnings.warn(warning, stacklevel=2)
    model.session.on_warning = partial(warn_caller, model)
    return model


def refuse_unknown_names(options: Mapping[str, object]) -> None:
    """Raise UnknownOptionError for an unknown argument; suggest ours for an argument of another program."""
    known = inspect.signature(open_model).parameters
    if unknown := sorted(options.keys() - known.keys()):
        from difflib import get_close_matches  # seldom needed

        from localllm.foreign_names import OPEN_NAMES, describe_foreign_name

        close = get_close_matches(unknown[0], [*known], n=1)
        hint = describe_foreign_name(unknown[0], OPEN_NAMES) or (f"; did you mean {close[0]!r}?" if close else "")
        raise UnknownOptionError(f"localllm.open has no argument {unknown[0]!r}{hint}")


def make_receipt(model: api.Model, prompt: Any, options: "GenerationOptions", answer: "Generation") -> dict[str, Any]:
    """Make the receipt of an answer; see Generation.receipt."""
    from localllm.services.receipts import make_answer_receipt  # seldom needed

    return make_answer_receipt(model, prompt, options, answer)


def warn_caller(model: api.Model, warning: str) -> None:
    """Add a warning to an open model, and issue it through Python's `warnings` at the caller's line."""
    model.warnings.append(warning)
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("localllm", "functools"):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


open_model.__name__ = open_model.__qualname__ = "open"  # its public name in localllm
