"""Parse the fields of a request into generation options."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from localllm.errors import UsageError
from localllm.generation.generate import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.server.fields import Body, type_name
from localllm.text.marker_escaping import Message

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

SAMPLING_FIELDS = tuple(each.name for each in fields(SamplingOptions) if each.name not in ("logit_bias", "seed"))
ALIASES = {"repetition_penalty": "repeat_penalty", "typical_p": "typical"}  # vLLM's, llama-server's
EFFORTS = {"none": "off", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
MAX_CHOICES = 16  # per prompt
MAX_STOPS = 16
MAX_LOGPROBS = 20  # alternatives per token
# Fields of other servers without effect on a response: user, billing, storage.
IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
               "prompt_cache_retention", "verbosity", "id_slot")  # fmt: skip


def parse_sampling(body: Body) -> SamplingOptions:
    """Parse OpenAI's sampling fields, and all others of SamplingOptions by name.

    Raises UsageError.
    """
    values = {name: body.get(name) for name in SAMPLING_FIELDS}
    for alias, name in ALIASES.items():
        if (value := body.get(alias)) is not None:
            values[name] = value
    bias, seed = body.get_mapping("logit_bias"), body.get_int("seed", -1)
    return SamplingOptions(
        **{name: value for name, value in values.items() if value is not None},
        logit_bias=None if bias is None else parse_biases(bias),
        seed=None if seed == -1 else seed,
    )


def parse_biases(by_text: Mapping[str, Any]) -> dict[int, float]:
    """Convert the string keys of logit_bias to token ids. Raises UsageError."""
    if not all(token.isdecimal() and len(token) < 10 for token in by_text):
        raise UsageError("logit_bias should be an object of numbers by token id")
    return {int(token): bias for token, bias in by_text.items()}


def parse_options(
    body: Body, max_tokens: int | None, constraint: "Constraint | None", tools: "ToolUse | None" = None
) -> GenerationOptions:
    """Parse the options that all of OpenAI's interfaces share. Raises UsageError."""
    stop = body.get_texts("stop")
    if len(stop) > MAX_STOPS:
        raise UsageError(f"stop should be at most {MAX_STOPS} strings, not {len(stop)}")
    for name in IGNORED_FIELDS:
        body.get(name)
    return GenerationOptions(
        max_tokens, stop, parse_sampling(body), constraint=constraint, tools=tools,
        think=parse_think(body), think_budget=body.get_int("think_budget"),
        template_variables=dict(body.get_mapping("chat_template_kwargs") or {}),
    )  # fmt: skip


def apply_continuation(body: Body, options: GenerationOptions, messages: list[Message]) -> GenerationOptions:
    """Apply vLLM's continue_final_message and add_generation_prompt. Raises UsageError.

    An assistant message at the end is continued unless one of them says otherwise.
    """
    continues, adds_prompt = (
        body.get_optional_bool("continue_final_message"),
        body.get_optional_bool("add_generation_prompt"),
    )
    if continues and adds_prompt:
        raise UsageError("continue_final_message and add_generation_prompt exclude each other; set only one to true")
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise UsageError("continue_final_message: the last message should be an assistant message without tool calls")
    if adds_prompt is False and not continues:
        options = replace(options, template_variables={**options.template_variables, "add_generation_prompt": False})
    return replace(options, continue_final=False if adds_prompt and continues is None else continues)


def parse_think(body: Body) -> str:
    """Parse `reasoning_effort` (OpenAI's) or `think` (ours)."""
    effort = body.get_choice("reasoning_effort", tuple(EFFORTS))
    think = body.get_text("think")
    return think or (EFFORTS[effort] if effort else "auto")


def parse_constraint(body: Body) -> "Constraint | None":
    """Parse response_format, or our own fields grammar (GBNF) and regex. Raises UsageError."""
    from localllm.generation.constraints.constraint import constraint_of

    schema = parse_schema(body.get_object("response_format"))
    return constraint_of(schema, body.get_text("grammar"), body.get_text("regex"), **parse_json_options(body))


class JsonOptions(TypedDict):
    """How JSON is generated, in responses and in arguments."""

    json_whitespace: bool
    additional_properties: bool


class CallOptions(JsonOptions):
    """How tool calls are generated."""

    json_calls: bool


def parse_json_options(body: Body) -> JsonOptions:
    """Parse our own fields for JSON. Raises UsageError."""
    return {
        "json_whitespace": body.get_bool("json_whitespace"),
        "additional_properties": body.get_bool("additional_properties"),
    }


def parse_call_options(body: Body) -> CallOptions:
    """Parse our own fields for tool calls. Raises UsageError."""
    return {"json_calls": body.get("json_calls") is not False, **parse_json_options(body)}


def parse_schema(format: Body | None) -> Any:
    """Return the JSON schema of a response_format, None for plain text. Raises UsageError."""
    if format is None:
        return None
    kind_name = format.get_choice("type", ("text", "json_object", "json_schema"))
    if kind_name == "json_object":
        return format.get_mapping("schema") or {"type": "object"}  # llama-server allows a schema here
    if kind_name != "json_schema":
        return None
    inner = format.get_object("json_schema") or format  # /v1/responses has the fields here
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise UsageError(f"{inner.qualify('schema')} should be an object, not {type_name(schema)}")
    return dict(schema)


def parse_tools(body: Body) -> "ToolUse | None":
    """Parse OpenAI's tools, tool_choice and parallel_tool_calls. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import ToolUse

    tool_list, choice = body.get_list("tools") or (), body.get("tool_choice")
    parallel, options = body.get("parallel_tool_calls") is not False, parse_call_options(body)
    if not tool_list:
        return None
    return ToolUse(
        [parse_function(Body.of(tool, "tools")) for tool in tool_list], parse_tool_choice(choice), parallel, **options
    )


def parse_function(tool: Body) -> "Tool":
    """Parse one tool. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    if tool.get_text("type") not in (None, "function"):
        raise UsageError(f"tools: {tool.get_text('type')!r} is not supported; the type of a tool should be function")
    function = tool.get_object("function") or tool  # /v1/responses has the fields here
    name, about = function.require_text("name"), function.get_text("description") or ""
    parameters = function.get_mapping("parameters")
    return Tool(name, about, dict(parameters or NOTHING), function.get_bool("strict"))


def parse_tool_choice(choice: Any) -> str:
    """Convert a tool_choice for ToolUse. Raises UsageError."""
    if isinstance(choice, dict):
        body = Body(choice, "tool_choice")
        function = body.get_object("function") or body
        return function.require_text("name")
    if choice not in (None, "auto", "required", "none"):
        raise UsageError("tool_choice should be auto, required, none or a function")
    return choice or "auto"
