"""Parameters between marks of their own, as in Qwen3-Coder's calls: strings as they are, other values as JSON.

    <parameter=city>        <parameter=days>
    New York                3
    </parameter>            </parameter>

If a parameter may be a string or another type, a value that is JSON of the other type is read as that, and any other
value as a string.
"""

import json
from collections.abc import Mapping

from localllm.frozen import frozen
from localllm.generation.constraints.json_pointers import Schema, resolve_pointer
from localllm.generation.constraints.json_text import with_whole_numbers

PYTHON = {"True": "true", "False": "false", "None": "null"}
OTHERS = ["null", "boolean", "number", "array", "object"]  # all types but string
_STRUCTURES = ("properties", "items", "prefixItems", "additionalProperties", "required", "minimum", "maximum")
_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment")


@frozen
class ParameterForm:
    """The forms of a parameter's value.

    Attributes:
        texts: schemas of the strings that it may be, () for none.
        other: schema of the values that are written as JSON, None for none.
    """

    texts: tuple[Schema, ...]
    other: Schema | None

    @property
    def choices(self) -> list[str] | None:
        """The strings that it may be, if its schemas list them; else None."""
        if not self.texts or not all("enum" in text for text in self.texts):
            return None
        return [choice for text in self.texts for choice in text["enum"]]

    @property
    def pattern(self) -> str:
        """A regular expression of its strings, if they are not listed."""
        return anything(self.texts[0]) if len(self.texts) == 1 and self.other is None else "(?s:.*)"

    @property
    def python_words(self) -> dict[str, str]:
        """JSON values by their Python words (True, False, None), which templates that use str() write."""
        if self.other is None:
            return {}
        from localllm.generation.constraints.constraint import fits

        kinds = self.other.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        has_none = kinds is not None and not {"boolean", "null"} & {*listed}
        return {} if has_none else {word: value for word, value in PYTHON.items() if fits(value, self.other)}

    def read(self, value: str) -> str:
        """Convert the text between a parameter's marks to JSON."""
        if self.other is not None:
            from localllm.generation.constraints.constraint import fits

            text = value.strip()
            for written in () if text.startswith('"') else (text, with_whole_numbers(text)):
                if fits(written, self.other):
                    return written
        return json.dumps(value, ensure_ascii=False)


def form_of(schema: object, root: Schema) -> ParameterForm:
    """Return the form of a parameter's schema, which is part of `root`."""
    texts, other_schemas = list[Schema](), list[Schema]()
    for alternative in _alternatives(schema, root):
        text, other_schema = _split_schema(alternative)
        texts += [text] if text is not None else []
        other_schemas += [other_schema] if other_schema is not None else []
    if not other_schemas:
        return ParameterForm(tuple(texts), None)
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    joined = other_schemas[0] if len(other_schemas) == 1 else {"anyOf": other_schemas}
    return ParameterForm(tuple(texts), {**joined, **shared})


def form_of_others(schema: Schema) -> ParameterForm | None:
    """Return the form of further parameters (additionalProperties), None if there may be none."""
    additional = schema.get("additionalProperties", False)
    return None if additional is False else form_of(additional, schema)


def _alternatives(schema: object, root: Schema) -> list[object]:
    """List the alternative schemas, with references resolved."""
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
    """Split a schema into one for the strings that it allows and one for all other values; None for no values."""
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


def anything(schema: Schema) -> str:
    """Build a regular expression for strings from minLength to maxLength; other keywords of the schema are ignored."""
    minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
    if (
        not isinstance(minimum, int)
        or not (maximum is None or isinstance(maximum, int))
        or max(minimum, maximum or 0) > 1000
    ):
        return "(?s:.*)"
    return f"(?s:.{{{minimum},{'' if maximum is None else maximum}}})"
