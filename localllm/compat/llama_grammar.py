"""llama-cpp-python's LlamaGrammar: a constraint on answers, from GBNF or a JSON schema."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Self

from localllm.errors import UsageError
from localllm.generation.constraints.constraint import constraint_of


class LlamaGrammar:
    """A checked constraint on answers. Make it with from_string, from_file or from_json_schema.

    Attributes:
        grammar: in GBNF, or None.  schema: the JSON schema, or None.
    """

    def __init__(self, grammar: str | None = None, schema: object = None) -> None:
        """Check one of the two, grammar (GBNF) or schema. Raises UsageError if it cannot be used."""
        constraint_of(schema, grammar)
        self.grammar, self.schema = grammar, schema

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:
        """Make a constraint from a grammar in GBNF. Raises UsageError."""
        return cls(grammar=grammar)

    @classmethod
    def from_file(cls, file: str | PathLike[str], verbose: bool = True) -> Self:
        """Make a constraint from a file in GBNF. Raises UsageError."""
        try:
            return cls.from_string(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"grammar: cannot read {file}: {error}") from None

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, object], verbose: bool = True) -> Self:
        """Make a constraint from a JSON schema. Raises UsageError."""
        try:
            schema = json.loads(json_schema) if isinstance(json_schema, str) else dict(json_schema)
        except ValueError as error:
            raise UsageError(f"json_schema is not JSON: {error}") from None
        return cls(schema=schema)
