"""Derive the format of a model's tool calls from known calls that its chat template renders.

    <tool_call>\\n{"name": "NAME", "arguments": {"ka": "Vab", "kb": 3}}\\n</tool_call>
    [opening                NAME  between      arguments             closing        ]

Three calls in a row show the separator between them; the segments of it that differ are ids or indices. Arguments are
JSON, or each parameter has marks of its own (`ParameterMarks`), as in <parameter=ka>\\nVab\\n</parameter>: strings as
they are, other values as JSON. If a parameter may be a string or another type, a value that is JSON of the other type
is parsed as that, and any other value as a string.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from localllm.errors import LocalllmError
from localllm.frozen import frozen
from localllm.generation.constraints.json_text import normalize_whole_numbers
from localllm.generation.constraints.schemas import Schema, resolve_pointer
from localllm.text.messages import Message

PYTHON = {"True": "true", "False": "false", "None": "null"}
OTHERS = ["null", "boolean", "number", "array", "object"]  # all types but string
_STRUCTURES = ("properties", "items", "prefixItems", "additionalProperties", "required", "minimum", "maximum")
_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment")


@frozen
class ParameterForm:
    """The ways in which the values of a parameter may be written.

    Attributes:
        texts: schemas of its strings; () if it cannot be a string.
        other: schema of its values that are written as JSON; None if all are strings.
    """

    texts: tuple[Schema, ...]
    other: Schema | None

    @property
    def choices(self) -> list[str] | None:
        """The strings that are allowed, if the schemas list them; else None."""
        if not self.texts or not all("enum" in text for text in self.texts):
            return None
        return [choice for text in self.texts for choice in text["enum"]]

    @property
    def pattern(self) -> str:
        """A regular expression for its strings, if the schemas do not list them."""
        return build_string_pattern(self.texts[0]) if len(self.texts) == 1 and self.other is None else "(?s:.*)"

    @property
    def python_words(self) -> dict[str, str]:
        """The JSON values by their Python words (True, False, None), which templates that use str() write."""
        if self.other is None:
            return {}
        from localllm.generation.constraints.constraint import matches_schema

        kinds = self.other.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        has_none = kinds is not None and not {"boolean", "null"} & {*listed}
        return {} if has_none else {word: value for word, value in PYTHON.items() if matches_schema(value, self.other)}

    def read(self, value: str) -> str:
        """Return the text between the marks of the parameter as JSON."""
        if self.other is not None:
            from localllm.generation.constraints.constraint import matches_schema

            text = value.strip()
            for written in () if text.startswith('"') else (text, normalize_whole_numbers(text)):
                if matches_schema(written, self.other):
                    return written
        return json.dumps(value, ensure_ascii=False)


def make_parameter_form(schema: object, root: Schema) -> ParameterForm:
    """Return the form of a parameter.

    schema: schema of the parameter, a subschema of `root`.
    """
    texts, other_schemas = list[Schema](), list[Schema]()
    for alternative in _list_alternatives(schema, root):
        text, other_schema = _split_schema(alternative)
        texts += [text] if text is not None else []
        other_schemas += [other_schema] if other_schema is not None else []
    if not other_schemas:
        return ParameterForm(tuple(texts), None)
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    joined = other_schemas[0] if len(other_schemas) == 1 else {"anyOf": other_schemas}
    return ParameterForm(tuple(texts), {**joined, **shared})


def make_additional_form(schema: Schema) -> ParameterForm | None:
    """Return the form of additional properties; None if the schema does not allow them."""
    additional = schema.get("additionalProperties", False)
    return None if additional is False else make_parameter_form(additional, schema)


def _list_alternatives(schema: object, root: Schema) -> list[object]:
    listed, waiting, visited = list[object](), [schema], set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            listed.append(each)
            continue
        words = [word for word in each if word not in _NOTES]
        if words and id(each) in visited:
            continue
        visited.add(id(each))
        if words == ["$ref"] and isinstance(target := resolve_pointer(each["$ref"], root), Mapping | bool):
            waiting.append(target)
        elif words in (["anyOf"], ["oneOf"]) or (words == ["allOf"] and len(each["allOf"]) == 1):
            waiting += reversed(each[words[0]])
        else:
            listed.append(each)
    return listed


def _split_schema(schema: object) -> tuple[Schema | None, Schema | None]:
    """Split a schema into one for the strings that it allows and one for all other values.

    Either is None if it allows no such values.
    """
    if not isinstance(schema, Mapping):
        return ({}, {"type": OTHERS}) if schema is True else (None, {"not": {}})
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema.get("enum", [schema.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        other_values = [value for value in values if not isinstance(value, str)]
        return {"enum": texts} if texts else None, {"enum": other_values} if other_values or not texts else None
    kinds = schema.get("type")
    if kinds is None:
        is_other = any(word in schema for word in (*_STRUCTURES, "$ref", "anyOf", "oneOf", "allOf"))
        return (None, schema) if is_other else (schema, {**schema, "type": OTHERS})
    listed = kinds if isinstance(kinds, list) else [kinds]
    other_types = [kind for kind in listed if kind != "string"]
    other_schema = {**schema, "type": other_types if len(other_types) > 1 else other_types[0]} if other_types else None
    return (schema if "string" in listed else None), other_schema


def build_string_pattern(schema: Schema) -> str:
    """Return a regular expression for strings from minLength to maxLength.

    Other keywords of the schema are ignored.
    """
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if (
        not isinstance(minimum, int)
        or not (maximum is None or isinstance(maximum, int))
        or max(minimum, maximum or 0) > 1000
    ):
        return "(?s:.*)"
    return f"(?s:.{{{minimum},{'' if maximum is None else maximum}}})"


ID = "\ufdd2"  # a noncharacter, the placeholder of a call's id
NAME, SAID = "qx_alpha", "Xyzzy"
KEYS, TEXTS, NUMBERS = ("ka", "kb"), ("Vab", "Vcd"), (31, 32)
IDS = ("callAaa01", "callAaa02", "callAaa03")
_JSON = re.compile(r'\{\s*"ka":\s*"Vab",\s*"kb":\s*31\s*\}')
_TAG = re.compile(r"\s*(<[^<>\s]{2,}>|\[[^][\s]{2,}\]|<[\w:]{3,}=)")
Render = Callable[[Sequence[Message], bool], str]  # messages, and whether to add the generation prompt


@frozen
class ParameterMarks:
    """The marks around parameters that are not written as one JSON object.

    Attributes:
        first, next: text before the name of the first parameter, and before that of each other one.
        text, json: texts before and after a value that is a string, and one of another type.
    """

    first: str
    next: str
    text: tuple[str, str]
    json: tuple[str, str]


@frozen
class ToolCallFormat:
    """The text around tool calls; the character ID stands for the ids of calls.

    Attributes:
        opening: text before the name of the first call.  between: text between a name and its arguments.
        separator: text between the arguments of a call and the next name; None if an answer has only one call.
        closing: text after the arguments of the last call.
        marks: marks of parameters; None if arguments are JSON.
        as_text: whether the template expects arguments as a string of JSON.
        is_known: whether the template describes the tools to the model; otherwise a system message must.
    """

    opening: str
    between: str
    separator: str | None
    closing: str
    marks: ParameterMarks | None = None
    as_text: bool = False
    is_known: bool = True

    @property
    def trigger(self) -> str:
        """The text that begins a call: the first tag or token of the opening, or the whole opening."""
        tag = _TAG.match(self.opening)
        return tag[1] if tag else self.opening.lstrip()

    @property
    def has_tag(self) -> bool:
        """Return whether the opening begins with a tag."""
        return bool(_TAG.match(self.opening))


# Formats of templates that describe tools but cannot render calls, by a string in the template.
UNRENDERED_FORMATS = {
    "<|tool_call|>": ToolCallFormat('<|tool_call|>[{"name": "', '", "arguments": ', '}, {"name": "', "}]"),  # Granite 3
    "<|tool_call_start|>": ToolCallFormat(
        "<|tool_call_start|>[", "(", "), ", ")]<|tool_call_end|>", ParameterMarks("", ", ", ('="', '"'), ("=", ""))
    ),  # LFM2
}
HARMONY = ToolCallFormat(" to=functions.", "<|channel|>commentary json<|message|>", None, "")
GENERIC = ToolCallFormat('{"name": "', '", "arguments": ', None, "}", is_known=False)


def derive_call_format(source: str, render: Render, ends: Sequence[str]) -> ToolCallFormat:
    """Derive the format of tool calls from calls of a tool NAME that a template renders.

    source: source of the template. ends: texts of end tokens.
    """
    is_known = NAME in try_render(render, [USER], True)
    format_found = (
        induce_json_format(render, ends, False)
        or induce_tagged_format(render, ends)
        or induce_json_format(render, ends, True)
    )
    if format_found is None and is_known:
        format_found = next((format for mark, format in UNRENDERED_FORMATS.items() if mark in source), None)
    if format_found is None or not format_found.trigger or format_found.trigger in ends:
        return GENERIC
    if format_found.opening.startswith(HARMONY.opening.lstrip()):
        format_found = HARMONY
    return replace(format_found, is_known=is_known)


USER: Message = {"role": "user", "content": "Hi"}


def make_calls_message(count: int, arguments: object) -> Message:
    """Return an assistant's message with calls of the tool NAME."""
    calls = [{"id": id, "type": "function", "function": {"name": NAME, "arguments": arguments}} for id in IDS[:count]]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def try_render(render: Render, messages: list[Message], begins: bool = False) -> str:
    """Render messages; return "" if the template fails.

    begins: whether the beginning of an answer is added.
    """
    try:
        return render(messages, begins)
    except LocalllmError:
        return ""


def induce_json_format(render: Render, ends: Sequence[str], as_text: bool) -> ToolCallFormat | None:
    """Return the format of a template that writes arguments as JSON; None if it does not."""
    sample: dict[str, object] = dict(zip(KEYS, (TEXTS[0], NUMBERS[0]), strict=True))
    texts = [
        render_reply(render, make_calls_message(count, dump_arguments(sample) if as_text else sample), ends)
        for count in (1, 2, 3)
    ]
    pieces = [re.split(rf"{NAME}|{_JSON.pattern}", text) for text in texts]
    if len(pieces[0]) != 3 or texts[0].count(NAME) != 1:
        return None
    opening, between, closing = pieces[0]
    separator = None
    if len(pieces[1]) == 5 and len(pieces[2]) == 7:
        separator = replace_differing_ids(pieces[1][2], pieces[2][4])
    return ToolCallFormat(strip_opening(opening), replace_ids(between), separator, replace_ids(closing), None, as_text)


def dump_arguments(arguments: dict[str, object]) -> str:
    """Return arguments as JSON."""
    import json

    return json.dumps(arguments)


def induce_tagged_format(render: Render, ends: Sequence[str]) -> ToolCallFormat | None:
    """Return the format of a template that marks each parameter; None if it does not."""
    kinds = []
    for values in (TEXTS, NUMBERS):
        sample = dict(zip(KEYS, values, strict=True))
        words = [NAME, KEYS[0], str(values[0]), KEYS[1], str(values[1])]
        pieces = [
            re.split("|".join(words), render_reply(render, make_calls_message(count, sample), ends)) for count in (1, 2)
        ]
        if len(pieces[0]) != 6:
            return None
        kinds.append((pieces[0], pieces[1][5] if len(pieces[1]) == 11 else None))
    ((opening, first, mid, next, _, end), separator), ((_, _, mid_json, next_json, _, end_json), _) = kinds
    close, close_json = find_common_prefix(next, end), find_common_prefix(next_json, end_json)
    next, closing = next[len(close) :], end[len(close) :]
    if next != next_json[len(close_json) :] or closing != end_json[len(close_json) :]:
        return None
    between, begins = first, ""
    if next and first.endswith(next):
        between, begins = first.removesuffix(next), next
    marks = ParameterMarks(begins, next, (mid, close), (mid_json, close_json))
    separator = separator and replace_ids(separator.removeprefix(close))
    return ToolCallFormat(strip_opening(opening), replace_ids(between), separator, replace_ids(closing), marks)


def render_reply(render: Render, message: Message, ends: Sequence[str]) -> str:
    """Return the text that a model has to generate for a message, without the text of the template around it."""
    text, prompt = try_render(render, [USER, message]), try_render(render, [USER], True)
    place = text.rfind(NAME) if NAME in text else -1
    first = text.find(NAME, len(find_common_prefix(text, prompt)))
    if first < 0 or place < 0:
        return ""
    begin = len(find_common_prefix(text, prompt))
    if (tag_begin := text.rfind("<", 0, begin)) > text.rfind(">", 0, begin):  # `begin` is within a tag
        begin = tag_begin
    start = max([begin, *(find_mark_end(mark, text, first) for mark in THOUGHT_ENDS)])
    reply = text[start:]
    stops = [at for end in ends if (at := reply.find(end)) > 0]
    plain = try_render(render, [USER, {"role": "assistant", "content": SAID}]).partition(SAID)[2]
    reply = reply[: min(stops)] if stops else reply.removesuffix(plain)
    return reply.rstrip() if stops else reply


THOUGHT_ENDS = ("</think>", "</mm:think>", "</seed:think>", "<|END_THINKING|>", "[/THINK]", "</think:opensource>")


def find_mark_end(mark: str, text: str, limit: int) -> int:
    """Return the index after the last occurrence of a mark before index `limit`; 0 without one."""
    place = text.rfind(mark, 0, limit)
    return place + len(mark) if place >= 0 else 0


def find_common_prefix(first: str, second: str) -> str:
    """Return the longest common prefix of two strings."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def strip_opening(opening: str) -> str:
    """Return an opening without leading white space, and with ids replaced by ID."""
    return replace_ids(opening.lstrip())


def replace_ids(piece: str) -> str:
    """Replace the ids of the known calls by the character ID."""
    for id in IDS:
        piece = piece.replace(id, ID)
    return piece


def replace_differing_ids(first: str, second: str) -> str:
    """Replace the numbers in which two strings differ by ID, if nothing else differs."""
    first, second = replace_ids(first), replace_ids(second)
    if first == second:
        return first
    numbers = re.compile(r"\d+")
    if numbers.sub(ID, first) != numbers.sub(ID, second):
        return first
    parts = zip(numbers.findall(first), numbers.findall(second), strict=True)
    replaced = iter([a if a == b else ID for a, b in parts])
    return numbers.sub(lambda match: next(replaced), first)
