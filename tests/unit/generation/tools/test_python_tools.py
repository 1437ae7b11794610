"""Test Python functions as tools: their descriptions, and how calls run them."""

import asyncio
import dataclasses
import json
from typing import Annotated, Any, Literal

import pytest
import tool_talker
from pydantic import Field
from tiny_model import write_tiny_model
from tool_talker import QWEN, ToolTalker, call

import localllm
from localllm import api
from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.tools.python_tools import describe_tool, make_tool_use, perform
from localllm.generation.tools.tool_call_parser import ToolCall


@dataclasses.dataclass
class Place:
    city: str
    country: str = "Italy"


def weather(
    place: Place, days: Annotated[int, Field(ge=1, description="how many")] = 1, unit: Literal["C", "F"] = "C"
) -> dict[str, Any]:
    """Forecast the weather.

    It is made up.

    Args:
        place: where, with
            its country
        days: is described already
        unit (str): of temperatures

    Returns:
        place: no parameter
    """
    return {"city": place.city, "country": place.country, "degrees": [20] * days, "unit": unit}


def add(a: int, b: int) -> int:
    """Add two numbers.

    :param a: the first
    """
    return a + b


def fail(path: str) -> str:
    """Read a file."""
    raise FileNotFoundError(f"no file {path}")


def test_a_function_is_described_by_its_signature_and_docstring():
    tool = describe_tool(weather)
    assert (tool.name, tool.description) == ("weather", "Forecast the weather.\n\nIt is made up.")
    properties = tool.parameters["properties"]
    assert properties["days"] == {"type": "integer", "minimum": 1, "description": "how many", "default": 1}
    assert properties["unit"]["enum"] == ["C", "F"] and properties["unit"]["description"] == "of temperatures"
    assert properties["place"]["description"] == "where, with its country"
    assert tool.parameters["required"] == ["place"] and tool.parameters["additionalProperties"] is False
    assert describe_tool(add).parameters["properties"]["a"] == {"type": "integer", "description": "the first"}


class Calendar:
    def today(self) -> str:
        """Tell the date."""
        return "Friday"


def test_methods_and_untyped_functions_are_tools():
    assert describe_tool(Calendar().today).parameters["properties"] == {}
    assert perform(Calendar().today, ToolCall("today", ["{}"])) == "Friday"

    def untyped(city, days=3):
        return None

    assert [*describe_tool(untyped).parameters["properties"]] == ["city", "days"] and describe_tool(
        untyped
    ).description == ""
    assert perform(untyped, ToolCall("untyped", ['{"city": 1}'])) == "null"


def test_arguments_are_converted_and_results_become_text():
    result = perform(weather, ToolCall("weather", ['{"place": {"city": "Rome"}, "days": 2}']))
    assert json.loads(result) == {"city": "Rome", "country": "Italy", "degrees": [20, 20], "unit": "C"}
    assert perform(add, ToolCall("add", ['{"a": 1, "b": "2"}'])) == "3"


def test_openai_descriptions_and_functions_are_tools():
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"x": {}}}}
    assert describe_tool({"type": "function", "function": function}) == describe_tool(function)
    use = make_tool_use([function, add], choice=add, parallel=False)
    assert ([tool.name for tool in use.tools], use.choice, use.is_single) == (["f", "add"], "add", True)


def several(*numbers: int) -> None: ...


async def later(a: int, b: int) -> int:
    """Add two numbers, later."""
    await asyncio.sleep(0.01)
    return a + b


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([5], "auto", "tools: a tool must be a function, or its description, not 5"),
        ([several], "auto", r"tools: several has parameters that cannot be passed by name"),
        ([{"type": "function"}], "auto", "tools: a tool must be a function, or an object whose function has a name"),
        ("add", "auto", "tools must be a list of functions, not str"),
        ([add], "sub", "tool_choice must be auto, required, none or one of add, not 'sub'"),
        ([add, add], "auto", "each with a different name"),
        ([lambda x: x], "auto", "is not a valid name"),
    ],
)
def test_invalid_tools_and_choices_are_refused(tools: Any, choice: str, message: str):
    with pytest.raises(UsageError, match=message):
        make_tool_use(tools, choice)


# ---- with a model whose words are known: it repeats the first line of a result


@pytest.fixture
def model(tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = write_tiny_model(tmp_path / "tiny.gguf", context=4096, chat_template=QWEN)
    for question, text in {
        "sum": call("add", a=2, b=40), "both": call("add", a=1, b=1) + "\n" + call("add", a=2, b=2),
        "file": call("fail", path="x"), "later": call("later", a=2, b=40),
    }.items():  # fmt: skip
        monkeypatch.setitem(tool_talker.CALLS, question, text)
    monkeypatch.setitem(tool_talker.CALLS, tool_talker.FOR_EVER, call("add", a=0, b=0))
    file = GGUFFile.open(path)
    tokenizer = api.load_tokenizer(file)
    engine: Any = ToolTalker(tokenizer, 4096)
    return api.Model(file, tokenizer, engine)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_an_answer_holds_its_calls(model: localllm.Model):
    answer = model.chat(ask("sum"), tools=[add])
    assert "".join(answer) == "" and [(one.name, one.arguments) for one in answer.calls] == [("add", {"a": 2, "b": 40})]
    free = model.chat(ask("sum"), tools=[add], tool_choice="none")
    assert "tool_call" in "".join(free) and free.calls == []


def test_functions_run_until_the_model_answers(model: localllm.Model):
    messages = ask("sum")
    run = model.run_tools(messages, [add, weather])
    assert "".join(run) == "It says: 42" == run.text and run.finish_reason == "stop"
    assert [message["role"] for message in run.messages] == ["assistant", "tool", "assistant"]
    assert run.messages[1] == {"role": "tool", "tool_call_id": run.calls[0].id, "name": "add", "content": "42"}
    assert messages == ask("sum")
    assert "".join(model.chat([*messages, *run.messages, *ask("hi")])) == "HI"


def test_parts_show_calls_and_results(model: localllm.Model):
    parts = [(part.kind, part.text) for part in model.run_tools(ask("sum"), [add]).parts]
    assert parts[0] == ("call", "add") and ("result", "42") in parts
    assert json.loads("".join(text for kind, text in parts if kind == "arguments")) == {"a": 2, "b": 40}
    assert "".join(text for kind, text in parts if kind == "answer") == "It says: 42"


def test_a_call_may_be_refused(model: localllm.Model):
    seen = list[str]()
    run = model.run_tools(ask("sum"), [add], permission=lambda call: bool(seen.append(call.name)))
    assert "".join(run) == "It says: error: the user does not allow this call" and seen == ["add"]


def test_errors_of_a_function_are_sent_to_the_model(model: localllm.Model):
    run = model.run_tools(ask("file"), [fail])
    assert "".join(run) == "It says: error: FileNotFoundError: no file x"


def test_run_tools_raises_after_max_turns(model: localllm.Model):
    run = model.run_tools(ask(tool_talker.FOR_EVER), [add], max_turns=3)
    with pytest.raises(LocalllmError, match="the model called tools 3 times without answering; raise max_turns"):
        list(run)
    assert len(run.calls) == 3


def test_a_required_tool_is_required_only_once(model: localllm.Model):
    run = model.run_tools(ask("sum"), [add], tool_choice="required")
    assert "".join(run) == "It says: 42" and len(run.calls) == 1


def test_a_session_keeps_calls_and_results(model: localllm.Model):
    run = model.session.run_tools("sum", [add])
    assert "".join(run) == "It says: 42"
    assert [message["role"] for message in model.session.messages] == ["user", "assistant", "tool", "assistant"]
    assert "".join(model.session.ask("more")) == "MORE"


def test_run_tools_refuses_tools_that_are_not_functions(model: localllm.Model):
    with pytest.raises(UsageError, match=r"run_tools needs functions as tools, not {'name': 'f'"):
        model.run_tools(ask("sum"), [{"name": "f"}])


def test_asynchronous_functions_run_outside_an_event_loop(model: localllm.Model):
    run = model.run_tools(ask("later"), [add, later])
    assert "".join(run) == "It says: 42" and run.messages[1]["content"] == "42"

    async def in_a_loop() -> None:
        with pytest.raises(UsageError, match="within an event loop, use arun_tools"):
            list(model.run_tools(ask("later"), [later]))

    asyncio.run(in_a_loop())


def test_arun_tools_awaits_functions_concurrently(model: localllm.Model):
    """Run the other functions in threads."""
    loops = list[Any]()

    async def slow(a: int, b: int) -> int:
        loops.append(asyncio.get_running_loop())
        return await later(a, b)

    slow.__name__ = "later"

    async def main() -> None:
        runs = [model.arun_tools(ask(question), [slow, add]) for question in ("later", "sum", "later")]
        for run in await asyncio.gather(*(run.complete() for run in runs)):
            assert run.text == "It says: 42" and len(run.calls) == 1
        assert loops == [asyncio.get_running_loop()] * 2
        texts = [text async for text in model.arun_tools(ask("later"), [slow])]
        assert "".join(texts) == "It says: 42"

    asyncio.run(main())


def test_leaving_cancels_a_running_function(model: localllm.Model):
    seen = list[str]()

    async def main() -> None:
        begun = asyncio.Event()

        async def for_ever(a: int, b: int) -> int:
            begun.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
            return a + b

        for_ever.__name__ = "later"
        task = asyncio.create_task(model.arun_tools(ask("later"), [for_ever]).complete())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["cancelled"]
    assert "".join(model.run_tools(ask("sum"), [add])) == "It says: 42"
