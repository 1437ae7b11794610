"""Templates of our own, made of the constructs of released ones: rendered as by transformers."""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import cache

import pytest
from jinja2 import nodes
from project import GOLDENS, SUPPORT

from localllm.errors import ModelError
from localllm.text import sandbox
from localllm.text.templates import ChatTemplate

RECORDED = json.loads((GOLDENS / "template_renderings.json").read_text())
CONVERSATIONS = json.loads((GOLDENS / "chat_renderings.json").read_text())["conversations"] | RECORDED["conversations"]
RENDERINGS = RECORDED["renderings"]
TEMPLATES = {path.stem: path.read_text() for path in sorted((SUPPORT / "templates").glob("*.jinja"))}


class FirstOfMay(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 5, 1, 12, 30)


@cache
def compiled(name: str) -> ChatTemplate:
    """Compile a template once for all conversations: each is tried in a process of its own first."""
    return ChatTemplate(TEMPLATES[name], "<s>", "</s>")


# Conversations that a template refuses there and that are written in another way here.
MENDED = {("brackets", "answer first"), ("brackets", "two users")}


def cases() -> Iterator[tuple[str, str]]:
    for name, texts in RENDERINGS.items():
        for kind in texts:
            is_folded = name == "no_system" and CONVERSATIONS[kind]["messages"][0]["role"] == "system"
            if not is_folded and (name, kind) not in MENDED:
                yield name, kind


@pytest.mark.parametrize(("name", "kind"), [*cases()])
def test_templates_render_as_in_transformers(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "datetime", FirstOfMay)
    template, conversation = compiled(name), CONVERSATIONS[kind]
    expected = RENDERINGS[name][kind]
    if expected is None:
        with pytest.raises(ModelError, match=r"the chat template (failed|refuses the conversation) in line \d+: "):
            template.render(conversation["messages"], **conversation["variables"])
    else:
        assert template.render(conversation["messages"], **conversation["variables"]) == expected


def test_a_system_message_is_folded_where_transformers_refuses_it():
    template, conversation = compiled("no_system"), CONVERSATIONS["turns"]
    assert RENDERINGS["no_system"]["turns"] is None
    assert template.render(conversation["messages"]) == (
        '<s><turn>user\nBe brief.\n\nWhat is 2 < 3 & "é"?</turn>\n<turn>model\nTrue.</turn>\n'
        "<turn>user\nAnd now?</turn>\n<turn>model\n"
    )


def test_conversations_that_transformers_refuses_are_mended():
    assert all(RENDERINGS[name][kind] is None for name, kind in MENDED)
    first, two = (
        compiled("brackets").render(CONVERSATIONS[kind]["messages"]) for kind in ("answer first", "two users")
    )
    assert first == '<s>[ASK]  [/ASK] True.</s>[ASK] What is 2 < 3 & "é"? [/ASK]'
    assert two == '<s>[ASK] What is 2 < 3 & "é"?\n\n And now?\n [/ASK]'


def test_all_templates_are_recorded_and_most_render():
    assert RENDERINGS.keys() == TEMPLATES.keys() and len(TEMPLATES) >= 12
    assert all(texts.keys() == CONVERSATIONS.keys() for texts in RENDERINGS.values())
    texts = [text for each in RENDERINGS.values() for text in each.values()]
    assert len([*filter(None, texts)]) > 250 and len({*texts}) > 200


def constructs(source: str) -> set[str]:
    """List filters, tests, methods, functions, parts of `loop`, and kinds of nodes that a template uses."""
    names = set[str]()
    tree = sandbox._LimitedEnvironment().parse(source)
    own = {macro.name for macro in tree.find_all(nodes.Macro)}
    for node in tree.find_all(nodes.Node):
        names.add(type(node).__name__)
        if isinstance(node, nodes.Filter | nodes.Test):
            names.add(f"{type(node).__name__} {node.name}")
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            names.add(f".{node.node.attr}()")
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name not in own:
            names.add(f"{node.node.name}()")
        elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            names.add(f"loop.{node.attr}")
    return names


def test_templates_use_all_constructs_of_released_ones(shared):
    released = set().union(*(constructs(path.read_text()) for path in (shared / "templates").glob("*.jinja")))
    own = set().union(*map(constructs, TEMPLATES.values()))
    beyond = {"Filter from_json", ".append()", ".pop()"}  # which transformers does not have, or lets nobody call
    assert released - own - beyond == set()
