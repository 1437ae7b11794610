"""The plugin of simonw/llm, which finds it by the entry point: `llm -m localllm/NAME "a prompt"`.

Each model of `localllm list --all --found` is localllm/NAME. `llm` loads this module whenever it starts, so nothing
heavy is imported before a model answers. Source of the interface: llm 0.36, docs/plugins of that project.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field

from localllm.errors import LocalllmError

if TYPE_CHECKING:
    from localllm.api import Model

PREFIX = "localllm/"
EMBEDDER = re.compile(r"embed|bge-|minilm|(^|[-/])(e5|gte)-", re.IGNORECASE)  # in names of models for vectors


def model_names() -> list[str]:
    """Return the names of models that are here, of other programs' models and of those that can be pulled."""
    from localllm.services.catalogue import registry_models
    from localllm.services.fit_all import names_here

    return [*dict.fromkeys([*names_here(), *registry_models()])]


@cache
def open_once(name: str) -> "Model":
    """Open a model, which stays open in this process. Raises LocalllmError."""
    from localllm.api import open_model
    from localllm.services.catalogue import resolve

    return open_model(resolve(name))


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Any) -> None:
    """Register every model that writes texts."""
    for name in model_names():
        if not EMBEDDER.search(name):
            register(LocalllmModel(name))


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_embedding_models(register: Any) -> None:
    """Register every model whose name says that it makes vectors."""
    for name in filter(EMBEDDER.search, model_names()):
        register(LocalllmEmbedder(name))


class LocalllmModel(llm.Model):
    """A model that answers prompts."""

    can_stream, supports_schema = True, True

    class Options(llm.Options):
        """Options of an answer; those that are left out are the model's own."""

        max_tokens: int | None = Field(None, description="Most tokens of an answer")
        temperature: float | None = Field(None, description="Sampling temperature; 0 is greedy")
        top_k: int | None = Field(None, description="Sample from the K likeliest tokens; 0: all")
        top_p: float | None = Field(None, description="Sample from the likeliest tokens of this probability")
        min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest")
        repeat_penalty: float | None = Field(None, description="Penalty of repeated tokens; 1: none")
        seed: int | None = Field(None, description="Seed of the random numbers")
        think: str | None = Field(None, description="Reasoning: on, off, auto, low, medium or high")

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, PREFIX + name

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield the answer's texts; usage is set at its end. Raises llm.ModelError."""
        options = {key: value for key, value in prompt.options.model_dump().items() if value is not None}
        if prompt.schema:
            options["schema"] = prompt.schema
        try:
            answer = open_once(self.name).chat(messages_of(prompt), **options)
            yield from answer if stream else ["".join(answer)]
        except LocalllmError as error:
            raise llm.ModelError(str(error)) from error
        response.set_usage(input=answer.prompt_tokens, output=answer.completion_tokens)


class LocalllmEmbedder(llm.EmbeddingModel):
    """A model that makes vectors."""

    batch_size = 64

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, PREFIX + name

    def embed_batch(self, items: Iterable[str | bytes], **given: Any) -> Iterator[list[float]]:
        """Yield a vector for each text. Raises llm.ModelError."""
        try:
            yield from open_once(self.name).embed([str(item) for item in items]).tolist()
        except LocalllmError as error:
            raise llm.ModelError(str(error)) from error


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Return the texts of a prompt's messages, those of the conversation before it included."""
    return [
        {"role": message.role, "content": "".join(getattr(part, "text", None) or "" for part in message.parts)}
        for message in prompt.messages
    ]
