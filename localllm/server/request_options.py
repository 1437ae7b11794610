"""From the fields of a request to what the generation of an answer is told."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from localllm.errors import UsageError
from localllm.generation.generate import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.server.fields import Body, kind
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

SAMPLING = tuple(each.name for each in fields(SamplingOptions) if each.name not in ("logit_bias", "seed"))
OTHER_NAMES = {"repetition_penalty": "repeat_penalty", "typical_p": "typical"}  # vLLM's, llama-server's
EFFORTS = {"none": "off", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
MOST_ANSWERS = 16  # to one prompt
MOST_STOPS = 16
MOST_LIKELY = 20  # tokens that are told in place of one
# Fields of other servers that say nothing about an answer: who asks, what it costs elsewhere, what is kept there.
MEANINGLESS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
               "prompt_cache_retention", "verbosity", "id_slot")  # fmt: skip


def sampling_of(body: Body) -> SamplingOptions:
    """OpenAI's fields, and all others of SamplingOptions by their names. Raises UsageError."""
    given = {name: body.get(name) for name in SAMPLING}
    for other, name in OTHER_NAMES.items():
        if (value := body.get(other)) is not None:
            given[name] = value
    bias, seed = body.mapping("logit_bias"), body.whole("seed", -1)
    return SamplingOptions(
        **{name: value for name, value in given.items() if value is not None},
        logit_bias=None if bias is None else biases(bias),
        seed=None if seed == -1 else seed,
    )


def biases(given: Mapping[str, Any]) -> dict[int, float]:
    """By token; JSON's keys are texts."""
    if not all(token.isdecimal() and len(token) < 10 for token in given):
        raise UsageError("logit_bias should be a number by token id")
    return {int(token): bias for token, bias in given.items()}


def options_of(
    body: Body, max_tokens: int | None, constraint: "Constraint | None", tools: "ToolUse | None" = None
) -> GenerationOptions:
    """Raises UsageError."""
    stop = body.texts("stop")
    if len(stop) > MOST_STOPS:
        raise UsageError(f"stop should be at most {MOST_STOPS} texts, not {len(stop)}")
    for name in MEANINGLESS:
        body.get(name)
    return GenerationOptions(
        max_tokens, stop, sampling_of(body), constraint=constraint, tools=tools,
        think=think_of(body), think_budget=body.whole("think_budget"),
        template_variables=dict(body.mapping("chat_template_kwargs") or {}),
    )  # fmt: skip


def continuing(body: Body, options: GenerationOptions, messages: list[Message]) -> GenerationOptions:
    """Return the options with vLLM's continue_final_message and add_generation_prompt. Raises UsageError.

    An assistant's message at the end is continued, unless one of them says otherwise.
    """
    continues, begins = body.choose("continue_final_message"), body.choose("add_generation_prompt")
    if continues and begins:
        raise UsageError("add_generation_prompt begins a new answer, continue_final_message none: only one can be true")
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise UsageError("continue_final_message: the last message should be an assistant's, without calls of tools")
    if begins is False and not continues:
        options = replace(options, template_variables={**options.template_variables, "add_generation_prompt": False})
    return replace(options, continue_final=False if begins and continues is None else continues)


def think_of(body: Body) -> str:
    """reasoning_effort is OpenAI's name, think ours."""
    effort = body.choice("reasoning_effort", tuple(EFFORTS))
    think = body.text("think")
    return think or (EFFORTS[effort] if effort else "auto")


def constraint_of_format(body: Body) -> "Constraint | None":
    """Of response_format, or of our own grammar (GBNF) and regex. Raises UsageError."""
    from localllm.generation.constraints.constraint import constraint_of

    schema = schema_of(body.object("response_format"))
    return constraint_of(schema, body.text("grammar"), body.text("regex"), **json_options(body))


class JsonOptions(TypedDict):
    """How JSON is written, of answers and of arguments."""

    json_whitespace: bool
    additional_properties: bool


class CallOptions(JsonOptions):
    """What our own fields say of calls."""

    json_calls: bool


def json_options(body: Body) -> JsonOptions:
    """Raises UsageError."""
    return {
        "json_whitespace": body.flag("json_whitespace"),
        "additional_properties": body.flag("additional_properties"),
    }


def call_options(body: Body) -> CallOptions:
    """Raises UsageError."""
    return {"json_calls": body.get("json_calls") is not False, **json_options(body)}


def schema_of(format: Body | None) -> Any:
    """The JSON schema that a response_format asks for, None for any text."""
    if format is None:
        return None
    asked = format.choice("type", ("text", "json_object", "json_schema"))
    if asked == "json_object":
        return format.mapping("schema") or {"type": "object"}  # with a schema: as llama-server has it
    if asked != "json_schema":
        return None
    inner = format.object("json_schema") or format  # the responses interface has its fields here
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise UsageError(f"{inner.named('schema')} should be an object, not {kind(schema)}")
    return dict(schema)


def tools_of(body: Body) -> "ToolUse | None":
    """OpenAI's tools, tool_choice and parallel_tool_calls. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    given, choice = body.items("tools") or (), body.get("tool_choice")
    parallel, more = body.get("parallel_tool_calls") is not False, call_options(body)
    if not given:
        return None
    return ToolUse([function_of(Body.of(tool, "tools")) for tool in given], choice_of(choice), parallel, **more)


def function_of(tool: Body) -> "Tool":
    """One of the tools. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    if tool.text("type") not in (None, "function"):
        raise UsageError(f"tools: {tool.text('type')!r} is not supported: a tool should be a function")
    function = tool.object("function") or tool  # the responses interface has its fields here
    name, about = function.needed_text("name"), function.text("description") or ""
    parameters = function.mapping("parameters")
    return Tool(name, about, dict(parameters or NOTHING), function.flag("strict"))


def choice_of(choice: Any) -> str:
    """A tool_choice as ToolUse has it. Raises UsageError."""
    if isinstance(choice, dict):
        named = Body(choice, "tool_choice")
        function = named.object("function") or named
        return function.needed_text("name")
    if choice not in (None, "auto", "required", "none"):
        raise UsageError("tool_choice should be auto, required, none or a function")
    return choice or "auto"
