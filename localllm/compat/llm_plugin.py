"""A plugin for simonw/llm, registered by an entry point: `llm -m localllm/NAME "a prompt"`.

Each model of `localllm list --all --found` is localllm/NAME. `llm` imports this module on every start, so heavy imports
wait until a model answers. Source of the API: llm 0.36, docs/plugins of that project.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import llm
from pydantic import Field, create_model

from localllm.errors import LocalllmError
from localllm.generation.options import OPTIONS
from localllm.generation.sampling.options import OPTIONS as SAMPLING
from localllm.generation.sampling.options import map_names

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.text.messages import Message

PREFIX = "localllm/"
EMBEDDER = re.compile(r"embed|bge-|minilm|(^|[-/])(e5|gte)-", re.IGNORECASE)  # in names of embedding models


def list_model_names() -> list[str]:
    """Return the names of local models, including other programs', and of models that can be pulled."""
    from localllm.services.hub.catalogue import load_registry
    from localllm.services.inspection.fit import iter_local_names

    return [*dict.fromkeys([*iter_local_names(), *load_registry()])]


@cache
def open_once(name: str) -> "Model":
    """Open a model and keep it open in this process. Raises LocalllmError."""
    from localllm.services.hub.open_by_name import open_model

    return open_model(name)


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[[object], object]) -> None:
    """Register every model that can answer prompts."""
    for name in list_model_names():
        if not EMBEDDER.search(name):
            register(LocalllmModel(name))


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_embedding_models(register: Callable[[object], object]) -> None:
    """Register every model with an embedding model's name."""
    for name in filter(EMBEDDER.search, list_model_names()):
        register(LocalllmEmbedder(name))


def make_options_class() -> type[llm.Options]:
    """Create the class of answer options; None means the model's own default."""
    kinds = {
        name: (declared[name].kind | None, Field(None, description=declared[name].help.partition("; -1:")[0]))
        for declared in (OPTIONS, SAMPLING)
        for name in map_names("llm", declared)
    }
    return create_model("Options", __base__=llm.Options, **kinds)  # type: ignore[call-overload, no-any-return]


class LocalllmModel(llm.Model):
    """A model that answers prompts."""

    can_stream, supports_schema = True, True

    Options = make_options_class()

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, PREFIX + name

    def execute(
        self, prompt: "llm.Prompt", stream: bool, response: "llm.Response", conversation: object
    ) -> Iterator[str]:
        """Yield the answer's text, then set its token counts. Raises llm.ModelError."""
        options = {key: value for key, value in prompt.options.model_dump().items() if value is not None}
        if prompt.schema:
            options["schema"] = prompt.schema
        try:
            answer = open_once(self.name).chat(convert_messages(prompt), **options)
            yield from answer if stream else ["".join(answer)]
        except LocalllmError as error:
            raise llm.ModelError(str(error)) from error
        response.set_usage(input=answer.prompt_tokens, output=answer.completion_tokens)


class LocalllmEmbedder(llm.EmbeddingModel):
    """An embedding model."""

    batch_size = 64

    def __init__(self, name: str) -> None:
        self.name, self.model_id = name, PREFIX + name

    def embed_batch(self, items: Iterable[str | bytes], **given: object) -> Iterator[list[float]]:
        """Yield the embedding of each item. Raises llm.ModelError."""
        try:
            yield from open_once(self.name).embed([str(item) for item in items]).tolist()
        except LocalllmError as error:
            raise llm.ModelError(str(error)) from error


def convert_messages(prompt: "llm.Prompt") -> "list[Message]":
    """Convert a prompt and the conversation before it to text messages."""
    return [
        {"role": message.role, "content": "".join(getattr(part, "text", None) or "" for part in message.parts)}
        for message in prompt.messages
    ]
