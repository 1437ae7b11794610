"""Keyword arguments of methods that generate, as one typed dict, and the options that they are converted to."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from localllm.errors import UsageError
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.values import plain

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.speculation.drafter import Drafter


class SamplingArguments(TypedDict, total=False):
    """Sampling options. docs/sampling.md describes each; SamplingOptions has the defaults."""

    temperature: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    top_k: int | None
    top_n_sigma: float | None
    typical: float | None
    top_p: float | None
    min_p: float | None
    xtc_probability: float | None
    xtc_threshold: float | None
    repeat_last_n: int | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    adaptive_target: float | None
    adaptive_decay: float | None
    logit_bias: Mapping[int, float] | None
    ignore_eos: bool | None
    samplers: Sequence[str] | str | None
    seed: int | None


class AnswerArguments(SamplingArguments, total=False):
    """Options of an answer other than sampling.

    on_overflow, keep: what is done when the context is full.  think: "on", "off", "auto", "low", "medium" or "high".
    think_budget: the most tokens of reasoning.  template_variables: for the chat template.  continue_final: whether to
    continue the last message; None: an assistant's without tool calls.  schema, grammar (GBNF), regex: what the answer
    must look like, one of them; json_whitespace and additional_properties loosen a schema.  logprobs, top_logprobs:
    whether to keep log probabilities, and how many likely alternatives to each token.  logits_processor: called before
    each token is drawn with the ids so far and a copy of the logits, float32 [vocab], returns those to draw from;
    stopping_criteria: called so, too, says whether the answer ends here.  ban: texts that the answer does not have, in
    upper or lower case: it goes back to where one begins, and goes on otherwise.
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
    logprobs: bool
    top_logprobs: int | None
    logits_processor: Callable[[list[int], "np.ndarray"], "np.ndarray"] | None
    stopping_criteria: Callable[[list[int], "np.ndarray"], bool] | None
    ban: Sequence[str]


class CallArguments(AnswerArguments, total=False):
    """Options of tool calls.

    tool_choice: "auto", "required", "none", or the tool that has to be called.  parallel_tool_calls: whether there may
    be several.  json_calls: whether JSON that names a tool counts as a call.
    """

    tool_choice: object
    parallel_tool_calls: bool
    json_calls: bool


class ChatArguments(CallArguments, total=False):
    """Arguments of a chat; tools: functions that the model may call, or descriptions in OpenAI's format."""

    tools: Sequence[object]


_CONSTRAINTS = ("schema", "grammar", "regex")
_JSON = ("json_whitespace", "additional_properties")
_TOOLS = {"tool_choice": "choice", "parallel_tool_calls": "parallel", "json_calls": "json_calls"}


def _no_option(name: str) -> str:
    """Say that there is no option of a name, and which one is most like it."""
    from difflib import get_close_matches  # seldom needed

    close = get_close_matches(name.lower(), sorted(ChatArguments.__annotations__), n=1)
    return f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def gather_options(
    max_tokens: int | None,
    stop: Sequence[str],
    arguments: AnswerArguments,
    speculate: "str | Drafter" = "auto",
) -> GenerationOptions:
    """Make one object of a method's arguments. Raises UsageError for an unknown name."""
    left = {name: plain(value) for name, value in cast("dict[str, Any]", arguments).items()}
    sampling = {name: left.pop(name) for name in SamplingArguments.__annotations__ if name in left}
    constraint = {name: left.pop(name) for name in _CONSTRAINTS if left.get(name) is not None}
    style = {name: left.pop(name) for name in _JSON if name in left}
    use = {name: left.pop(argument) for argument, name in _TOOLS.items() if argument in left}
    if unknown := left.keys() - ChatArguments.__annotations__.keys():
        raise UsageError(_no_option(sorted(unknown)[0]))
    others = {name: value for name, value in left.items() if name not in _CONSTRAINTS}
    if others.get("tools"):
        from localllm.generation.tools.python_tools import tool_use  # seldom needed

        others["tools"] = tool_use(others["tools"], **use, **style)
    if others.pop("logprobs", False) and others.get("top_logprobs") is None:
        others["top_logprobs"] = 0
    if constraint:
        from localllm.generation.constraints.constraint import constraint_of  # llguidance takes 30 ms to import
        from localllm.generation.constraints.python_types import is_type

        others["constraint"] = constraint_of(**constraint, **style)
        others["result_type"] = schema if is_type(schema := constraint.get("schema")) else None
    return GenerationOptions(plain(max_tokens), stop, SamplingOptions(**sampling), None, speculate, **others)
