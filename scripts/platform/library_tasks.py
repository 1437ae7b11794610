#!/usr/bin/env python3
"""One task of a library for llama-cpp-python: python library_tasks.py TASK MODEL.gguf. See check_libraries.py.

A task fails by an exception. `llama_cpp` is localllm.compat.llama_cpp here.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from localllm.compat import llama_cpp

sys.modules["llama_cpp"] = llama_cpp  # type: ignore[assignment]
QUESTION = "What is the capital of France? Answer with one word."


def langchain_chat_llama_cpp(model: str) -> None:
    """Answer, stream, call a tool and fill a schema by LangChain's ChatLlamaCpp."""
    from langchain_community.chat_models import ChatLlamaCpp
    from langchain_core.tools import tool
    from pydantic import BaseModel

    class Capital(BaseModel):
        """A country's capital."""

        city: str

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"sunny in {city}"

    chat = ChatLlamaCpp(model_path=model, temperature=0, max_tokens=64, n_ctx=2048, verbose=False)
    assert "Paris" in chat.invoke([("system", "Be brief."), ("human", QUESTION)]).content
    parts = [chunk.content for chunk in chat.stream(QUESTION)]
    assert len(parts) > 1 and "Paris" in "".join(parts)
    choice = {"type": "function", "function": {"name": "get_weather"}}
    calls = chat.bind_tools([get_weather], tool_choice=choice).invoke("How is the weather in Paris?").tool_calls
    assert calls[0]["name"] == "get_weather" and calls[0]["args"] == {"city": "Paris"}, calls
    assert chat.with_structured_output(Capital).invoke(QUESTION).city == "Paris"


def llama_index_llama_cpp(model: str) -> None:
    """Complete, stream and chat by LlamaIndex's LlamaCPP."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.llama_cpp import LlamaCPP

    llm = LlamaCPP(model_path=model, temperature=0, max_new_tokens=8, context_window=2048, verbose=False)
    assert llm.metadata.context_window == 2048
    assert "Paris" in llm.complete("The capital of France is").text
    parts = [part.delta or "" for part in llm.stream_complete("The capital of France is")]
    assert len(parts) > 1 and "Paris" in "".join(parts)
    assert "Paris" in (llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content or "")


def outlines_llama_cpp(model: str) -> None:
    """Constrain to a choice, a regular expression and a schema by outlines, with both of its backends."""
    from typing import Literal

    import outlines
    from pydantic import BaseModel

    class Capital(BaseModel):
        city: str

    with llama_cpp.Llama(model, n_ctx=1024, verbose=False) as llm:
        made = outlines.from_llamacpp(llm)
        options = {"max_tokens": 32, "temperature": 0}
        assert made(QUESTION, Literal["London", "Paris"], **options) == "Paris"
        assert made("2 and 2 is ", outlines.types.Regex(r"[0-9]"), **options).isdigit()
        assert "Paris" in json.loads(made(QUESTION, Capital, **options))["city"]
        assert "Paris" in json.loads(made(QUESTION, Capital, backend="llguidance", **options))["city"]
        assert len([*made.stream(QUESTION, Literal["London", "Paris"], **options)]) > 0


def guidance_llama_cpp(model: str) -> None:
    """Select and generate by guidance, which evaluates batches through llama.cpp's C interface."""
    from guidance import assistant, gen, models, select, user

    lm = models.LlamaCpp(model, echo=False, n_ctx=1024)
    with user():
        lm += QUESTION
    with assistant():
        lm += select(["London", "Paris"], name="city") + " " + gen(name="year", regex="[0-9]{4}", max_tokens=8)
    assert lm["city"] == "Paris" and lm["year"].isdigit() and len(lm["year"]) == 4


def instructor_llama_cpp(model: str) -> None:
    """Fill a schema by instructor, as its documentation shows for llama-cpp-python."""
    import instructor
    from pydantic import BaseModel

    class Capital(BaseModel):
        city: str

    with llama_cpp.Llama(model, n_ctx=2048, verbose=False) as llm:
        create = instructor.patch(create=llm.create_chat_completion_openai_v1, mode=instructor.Mode.JSON_SCHEMA)
        messages = [{"role": "user", "content": QUESTION}]
        assert create(messages=messages, response_model=Capital, temperature=0, max_tokens=64).city == "Paris"


def llm_plugin(model: str) -> None:
    """Ask by simonw/llm's command, with a system prompt, options, a conversation, a schema, and its Python."""
    environment = {**os.environ, "LOCALLLM_MODELS": os.path.dirname(model), "LLM_USER_PATH": tempfile.mkdtemp()}
    name = f"localllm/{Path(model).stem}"

    def ask(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert not done.returncode, done.stderr
        return done.stdout

    assert name in ask("models") and "localllm/qwen3-4b" in ask("models")
    assert "localllm/nomic-embed-text-1.5" in ask("embed-models")
    options = ["-m", name, "-o", "temperature", "0", "-o", "max_tokens", "64"]
    assert "Zoe" in ask("prompt", *options, "-s", "Be brief.", "My name is Zoe. Remember it.")
    assert "Zoe" in ask("prompt", "-c", "-o", "temperature", "0", "What is my name?")
    assert "Paris" in json.loads(ask("prompt", *options, "--schema", "city str", QUESTION))["city"]
    absent = [sys.executable, "-m", "llm", "-m", "localllm/qwen3-4b", "Hi"]
    told = subprocess.run(absent, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert told.returncode and "localllm pull qwen3-4b" in told.stderr, told.stderr


TASKS: dict[str, Callable[[str], None]] = {
    task.__name__: task
    for task in (
        langchain_chat_llama_cpp, llama_index_llama_cpp, outlines_llama_cpp, guidance_llama_cpp, instructor_llama_cpp,
        llm_plugin,
    )
}  # fmt: skip

if __name__ == "__main__":
    TASKS[sys.argv[1]](sys.argv[2])
