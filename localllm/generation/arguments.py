"""Keyword arguments of methods that generate, as typed dicts, and their conversion to GenerationOptions."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from localllm.errors import UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingArguments, SamplingOptions
from localllm.values import plain, whole_number

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.speculation.drafter import Drafter


class AnswerArguments(SamplingArguments, total=False):
    """Options of an answer other than sampling.

    on_overflow, keep: policy for a full context.  think: "on", "off", "auto", "low", "medium" or "high".
    think_budget: most tokens of reasoning.  template_variables: for the chat template.  continue_final: whether to
    continue the last message; None: if it is an assistant's without tool calls.  schema, grammar (GBNF), regex: one
    constraint of the answer; json_whitespace and additional_properties loosen a schema.  logprobs: whether to return
    log probabilities, or, like top_logprobs, with how many alternatives to each token.  logits_processor: called before
    each token is drawn with all token ids and a copy of the logits, float32 [vocab]; returns the logits to draw from.
    stopping_criteria: called in the same way; returns whether the answer ends.  ban: texts that must not occur in the
    answer, in upper or lower case; their tokens are undone and drawn again.
    """

    on_overflow: str | None
    keep: int | None
    think: str
    think_budget: int | None
    template_variables: Mapping[str, object]
    continue_final: bool | None
    schema: object
    grammar: str | None
    regex: str | None
    json_whitespace: bool
    additional_properties: bool
    logprobs: bool | int | None
    top_logprobs: int | None
    logits_processor: Callable[[list[int], "np.ndarray"], "np.ndarray"] | None
    stopping_criteria: Callable[[list[int], "np.ndarray"], bool] | None
    ban: Sequence[str]


class CallArguments(AnswerArguments, total=False):
    """Options of tool calls.

    tool_choice: "auto", "required", "none", or the tool to call.  parallel_tool_calls: whether several calls are
    allowed.  json_calls: whether JSON text that names a tool counts as a call.
    """

    tool_choice: object
    parallel_tool_calls: bool
    json_calls: bool


class ChatArguments(CallArguments, total=False):
    """Arguments of a chat; tools: functions that the model may call, or descriptions in OpenAI's format."""

    tools: Sequence[object]


_CONSTRAINTS = ("schema", "grammar", "regex")
_JSON = ("json_whitespace", "additional_properties")
_TRUTHS = {*_JSON, "continue_final", "parallel_tool_calls", "json_calls"}
_TOOLS = {"tool_choice": "choice", "parallel_tool_calls": "parallel", "json_calls": "json_calls"}


def _no_option(name: str) -> str:
    """Return the message for an unknown option, with the most similar name."""
    from difflib import get_close_matches  # seldom needed

    close = get_close_matches(name.lower(), sorted(ChatArguments.__annotations__), n=1)
    return f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def alternatives(logprobs: object, top_logprobs: object) -> int | None:
    """Return how many alternatives to each token to report, None for no log probabilities.

    logprobs: True or False as in OpenAI's chat, or a number as in its completions.  top_logprobs: a number, or None.
    Raises UsageError.
    """
    if logprobs is None or isinstance(logprobs, bool):
        is_asked, count = bool(logprobs), None
    else:
        is_asked, count = True, whole_number("logprobs", logprobs)
    if top_logprobs is None:
        return (count or 0) if is_asked else None
    top = whole_number("top_logprobs", top_logprobs)
    if count not in (None, top):
        raise UsageError(f"logprobs and top_logprobs should not differ: {count} and {top}")
    return top


def gather_options(
    max_tokens: int | None,
    stop: Sequence[str],
    arguments: AnswerArguments,
    speculate: "str | Drafter" = "auto",
) -> GenerationOptions:
    """Convert a method's keyword arguments to options. Raises UsageError for an unknown name."""
    remaining = {name: plain(value) for name, value in cast("dict[str, Any]", arguments).items()}
    sampling = {name: remaining.pop(name) for name in SamplingArguments.__annotations__ if name in remaining}
    constraint = {name: remaining.pop(name) for name in _CONSTRAINTS if remaining.get(name) is not None}
    style = {name: remaining.pop(name) for name in _JSON if name in remaining}
    use = {name: remaining.pop(argument) for argument, name in _TOOLS.items() if argument in remaining}
    for name in _TRUTHS & arguments.keys():
        if not isinstance(value := plain(cast("dict[str, Any]", arguments)[name]), bool | None):
            raise UsageError(f"{name} should be True or False, not {value!r:.60}")
    if unknown := remaining.keys() - ChatArguments.__annotations__.keys():
        raise UsageError(_no_option(sorted(unknown)[0]))
    answer_options = {name: value for name, value in remaining.items() if name not in _CONSTRAINTS}
    if answer_options.get("tools"):
        from localllm.generation.tools.python_tools import tool_use  # seldom needed

        answer_options["tools"] = tool_use(answer_options["tools"], **use, **style)
    answer_options["top_logprobs"] = alternatives(
        answer_options.pop("logprobs", None), answer_options.get("top_logprobs")
    )
    if constraint:
        from localllm.generation.constraints.constraint import constraint_of  # llguidance takes 30 ms to import
        from localllm.generation.constraints.python_types import is_type

        answer_options["constraint"] = constraint_of(**constraint, **style)
        answer_options["result_type"] = schema if is_type(schema := constraint.get("schema")) else None
    return GenerationOptions(plain(max_tokens), stop, SamplingOptions(**sampling), None, speculate, **answer_options)
