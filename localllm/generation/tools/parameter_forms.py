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
            if not text.startswith('"') and fits(text, self.other):
                return text
        return json.dumps(value, ensure_ascii=False)


def form_of(schema: object, root: Schema) -> ParameterForm:
    """Return the form of a parameter's schema, which is part of `root`."""
    texts, others = list[Schema](), list[Schema]()
    for one in _alternatives(schema, root):
        text, other = _split_schema(one)
        texts += [text] if text is not None else []
        others += [other] if other is not None else []
    if not others:
        return ParameterForm(tuple(texts), None)
    shared = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root}
    joined = others[0] if len(others) == 1 else {"anyOf": others}
    return ParameterForm(tuple(texts), {**joined, **shared})


def form_of_others(schema: Schema) -> ParameterForm | None:
    """Return the form of further parameters (additionalProperties), None if there may be none."""
    others = schema.get("additionalProperties", False)
    return None if others is False else form_of(others, schema)


def _alternatives(schema: object, root: Schema) -> list[object]:
    """List the alternative schemas, with references resolved."""
    listed, waiting, seen = list[object](), [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            listed.append(one)
            continue
        words = [word for word in one if word not in _NOTES]
        if words and id(one) in seen:
            continue
        seen.add(id(one))
        if words == ["$ref"] and isinstance(there := resolve_pointer(one["$ref"], root), Mapping | bool):
            waiting.append(there)
        elif words in (["anyOf"], ["oneOf"]) or (words == ["allOf"] and len(one["allOf"]) == 1):
            waiting += reversed(one[words[0]])
        else:
            listed.append(one)
    return listed


def _split_schema(schema: object) -> tuple[Schema | None, Schema | None]:
    """Split a schema into one for the strings that it allows and one for all other values; None for no values."""
    if not isinstance(schema, Mapping):
        return ({}, {"type": OTHERS}) if schema is True else (None, {"not": {}})
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema.get("enum", [schema.get("const")])
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)]
        return {"enum": texts} if texts else None, {"enum": others} if others or not texts else None
    kinds = schema.get("type")
    if kinds is None:
        is_other = any(word in schema for word in (*_STRUCTURES, "$ref", "anyOf", "oneOf", "allOf"))
        return (None, schema) if is_other else (schema, {**schema, "type": OTHERS})
    listed = kinds if isinstance(kinds, list) else [kinds]
    rest = [kind for kind in listed if kind != "string"]
    other = {**schema, "type": rest if len(rest) > 1 else rest[0]} if rest else None
    return (schema if "string" in listed else None), other


def anything(schema: Schema) -> str:
    """Build a regular expression for strings from minLength to maxLength; other keywords of the schema are ignored."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not (most is None or isinstance(most, int)) or max(least, most or 0) > 1000:
        return "(?s:.*)"
    return f"(?s:.{{{least},{'' if most is None else most}}})"
