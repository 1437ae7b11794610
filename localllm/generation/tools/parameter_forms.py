"""The format of parameters that have marks of their own and are not part of JSON: a text as it is, all else as JSON.

    <parameter=city>        <parameter=days>
    New York                3
    </parameter>            </parameter>

A parameter that may be a text or something else (a text or null, or anything) is written in both ways: what is JSON of
the other kinds is that, and the rest is a text.
"""

import json
from collections.abc import Mapping
from typing import Any

from localllm.frozen import frozen
from localllm.generation.constraints.json_pointers import resolve_pointer

Schema = Mapping[str, Any]
PYTHON = {"True": "true", "False": "false", "None": "null"}
OTHERS = ["null", "boolean", "number", "array", "object"]  # types but for texts
_STRUCTURES = ("properties", "items", "prefixItems", "additionalProperties", "required", "minimum", "maximum")
_NOTES = ("title", "description", "default", "examples", "deprecated", "$comment")


@frozen
class ParameterForm:
    """The forms of a parameter's value.

    Attributes:
        texts: schemas of texts, () if it is none.  other: a schema of what is JSON, None if it is a text only.
    """

    texts: tuple[Schema, ...]
    other: Schema | None

    @property
    def choices(self) -> list[str] | None:
        """The texts that it may be, if they are few."""
        if not self.texts or not all("enum" in text for text in self.texts):
            return None
        return [choice for text in self.texts for choice in text["enum"]]

    @property
    def pattern(self) -> str:
        """A regular expression of its texts that are not few."""
        return anything(self.texts[0]) if len(self.texts) == 1 and self.other is None else "(?s:.*)"

    @property
    def python_words(self) -> dict[str, str]:
        """Python's words for values that it may be, as JSON: templates write these for booleans and nulls."""
        if self.other is None:
            return {}
        from localllm.generation.constraints.constraint import fits

        kinds = self.other.get("type")
        listed = kinds if isinstance(kinds, list) else [kinds]
        is_told = kinds is not None and not {"boolean", "null"} & {*listed}
        return {} if is_told else {word: value for word, value in PYTHON.items() if fits(value, self.other)}

    def read(self, said: str) -> str:
        """Convert the text between a parameter's marks to JSON."""
        if self.other is not None:
            from localllm.generation.constraints.constraint import fits

            text = said.strip()
            if not text.startswith('"') and fits(text, self.other):
                return text
        return json.dumps(said, ensure_ascii=False)


def form_of(schema: Any, root: Schema) -> ParameterForm:
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
    """Return the form of parameters that a schema does not name, None if there are none."""
    others = schema.get("additionalProperties", False)
    return None if others is False else form_of(others, schema)


def _alternatives(schema: Any, root: Schema) -> list[Any]:
    """List the alternative schemas, with references resolved."""
    found, waiting, seen = list[Any](), [schema], set[int]()
    while waiting:
        one = waiting.pop()
        words = [word for word in one if word not in _NOTES] if isinstance(one, Mapping) else []
        if words and id(one) in seen:
            continue
        seen.add(id(one))
        if words == ["$ref"] and isinstance(there := resolve_pointer(one["$ref"], root), Mapping | bool):
            waiting.append(there)
        elif words in (["anyOf"], ["oneOf"]) or (words == ["allOf"] and len(one["allOf"]) == 1):
            waiting += reversed(one[words[0]])
        else:
            found.append(one)
    return found


def _split_schema(schema: Any) -> tuple[Schema | None, Schema | None]:
    """Split a schema into the texts that it allows, and everything else."""
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
    """Build a regular expression for texts of a schema's length; other keywords are ignored."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not (most is None or isinstance(most, int)) or max(least, most or 0) > 1000:
        return "(?s:.*)"
    return f"(?s:.{{{least},{'' if most is None else most}}})"
