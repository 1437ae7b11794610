"""Parse the fields of a request into generation options."""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from localllm.errors import UsageError
from localllm.generation.adapters import parse_scales
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import OPTIONS, SamplingOptions, map_names
from localllm.server.fields import RequestBody, describe_type
from localllm.text.messages import Message
from localllm.values import parse_duration

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

# Names of sampling options in requests: ours, vLLM's and llama-server's.
SAMPLING_FIELDS = {name: name for name in OPTIONS} | map_names("vllm", OPTIONS) | map_names("llamacpp", OPTIONS)
EFFORTS = {"none": "off", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high",
           "max": "high", "default": "auto"}  # fmt: skip
MODES = {"auto": "auto", "required": "required", "any": "required", "none": "none"}  # by tool_choice; any: Mistral's
MAX_CHOICES = 16  # per prompt
MAX_STOPS = 16
MAX_BANNED = 256
MAX_LOGPROBS = 20  # alternatives per token
# Fields of other servers' APIs that have no effect on a response: user, billing, storage.
IGNORED_FIELDS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt",
               "prompt_cache_retention", "verbosity", "id_slot")  # fmt: skip


def parse_keep_alive(body: RequestBody) -> float | None:
    """Parse Ollama's keep_alive, the time a model stays open: seconds, or a duration such as 5m; negative: forever.

    Raises UsageError.
    """
    value = body.get("keep_alive")
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        raise UsageError("keep_alive must be a number of seconds, or a duration such as 5m or 1h30m")
    return seconds


def parse_progress(body: RequestBody, is_streaming: bool) -> bool:
    """Parse llama-server's return_progress, which has no effect without a stream. Raises UsageError."""
    return body.get_bool("return_progress") and is_streaming


def parse_sampling(body: RequestBody) -> SamplingOptions:
    """Parse the sampling fields: OpenAI's, and all fields of SamplingOptions. Raises UsageError."""
    values = dict[str, Any]()  # SamplingOptions checks the types
    for field, name in SAMPLING_FIELDS.items():
        if (value := body.get(field)) is not None:
            # As in llama-server: top_k -1 keeps all tokens, top_p 0 the most likely one.
            values[name] = OPTIONS[name].clamp(value) if OPTIONS[name].is_clamped else value
    seed = body.get_int("seed", -sys.maxsize)
    values["seed"] = None if seed in (None, -1) else seed % 2**64
    values["logit_bias"] = parse_biases(values.get("logit_bias"))
    return SamplingOptions(**values)


def parse_biases(value: object) -> dict[int, float] | None:
    """Parse logit_bias: OpenAI's object by token id, or llama-server's array of pairs, where false bans a token.

    Raises UsageError.
    """
    if value is None:
        return None
    pairs = [*value.items()] if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(is_bias(pair) for pair in pairs):
        raise UsageError("logit_bias must be an object of numbers by token id, or an array of pairs")
    return {int(token): -math.inf if bias is False else bias for token, bias in pairs}


def is_bias(pair: object) -> bool:
    """Return whether a pair is a token id (an integer or digits), and a number or false."""
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    token, bias = pair
    is_id = token.isdecimal() and len(token) < 20 if isinstance(token, str) else type(token) is int and token >= 0
    return is_id and (bias is False or type(bias) in (int, float))


def parse_options(
    body: RequestBody, max_tokens: int | None, constraint: "Constraint | None", tools: "ToolUse | None" = None
) -> GenerationOptions:
    """Parse the options that chat, completions and infill share. Raises UsageError."""
    stop = body.get_strings("stop")
    if len(stop) > MAX_STOPS:
        raise UsageError(f"stop must be at most {MAX_STOPS} strings, not {len(stop)}")
    for name in IGNORED_FIELDS:
        body.get(name)
    return GenerationOptions(
        max_tokens, stop, parse_sampling(body), cache_reuse=body.get_int("n_cache_reuse"), ban=parse_banned(body),
        constraint=constraint, tools=tools,
        think=parse_think(body), think_budget=body.get_int("think_budget"),
        template_variables=dict(body.get_mapping("chat_template_kwargs") or {}), lora=parse_scales(body.get("lora")),
    )  # fmt: skip


def parse_banned(body: RequestBody) -> tuple[str, ...]:
    texts = body.get_strings("banned_strings")
    if len(texts) > MAX_BANNED:
        raise UsageError(f"banned_strings must be at most {MAX_BANNED} strings, not {len(texts)}")
    return texts


def apply_continuation(body: RequestBody, options: GenerationOptions, messages: list[Message]) -> GenerationOptions:
    """Apply vLLM's continue_final_message and add_generation_prompt. Raises UsageError.

    A last message of the assistant is continued unless one of these says otherwise.
    """
    continues, adds_prompt = (
        body.get_optional_bool("continue_final_message"),
        body.get_optional_bool("add_generation_prompt"),
    )
    if continues and adds_prompt:
        raise UsageError("continue_final_message and add_generation_prompt exclude each other; set only one to true")
    if continues and (messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls")):
        raise UsageError("continue_final_message: the last message must be an assistant message without tool calls")
    if adds_prompt is False and not continues:
        options = replace(options, template_variables={**options.template_variables, "add_generation_prompt": False})
    return replace(options, continue_final=False if adds_prompt and continues is None else continues)


def parse_think(body: RequestBody) -> str:
    """Parse OpenAI's `reasoning_effort` or localllm's `think`."""
    effort = body.get_choice("reasoning_effort", tuple(EFFORTS))
    think = body.get_string("think")
    return think or (EFFORTS[effort] if effort else "auto")


def parse_constraint(body: RequestBody) -> "Constraint | None":
    """Parse response_format, or localllm's fields grammar (GBNF) and regex. Raises UsageError."""
    from localllm.generation.constraints.constraint import make_constraint

    schema = parse_schema(body.get_object("response_format"))
    return make_constraint(schema, body.get_string("grammar"), body.get_string("regex"), **parse_json_options(body))


class JsonOptions(TypedDict):
    json_whitespace: bool
    additional_properties: bool


class CallOptions(JsonOptions):
    json_calls: bool


def parse_json_options(body: RequestBody) -> JsonOptions:
    return {
        "json_whitespace": body.get_bool("json_whitespace"),
        "additional_properties": body.get_bool("additional_properties"),
    }


def parse_call_options(body: RequestBody) -> CallOptions:
    return {"json_calls": body.get("json_calls") is not False, **parse_json_options(body)}


def parse_schema(format: RequestBody | None) -> object:
    """Return the JSON schema of a response_format, None for plain text. Raises UsageError."""
    if format is None:
        return None
    kind_name = format.get_choice("type", ("text", "json_object", "json_schema"))
    if kind_name == "json_object":
        return format.get_mapping("schema") or {"type": "object"}  # llama-server allows a schema
    if kind_name != "json_schema":
        return None
    inner = format.get_object("json_schema") or format  # /v1/responses has the fields at this level
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise UsageError(f"{inner.qualify('schema')} must be an object, not {describe_type(schema)}")
    return dict(schema)


def parse_tools(body: RequestBody) -> "ToolUse | None":
    """Parse OpenAI's tools, tool_choice and parallel_tool_calls; only functions are used. Raises UsageError."""
    from localllm.generation.tools.tool_grammar import Tool, ToolUse

    tool_list, choice = body.get_list("tools") or (), body.get("tool_choice")
    parallel, options = body.get("parallel_tool_calls") is not False, parse_call_options(body)
    tools = list[Tool]()
    for number, tool in enumerate(RequestBody.parse(value, "tools") for value in tool_list):
        if (kind := tool.get_string("type")) in (None, "function"):
            tools.append(parse_function(tool))
        else:
            body.ignore(f"tools[{number}]:{kind}")
    if not tools:
        return None
    mode, allowed = parse_tool_choice(choice)
    return ToolUse(tools, mode, parallel, allowed=allowed, **options)


def parse_function(tool: RequestBody, namespace: str | None = None) -> "Tool":
    from localllm.generation.tools.tool_grammar import NOTHING, Tool

    function = tool.get_object("function") or tool  # /v1/responses has the fields at this level
    name, about = function.require_string("name"), function.get_string("description") or ""
    parameters = function.get_mapping("parameters")
    return Tool(flatten_name(namespace, name), about, dict(parameters or NOTHING), function.get_bool("strict"))


def flatten_name(namespace: str | None, name: str) -> str:
    """Join a namespace and a function's name into the name shown to the model, such as mcp__files__read."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def parse_tool_choice(choice: object) -> tuple[str, tuple[str, ...] | None]:
    """Convert a tool_choice to ToolUse's choice, and the allowed tools or None. Raises UsageError."""
    if isinstance(choice, dict) and (body := RequestBody(choice, "tool_choice")).get("type") not in MODES:
        if body.get("type") != "allowed_tools":
            return parse_tool_name(body), None
        inner = body.get_object("allowed_tools") or body
        listed = [RequestBody.parse(tool, "tool_choice.tools") for tool in inner.require_list("tools")]
        mode = inner.get_choice("mode", ("auto", "required")) or "auto"
        return mode, tuple(parse_tool_name(tool) for tool in listed if tool.get("type") in ("function", "custom"))
    name = choice["type"] if isinstance(choice, dict) else choice
    if name is None:
        return "auto", None
    if not isinstance(name, str) or name not in MODES:
        raise UsageError("tool_choice must be auto, required, none or a function")
    return MODES[name], None


def parse_tool_name(body: RequestBody) -> str:
    """Return the tool's name from an object of tool_choice. Raises UsageError."""
    function = body.get_object("function") or body.get_object("custom") or body
    return flatten_name(function.get_string("namespace"), function.require_string("name"))
