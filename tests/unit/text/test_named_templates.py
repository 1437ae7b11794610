"""Test files with several chat templates: the one for tools, and those chosen by name."""

from pathlib import Path
from typing import Any

import pytest
from served import prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

import localllm
from localllm import api
from localllm.errors import ModelError, UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.tools.tool_grammar import ToolUse
from tests.unit.text.test_messages import OPENAI_TOOLS, TOOL, answer, user

PLAIN = "PLAIN{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = (
    "TOOLS{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMED = {"tokenizer.chat_template.tool_use": TOOLS, "tokenizer.chat_template.rag": "RAG{{ messages[0].content }}"}
ASKED = [user("Hi")]
USE = GenerationOptions(tools=ToolUse([TOOL]))


@pytest.fixture
def write(tmp_path: Path):
    def written(template: str | None, named: dict[str, str]) -> str:
        return str(write_tiny_model(tmp_path / "tiny.gguf", chat_template=template, metadata=named))

    return written


def prompt_of(model: api.Model, options: GenerationOptions | None = None, messages: Any = ASKED) -> str:
    return model.tokenizer.decode(model.session.request(messages, options).prompt, special=True)


def test_tools_select_the_tool_template(write):
    with scripted(write(PLAIN, NAMED), {}) as model:
        assert prompt_of(model) == "PLAIN<user>Hi"
        assert prompt_of(model, USE) == "TOOLS[look]<user>Hi<assistant>"
        none = GenerationOptions(tools=ToolUse([TOOL], "none"))
        assert prompt_of(model, none) == "PLAIN<user>Hi"
        begun = prompt_of(model, USE, [*ASKED, answer("Answer1")])
        assert begun == "TOOLS[look]<user>Hi<assistant>Answer1"
        assert model.session._get_format(USE).calls.opening == '<call>{"name": "'  # read off the right one


def test_the_server_selects_the_template_by_tools(write):
    path = write(PLAIN, NAMED)
    with serving({"tiny": lambda: scripted(path, {})}) as served:
        for tools, prompt in ((OPENAI_TOOLS, "TOOLS[look]<user>Hi<assistant>"), ([], "PLAIN<user>Hi")):
            asked = {"messages": ASKED, "tools": tools, "max_tokens": 1}
            assert served.post("/v1/chat/completions", asked).status == 200
            assert prompt_of_latest(served, "tiny").startswith(prompt)


def test_a_chosen_template_is_used_with_and_without_tools(write):
    for choice, prompt in (("rag", "RAGHi"), ("tool_use", "TOOLS<user>Hi<assistant>"), ("{{ 'MINE' }}", "MINE")):
        with scripted(write(PLAIN, NAMED), {}, template=choice) as model:
            assert prompt_of(model) == prompt
            assert prompt_of(model, USE).startswith(prompt[:3])


def test_a_file_with_named_templates_only_uses_the_tool_template(write):
    with scripted(write(None, NAMED), {}) as model:
        assert prompt_of(model) == "TOOLS<user>Hi<assistant>" and model.session.warning is None
    with scripted(write(None, {**NAMED, "tokenizer.chat_template.default": PLAIN}), {}) as model:
        assert prompt_of(model) == "PLAIN<user>Hi" and prompt_of(model, USE) == "TOOLS[look]<user>Hi<assistant>"


def test_template_names_are_checked_when_a_model_is_opened(write):
    path = write(PLAIN, NAMED)
    localllm.open(path, chat_template="rag").close()
    with pytest.raises(UsageError, match="unknown chat template 'raggle'"):
        localllm.open(path, chat_template="raggle")
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template\.rag"):
        localllm.open(write(PLAIN, {"tokenizer.chat_template.rag": 5.0}))
