#!/usr/bin/env python3
"""One task of a client library, asked of a server: python client_tasks.py TASK URL. See check_clients.py.

Every task has an answer that can be checked; a wrong one is an AssertionError.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

SUM = "What is 2 + 3? Answer with the number only."
CAPITAL = "What is the capital of France?"
PERSON = "Extract the person: Jason is 25 years old."
KEY = "none"


class City(BaseModel):
    """A city and its country."""

    city: str
    country: str


class Person(BaseModel):
    """A person's name and age in years."""

    name: str
    age: int


def openai_chat(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    asked = [{"role": "user", "content": SUM}]
    answer = client.chat.completions.create(model="any", messages=asked, temperature=0, max_tokens=16)
    assert "5" in answer.choices[0].message.content, answer
    chunks = client.chat.completions.create(model="any", messages=asked, temperature=0, max_tokens=16, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == answer.choices[0].message.content, said


def openai_responses(url: str) -> None:
    from openai import OpenAI

    answer = OpenAI(base_url=f"{url}/v1", api_key=KEY).responses.create(model="any", input=SUM, temperature=0)
    assert "5" in answer.output_text, answer


def openai_parse(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key=KEY)
    asked = [{"role": "user", "content": CAPITAL}]
    answer = client.chat.completions.parse(model="any", messages=asked, response_format=City, temperature=0)
    assert answer.choices[0].message.parsed.city == "Paris", answer


def anthropic_messages(url: str) -> None:
    from anthropic import Anthropic

    greedy = {"temperature": 0}  # newer versions have no argument for it
    asked = [{"role": "user", "content": SUM}]
    client = Anthropic(base_url=url, api_key=KEY)
    answer = client.messages.create(model="any", messages=asked, max_tokens=16, extra_body=greedy)
    assert "5" in answer.content[0].text, answer
    tool = {"name": "person", "description": "Save a person.", "input_schema": Person.model_json_schema()}
    answer = client.messages.create(
        model="any",
        messages=[{"role": "user", "content": PERSON}],
        max_tokens=100,
        tools=[tool],
        tool_choice={"type": "tool", "name": "person"},
        extra_body=greedy,
    )
    calls = [block.input for block in answer.content if block.type == "tool_use"]
    assert calls == [{"name": "Jason", "age": 25}], answer


def instructor_modes(url: str) -> None:
    import instructor
    from openai import OpenAI

    asked = [{"role": "user", "content": PERSON}]
    names = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")
    for mode in [getattr(instructor.Mode, name) for name in names if hasattr(instructor.Mode, name)]:
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
        found = client.chat.completions.create(model="any", messages=asked, response_model=Person, temperature=0)
        assert (found.name, found.age) == ("Jason", 25), (mode, found)


def smolagents_tools(url: str) -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: the first number
            b: the second number
        """
        return a * b

    model = OpenAIServerModel(model_id="any", api_base=f"{url}/v1", api_key=KEY, temperature=0)
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=4, verbosity_level=0)
    assert "408" in str(agent.run("What is 17 times 24? Use multiply, then give its result by final_answer."))


def smolagents_code(url: str) -> None:
    from smolagents import CodeAgent, OpenAIServerModel

    model = OpenAIServerModel(model_id="any", api_base=f"{url}/v1", api_key=KEY, temperature=0)
    agent = CodeAgent(tools=[], model=model, max_steps=4, verbosity_level=0)
    assert "408" in str(agent.run("Compute 17 * 24 in code, and give the result by final_answer."))


def pydantic_ai_output(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    found = Agent(model, output_type=Person, model_settings={"temperature": 0}).run_sync(PERSON).output
    assert (found.name, found.age) == ("Jason", 25), found


def langchain_chat(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="any", base_url=f"{url}/v1", api_key=KEY, temperature=0)
    assert "5" in model.invoke(SUM).content
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Person, method=method).invoke(PERSON)
        assert (found.name, found.age) == ("Jason", 25), (method, found)
    called = model.bind_tools([Person], tool_choice="any").invoke(PERSON).tool_calls
    assert [call["args"] for call in called] == [{"name": "Jason", "age": 25}], called


def llama_index_chat(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model="any", api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, temperature=0)
    assert "5" in model.chat([ChatMessage(role="user", content=SUM)]).message.content
    assert "5" in "".join(piece.delta or "" for piece in model.stream_chat([ChatMessage(role="user", content=SUM)]))


def litellm_completion(url: str) -> None:
    import litellm

    asked = [{"role": "user", "content": SUM}]
    options = {"api_base": f"{url}/v1", "api_key": KEY, "temperature": 0, "max_tokens": 16}
    assert "5" in litellm.completion(model="openai/any", messages=asked, **options).choices[0].message.content


def ollama_tools(url: str) -> None:
    from ollama import Client

    client, asked = Client(host=url), [{"role": "user", "content": PERSON}]
    found = client.chat("any", asked, format=Person.model_json_schema(), options={"temperature": 0})
    assert Person.model_validate_json(found.message.content) == Person(name="Jason", age=25), found
    told = "".join(part.response for part in client.generate("any", SUM, stream=True, options={"temperature": 0}))
    assert "5" in told, told


def langchain_ollama_chat(url: str) -> None:
    from langchain_ollama import ChatOllama

    model = ChatOllama(model="any", base_url=url, temperature=0)
    assert "5" in model.invoke(SUM).content
    assert "5" in "".join(part.content for part in model.stream(SUM))
    found = model.with_structured_output(Person).invoke(PERSON)
    assert (found.name, found.age) == ("Jason", 25), found


def llm_ollama_prompt(url: str) -> None:
    """Ask by Simon Willison's llm, whose plugin finds the models by /api/tags and /api/show."""
    environment = {**os.environ, "OLLAMA_HOST": url, "LLM_USER_PATH": tempfile.mkdtemp()}

    def call(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    with urllib.request.urlopen(f"{url}/api/tags") as reply:
        name = json.load(reply)["models"][0]["name"]
    assert name in call("ollama", "models")
    assert "5" in call("-m", name, "-o", "temperature", "0", SUM)


def ollama_javascript(url: str) -> None:
    """Ask by the npm package ollama."""
    folder = os.environ["NODE_MODULES"]
    program = f"""
        const {{ Ollama }} = require({str(Path(folder) / "ollama")!r});
        (async () => {{
            const client = new Ollama({{ host: {url!r} }});
            const messages = [{{ role: "user", content: {SUM!r} }}];
            let said = "";
            for await (const part of await client.chat({{ model: "any", messages, stream: true }}))
                said += part.message.content;
            console.log((await client.list()).models.length, said);
        }})();
    """
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 ") and "5" in done.stdout, done.stdout


TASKS: dict[str, Callable[[str], None]] = {
    task.__name__: task
    for task in (
        openai_chat, openai_responses, openai_parse, anthropic_messages, instructor_modes, smolagents_tools,
        smolagents_code, pydantic_ai_output, langchain_chat, llama_index_chat, litellm_completion,
        ollama_tools, langchain_ollama_chat, llm_ollama_prompt, ollama_javascript,
    )
}  # fmt: skip

if __name__ == "__main__":
    TASKS[sys.argv[1]](sys.argv[2])
