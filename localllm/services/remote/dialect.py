"""Differences between servers with OpenAI's API; /v1/models reveals a server's program."""

from collections.abc import Mapping

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.schemas import close_objects
from localllm.generation.options import CALLABLES, EFFORTS, GenerationOptions
from localllm.generation.sampling.options import OPTIONS, map_names

UNLIMITED = 2**31 - 1


@frozen
class ServerDialect:
    """The features that a server program supports.

    Attributes:
        sampling: localllm's names of sampling options, by the server's.  grammar, regex: the request fields for them,
            "" if there are none.  variables: whether it accepts chat_template_kwargs.
    """

    name: str
    sampling: Mapping[str, str]
    grammar: str = ""
    regex: str = ""
    variables: bool = True


DIALECTS = {
    "localllm": ServerDialect("localllm", {name: name for name in OPTIONS}, "grammar", "regex"),
    "llamacpp": ServerDialect("llama-server", map_names("llamacpp", OPTIONS), "grammar"),
    "vllm": ServerDialect("vLLM", map_names("vllm", OPTIONS), "structured_outputs.grammar", "structured_outputs.regex"),
}
OTHER = ServerDialect("a server with OpenAI's API", map_names("openai", OPTIONS), variables=False)


@frozen
class OutputFormat:
    """The required output format: a JSON schema, a GBNF grammar, a regular expression, or none.

    Attributes:
        additional_properties: allow objects to have properties that the schema does not list.
    """

    schema: object = None
    grammar: str | None = None
    regex: str | None = None
    additional_properties: bool = False

    @property
    def is_free(self) -> bool:
        return self.schema is None and self.grammar is None and self.regex is None


def build_request(options: GenerationOptions, form: OutputFormat, dialect: ServerDialect) -> dict[str, object]:
    """Build the fields of a request. Raises UsageError for options that the server does not support."""
    request: dict[str, object] = {"stop": [*options.stop]} if options.stop and form.is_free else {}
    if options.max_tokens is not None:
        request["max_tokens"] = options.max_tokens
    if options.ban:
        if dialect.name != "localllm":
            raise make_unsupported_error("ban", dialect)
        request["banned_strings"] = [*options.ban]
    for name in CALLABLES:
        if getattr(options, name):
            raise make_unsupported_error(name, dialect)
    fields = {name: field for field, name in dialect.sampling.items()}
    for name, value in options.sampling.explicit.items():
        if name not in fields:
            raise make_unsupported_error(name, dialect)
        request[fields[name]] = to_json(value)
    request |= build_format_fields(form, dialect) | build_reasoning_fields(options, dialect)
    if options.lora is not None:
        request["lora"] = build_scales(options.lora, dialect)
    if form.schema is not None and dialect.name == "localllm" and options.constraint and not options.is_compact:
        request["json_whitespace"] = True
    if options.tools and options.tools.callable:
        request["tools"] = [tool.to_json_schema() for tool in options.tools.callable]
    return request


def build_scales(lora: Mapping[str, float], dialect: ServerDialect) -> list[dict[str, object]]:
    """Build the field for adapters. Raises UsageError for a name where the server knows ids only."""
    if dialect.name not in ("localllm", "llama-server"):
        raise make_unsupported_error("lora", dialect)
    if name := next((name for name in lora if dialect.name != "localllm" and not name.isdecimal()), None):
        raise UsageError(f"lora must have ids, not {name!r:.80}: {dialect.name} does not know adapters by name")
    keys = [{"id": int(name)} if name.isdecimal() and len(name) < 4 else {"name": name} for name in lora]
    return [{**key, "scale": scale} for key, scale in zip(keys, lora.values(), strict=True)]


def to_json(value: object) -> object:
    """Convert an option to JSON; clamp biases to OpenAI's range, -100 to 100."""
    if isinstance(value, Mapping):
        return {str(key): max(-100.0, min(100.0, bias)) for key, bias in value.items()}
    return [*value] if isinstance(value, tuple) else value


def build_format_fields(form: OutputFormat, dialect: ServerDialect) -> dict[str, object]:
    """Build the fields for a schema, a grammar or a regular expression."""
    if form.schema is not None:
        is_own = dialect.name == "localllm"
        schema = form.schema
        if isinstance(schema, Mapping) and not is_own and not form.additional_properties:
            schema = close_objects(schema)
        inner = {"name": "answer", "schema": schema, "strict": True}
        extension = {"additional_properties": True} if is_own and form.additional_properties else {}
        return {"response_format": {"type": "json_schema", "json_schema": inner}, **extension}
    for name, value in (("grammar", form.grammar), ("regex", form.regex)):
        if value is None:
            continue
        field: str = getattr(dialect, name)
        if not field:
            raise make_unsupported_error(name, dialect)
        outer, _, inner_name = field.partition(".")
        return {outer: {inner_name: value} if inner_name else value}
    return {}


def build_reasoning_fields(options: GenerationOptions, dialect: ServerDialect) -> dict[str, object]:
    """Build the fields for reasoning and the chat template's variables."""
    request: dict[str, object] = {}
    variables = dict(options.template_variables)
    if dialect.name == "localllm":
        request |= {"think": options.think} if options.think != "auto" else {}
        request |= {} if options.think_budget is None else {"think_budget": options.think_budget}
    elif options.think_budget is not None:
        raise make_unsupported_error("think_budget", dialect)
    elif options.think in EFFORTS:
        request["reasoning_effort"] = options.think
    elif options.think != "auto":
        if not dialect.variables:
            raise make_unsupported_error("think", dialect)
        variables["enable_thinking"] = options.think == "on"
    if variables and not dialect.variables:
        raise make_unsupported_error("template_var", dialect)
    return {**request, "chat_template_kwargs": variables} if variables else request


def make_unsupported_error(name: str, dialect: ServerDialect) -> UsageError:
    return UsageError(f"{name} is not available with this endpoint: {dialect.name} does not support it")
