"""Keep a pickled or copied answer as plain data, and share methods between answers."""

from collections.abc import Generator, Iterator
from inspect import GEN_CREATED, getgeneratorstate
from typing import TYPE_CHECKING, Any, Self

from localllm.errors import UsageError
from localllm.generation.reasoning import ANSWER, TextPart
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.generation.logprobs import LikelyToken
    from localllm.generation.options import GenerationOptions
    from localllm.generation.tools.tool_call_parser import ToolCall

# Attributes that a record keeps, besides those that `parsed` is computed from.
RECORDED_ATTRIBUTES = (
    "prompt", "ids", "tokens", "text", "thinking", "calls", "logprobs", "logprob", "seed", "finish_reason",
    "prompt_tokens", "completion_tokens", "cached_tokens", "prefill_s", "ttft_s", "decode_s", "dropped", "skipped",
    "kept", "is_full", "steps", "drafted", "accepted",
)  # fmt: skip


class AnswerRecord:
    """The data of a pickled or copied Generation or Completion, without its sequence.

    It cannot be continued: iterating over it yields nothing.
    """

    prompt: list[int]
    ids: list[int]
    tokens: list[int]
    text: str
    thinking: str
    calls: "list[ToolCall]"
    logprobs: "list[LikelyToken]"
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnswerRecord) and vars(self) == vars(other)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return describe_answer("AnswerRecord", self)

    def _repr_markdown_(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as values that `json` can encode."""
        return to_dict(self)

    @property
    def parsed(self) -> Any:
        """The answer converted to the type of its schema; see Completion.parsed."""
        return parse_with_schema(
            self.text, self.finish_reason, self.__dict__["has_schema"], self.__dict__["result_type"]
        )

    def message(self) -> Message:
        """Return the answer as a message of the role assistant; see Generation.message."""
        return to_message(self)


class PicklableAnswer:
    """Base class of Completion that parses, pickles and copies the answer."""

    finish_reason: str
    options: "GenerationOptions"

    @property
    def text(self) -> str:
        raise NotImplementedError

    @property
    def parsed(self) -> Any:
        """The answer converted to the type of its schema.

        Raises UsageError if the answer was generated without a schema, CutError if it is incomplete, and pydantic's
        ValidationError if the type refuses it.
        """
        return parse_with_schema(self.text, self.finish_reason, has_schema(self.options), self.options.result_type)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as values of JSON: its text, tokens, figures, tool calls and log probabilities."""
        return to_dict(self)

    def __repr__(self) -> str:
        return describe_answer(type(self).__name__, self)

    def _repr_markdown_(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[AnswerRecord], tuple[dict[str, Any]]]:
        return reduce_answer(self)

    def __copy__(self) -> Self:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def has_schema(options: "GenerationOptions") -> bool:
    """Return whether answers with these options are constrained by a JSON schema."""
    return options.constraint is not None and options.constraint.kind == "schema"


def reduce_answer(answer: Any) -> tuple[type[AnswerRecord], tuple[dict[str, Any]]]:
    """Return what `__reduce__` of an answer returns: AnswerRecord and its arguments."""
    values = {name: getattr(answer, name) for name in RECORDED_ATTRIBUTES}
    values |= {"has_schema": has_schema(answer.options), "result_type": answer.options.result_type}
    return AnswerRecord, (values,)


def parse_with_schema(text: str, finish_reason: str, has_schema: bool, result_type: object) -> Any:
    """Parse the text of an answer that was generated with a schema.

    Raises UsageError if `has_schema` is false, and the errors of parse_answer.
    """
    if not has_schema:
        raise UsageError("the answer was generated without a schema, so it cannot be parsed: generate it with schema=")
    from localllm.generation.constraints.json_text import parse_answer

    return parse_answer(text, finish_reason, result_type)


DICT_ATTRIBUTES = (
    "text", "thinking", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "seed", "prefill_s",
    "ttft_s", "decode_s", "tokens",
)  # fmt: skip


def to_dict(answer: Any) -> dict[str, Any]:
    """Return an answer's text, tokens and figures as values of JSON; calls and log probabilities if it has some."""
    values: dict[str, Any] = {name: getattr(answer, name) for name in DICT_ATTRIBUTES}
    if answer.calls:
        values["tool_calls"] = [call.to_message() for call in answer.calls]
    if answer.logprobs:
        values["logprobs"] = [
            {**chosen._asdict(), "likeliest": [each._asdict() for each in likeliest]}
            for chosen, likeliest in answer.logprobs
        ]
    return values


def describe_answer(kind: str, answer: Any) -> str:
    """Return the repr of an answer: its text, shortened, and how it ended."""
    text = answer.text if len(answer.text) <= SHOWN else f"{answer.text[:SHOWN]}…"
    return f"{kind}(text={text!r}, tokens={answer.completion_tokens}, finish_reason={answer.finish_reason!r})"


SHOWN = 200  # characters of an answer in its repr


def to_message(answer: Any) -> Message:
    """Return an answer as a message of the role assistant, with its reasoning and tool calls."""
    reasoning: Message = {"reasoning_content": answer.thinking} if answer.thinking else {}
    if answer.calls:
        reasoning["tool_calls"] = [call.to_message() for call in answer.calls]
    return {"role": "assistant", "content": answer.text, **reasoning}


class TextIterator:
    """Iterator over the chunks of an answer's text.

    Attributes:
        parts: iterator over all parts, which include reasoning and tool calls.
    """

    parts: Generator[TextPart, None, None]

    def __iter__(self) -> Self:
        return self

    def generate_rest(self) -> None:
        """Generate the whole answer if iteration has not begun.

        Raises the errors that iterating would raise.
        """
        if getgeneratorstate(self.parts) == GEN_CREATED:
            for _ in self.parts:
                pass

    def __next__(self) -> str:
        for kind, text in self.parts:
            if kind == ANSWER:
                return text
        raise StopIteration
