#!/usr/bin/env python3
"""Generate answers that must match many different JSON schemas, and validate each with the library jsonschema.

    scripts/fuzz/check_schemas.py MODEL... [--count 300] [--seed 1]

Each finished answer must be valid; answers cut by max_tokens are counted. There are two rounds: tokens that the model
prefers, and tokens drawn at random from all that are allowed, which finds answers that no model would give.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from jsonschema.validators import validator_for

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import localllm  # noqa: E402
from localllm.generation.constraints.constraint import Constraint  # noqa: E402
from localllm.generation.options import GenerationOptions  # noqa: E402
from localllm.generation.sampling.sampler import SamplingOptions  # noqa: E402

Schema = dict[str, Any]

PATTERNS = (
    r"^[A-Z]{2}-\d{1,4}$",
    r"^(red|green|blue)$",
    r"^\w{1,8}$",
    r"^a?b{1,3}c*$",
    r"^[^\s\"]{1,6}$",
    r"^\d+(\.\d+)?%$",
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NAMES = ("name", "age", "city", "is_open", "price", "tags", "größe", "a b", "kind", "id")


class Schemas:
    """Makes schemas at random; the same for the same seed."""

    def __init__(self, seed: int):
        self._random = Random(seed)

    def __iter__(self) -> Iterator[tuple[str, Schema]]:
        """Yield (kind, schema), the kinds in turn."""
        kinds = [*self._kinds()]
        while True:
            for kind in kinds:
                yield kind, getattr(self, f"_{kind}")(3)

    def _kinds(self) -> tuple[str, ...]:
        return ("object", "array", "string", "integer", "number", "enum", "union", "reference", "format", "both",
                "tuple", "map", "recursion", "types", "older")  # fmt: skip

    def _any(self, depth: int) -> Schema:
        kinds = ["string", "integer", "number", "enum", "format", "types"]
        kinds += ["object", "array", "union", "tuple", "map"] if depth > 0 else []
        return getattr(self, f"_{self._random.choice(kinds)}")(depth)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        schema["required"] = self._random.sample(names, self._random.randint(0, len(names)))
        schema["additionalProperties"] = self._random.choice([False, False, {"type": "integer", "minimum": 0}])
        return self._described(schema)

    def _map(self, depth: int) -> Schema:
        kind = self._random.choice(["plain", "pattern", "count"])
        if kind == "plain":
            return {"type": "object", "additionalProperties": self._any(depth - 2), "maxProperties": 2}
        if kind == "pattern":
            patterns = {"^x_[a-z]{1,3}$": self._any(depth - 2)}
            return {"type": "object", "patternProperties": patterns, "additionalProperties": False}
        return {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 3}

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth - 1),
            "minItems": least,
            "maxItems": least + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        first = [self._any(depth - 2) for _ in range(self._random.randint(1, 3))]
        rest = self._random.choice([False, {"type": "null"}])
        return {
            "type": "array",
            "prefixItems": first,
            "items": rest,
            "minItems": len(first),
            "maxItems": len(first) + 1,
        }

    def _string(self, depth: int) -> Schema:
        if self._random.random() < 0.4:
            return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 12}
        least = self._random.randint(0, 5)
        return self._described({"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 15)})

    def _format(self, depth: int) -> Schema:
        chosen = self._random.choice(FORMATS)
        limits = {"maxLength": 30} if chosen in ("email", "hostname", "uri", "duration") else {}
        return {"type": "string", "format": chosen, **limits}

    def _integer(self, depth: int) -> Schema:
        least = self._random.choice([-1000, -7, 0, 1, 13, 10**9])
        schema: Schema = {"type": "integer", self._random.choice(["minimum", "exclusiveMinimum"]): least}
        schema[self._random.choice(["maximum", "exclusiveMaximum"])] = least + self._random.choice([20, 99, 12345])
        if self._random.random() < 0.3:
            schema["multipleOf"] = self._random.choice([2, 5, 7])
        return schema

    def _number(self, depth: int) -> Schema:
        least = self._random.choice([-2.5, 0, 0.001, 17.25, -1e6])
        schema: Schema = {"type": "number", self._random.choice(["minimum", "exclusiveMinimum"]): least}
        schema[self._random.choice(["maximum", "exclusiveMaximum"])] = least + self._random.choice([0.5, 3, 1e4])
        return schema

    def _enum(self, depth: int) -> Schema:
        values = [
            "red",
            "grün",
            'a "quoted" one',
            "",
            1,
            -2.5,
            True,
            None,
            [1, 2],
            {"a": {"b": None}},
            "line\nbreak",
            "😀",
        ]
        if self._random.random() < 0.3:
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _types(self, depth: int) -> Schema:
        return {
            "type": self._random.sample(["boolean", "null", "integer"], self._random.randint(1, 3)),
            "maximum": 99999,
        }

    def _union(self, depth: int) -> Schema:
        if self._random.random() < 0.3:  # no value is of two of these
            alone = [self._string(0), self._integer(0), {"type": "null"}, {"type": "boolean"}]
            return {"oneOf": self._random.sample(alone, self._random.randint(2, 4))}
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randint(2, 3))]}

    def _both(self, depth: int) -> Schema:
        name, other = self._random.sample(NAMES, 2)
        least = self._random.randint(-9, 9)
        parts: list[Schema] = [
            {"type": "object", "properties": {name: {"type": "integer"}, other: self._any(0)}, "required": [other]},
            {"properties": {name: {"minimum": least, "maximum": least + 9}}, "required": [name]},
        ]
        return {"allOf": parts, "additionalProperties": False, "properties": {name: True, other: True}}

    def _reference(self, depth: int) -> Schema:
        word = self._random.choice(["$defs", "definitions"])
        refer = {"$ref": f"#/{word}/part"}
        schema = {
            "type": "object",
            "properties": {"first": refer, "all": {"type": "array", "items": refer, "maxItems": 2}},
        }
        return {**schema, "required": ["first"], "additionalProperties": False, word: {"part": self._any(depth - 2)}}

    def _recursion(self, depth: int) -> Schema:
        least = self._random.randint(0, 9)
        node = {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": least, "maximum": least + 9},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}

    def _older(self, depth: int) -> Schema:
        """Convert a schema to draft 7."""
        first = [self._any(0), self._any(0)]
        schema = {"type": "array", "items": first, "additionalItems": False, "minItems": 2}
        return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}

    def _described(self, schema: Schema) -> Schema:
        """Add a title or description, sometimes."""
        words = {"title": "A thing", "description": "What it is.", "examples": [1], "default": None}
        return {**schema, **words} if self._random.random() < 0.2 else schema


def checker(schema: Schema) -> jsonschema.FormatChecker:
    """Return a draft's checker, without the formats for which jsonschema needs other packages."""
    formats = jsonschema.FormatChecker()
    formats.checkers |= validator_for(schema, default=jsonschema.Draft202012Validator).FORMAT_CHECKER.checkers
    for name, is_right in CHECKS.items():
        formats.checks(name, ValueError)(lambda value, is_right=is_right: not isinstance(value, str) or is_right(value))
    return formats


def _instant(parse: Any, text: str) -> Any:
    """Accept what Python cannot parse: leap seconds, and fractions of more than six digits."""
    return parse(re.sub(r":60(?=[.Zz+-])", ":59", re.sub(r"(\.\d{6})\d+", r"\1", text.upper())))


CHECKS: dict[str, Callable[[str], bool]] = {
    "date-time": lambda text: bool(_instant(datetime.fromisoformat, text)),
    "time": lambda text: _instant(time.fromisoformat, text) is not None,
    "date": lambda text: bool(date.fromisoformat(text)),
    "duration": lambda text: bool(re.fullmatch(r"P(?!$)(\d+W|(\d+[YMD])*(T(\d+[HMS])+)?)", text)),
    "hostname": lambda text: all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", part) for part in text.split(".")),
    "uri": lambda text: bool(urlsplit(text).scheme),
}


def problem(schema: Schema, text: str) -> str | None:
    """Return why an answer is invalid; None if it is valid."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=checker(schema)).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return None


def check(
    model: localllm.Model, schemas: list[tuple[str, Schema]], temperature: float, seed: int, most: int
) -> Counter[str]:
    """Generate an answer to each schema; print the invalid ones and the counts."""
    sampling = SamplingOptions(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    counts: Counter[str] = Counter()
    requests = (
        model.session.request(
            [{"role": "user", "content": f"Invent a good example of JSON by this schema: {json.dumps(schema)}"}],
            GenerationOptions(most, sampling=sampling, constraint=Constraint.from_schema(schema)),
            key=(kind, schema),
        )
        for kind, schema in schemas
    )
    for finished in model.batch(requests):
        for request in finished:
            (kind, schema), answer = request.key, request.answers[0] if request.answers else None
            counts["tokens"] += len(answer.tokens) if answer else 0
            if request.error or answer is None:
                counts["failed"] += 1
                print(f"{kind}: {request.error}: {json.dumps(schema)}")
            elif answer.finish_reason == "length":
                counts["cut"] += 1
            elif wrong := problem(schema, answer.text):
                counts["invalid"] += 1
                print(f"{kind}: {wrong}: {answer.text!r} by {json.dumps(schema)}")
            else:
                counts["valid"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", "--max-tokens", type=int, default=300)
    asked = parser.parse_args()
    schemas = [schema for _, schema in zip(range(asked.count), Schemas(asked.seed), strict=False)]
    bad = 0
    for path in asked.models:
        with localllm.open(path, cache=False) as model:
            for name, temperature in (("the model's words", 0.8), ("random words", 1000.0)):
                started = perf_counter()
                counts = check(model, schemas, temperature, asked.seed, asked.max_tokens)
                said = ", ".join(f"{counts[what]} {what}" for what in ("valid", "invalid", "failed", "cut", "tokens"))
                print(f"{Path(path).name}, {name}: {said}, {perf_counter() - started:.0f} s", flush=True)
                bad += counts["invalid"] + counts["failed"]
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
