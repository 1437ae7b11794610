"""Run a command in this process, with a stand-in for one of the functions it calls."""

import inspect
import io
import sys
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.cli.app import make_context

Told = dict[str, Any]


class Reached(Exception):  # noqa: N818 - no error
    """The stand-in has been called."""


def invoke(name: str, *words: object, stdin: bytes = b"") -> None:
    """Run a command as the program does, but let errors through."""
    above = make_context(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        context = above.command.make_context(name, [str(word) for word in words], parent=above.parent)
        with context:
            context.command.invoke(context)


def told_by(place: tuple[Any, str], name: str, *words: object, stdin: bytes = b"") -> Told:
    """Return the arguments with which a command calls a function, by name; place: the module that has the function."""
    heard: list[Told] = []
    signature = inspect.signature(getattr(*place))

    def stand_in(*arguments: Any, **named: Any) -> None:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        heard.append({key: flat(value) for key, value in bound.arguments.items()})
        raise Reached

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, stand_in)
        with pytest.raises(Reached):
            invoke(name, *words, stdin=stdin)
    return heard[0]


def flat(value: Any) -> Any:
    """Convert records to dictionaries, tuples to lists, functions to None."""
    if is_dataclass(value):
        return {each.name: flat(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {name: flat(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [flat(each) for each in value]
    return None if callable(value) else value


class Opened(nullcontext):
    """A model with the attributes that commands read before it answers."""

    def __init__(self, path: str):
        super().__init__(self)
        self.path, self.files, self.file, self.arch = path, [path], SimpleNamespace(metadata={}), "llama"
        self.name, self.format, self.file_type, self.device, self.context = "Tiny", "Q8_0", "Q8_0", "CPU", 64
        self.is_diffusion, self.prefixes, self.warnings = False, None, list[str]()
        self.session = SimpleNamespace(is_single_turn=False, warning=None, require_conversation=lambda: None)
        self.engine = SimpleNamespace(require_shift=lambda: None, prepare_shift=lambda: None)
