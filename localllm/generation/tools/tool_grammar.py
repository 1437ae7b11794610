"""Build the grammar of tool calls, and find the special tokens that their parser needs.

An answer is not constrained until a call begins. After the format's trigger, every token must follow a grammar: the
name of a tool and arguments that match its schema; subschemas that cannot be enforced are loosened. So a call cannot be
malformed, only cut off.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.distinct_items import DistinctItems, drop_unique_items, has_unique_items
from localllm.generation.constraints.schemas import OPTIONS, Schema, close_objects, make_exact, rewrite_schema
from localllm.generation.constraints.vocabulary import JSON_MARK
from localllm.generation.reasoning import ESCAPE
from localllm.generation.tools.json_tool_calls import JsonToolCallParser
from localllm.generation.tools.tool_call_format import (
    HARMONY,
    ID,
    ParameterForm,
    ParameterMarks,
    ToolCallFormat,
    make_additional_form,
    make_parameter_form,
)
from localllm.generation.tools.tool_call_parser import ToolCallParser

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Matcher
    from localllm.text.tokenizer import Tokenizer


MAX_FREE_PARAMETERS = 6  # maximum of parameters in any order, each once: every subset of them needs a rule
FREE_NAME = "[A-Za-z0-9_.-]{1,64}"


class ParameterGrammar:
    """The grammar rules of one tool's arguments: each parameter at most once, in any order, and all required ones.

    With more than MAX_FREE_PARAMETERS parameters, optional ones may be repeated (the parser takes the first value);
    more than that many required ones must be in the schema's order.
    """

    def __init__(self, rule: str, schema: Schema, marks: ParameterMarks, tokenizer: "Tokenizer",
                 literal: Callable[[str], str]):  # fmt: skip
        """Prepare the rules.

        rule: prefix of the names of all rules. literal: converts a string to terms of a rule.
        """
        self._rule, self._schema, self._marks, self._tokenizer, self._literal = rule, schema, marks, tokenizer, literal
        self._keys = [*(schema.get("properties") or {})]
        self._required = {key for key in schema.get("required") or () if key in self._keys}
        self._others = make_additional_form(schema)
        numbers = range(len(self._keys))
        by_need = sorted(numbers, key=lambda number: self._keys[number] not in self._required)
        self._is_ordered = len(self._required) > MAX_FREE_PARAMETERS
        self._once = frozenset(numbers if self._is_ordered else by_need[:MAX_FREE_PARAMETERS])

    def build_rules(self) -> list[str]:
        """Return the rules; the name of the start rule ends in _args."""
        rules = list[str]()
        for number, key in enumerate(self._keys):
            form = make_parameter_form(self._schema["properties"][key], self._schema)
            rules += self._build_parameter(f"{self._rule}_{number}", json.dumps(key), form)
        if self._others:
            key_patterns = "|".join(re.escape(key) for key in self._keys)
            but = f" & ~/{key_patterns}/" if key_patterns else ""
            rules.append(f"{self._rule.upper()}_NAME: /{FREE_NAME}/{but}")
            rules += self._build_parameter(f"{self._rule}_other", f"{self._rule.upper()}_NAME", self._others)
        begin = (frozenset[int](), False)
        waiting, finished = [begin], {begin}
        while waiting:
            state = waiting.pop()
            text, following = self._get_rule(*state)
            rules.append(text)
            waiting += following - finished
            finished |= following
        return [f"{self._rule}_args: {self._name_state(*begin)}", *rules]

    def _name_state(self, used: frozenset[int], has_begun: bool) -> str:
        """Return the name of the rule after these parameters."""
        return f"{self._rule}_{'b' if has_begun else 'a'}{sum(1 << number for number in used)}"

    def _get_rule(self, used: frozenset[int], has_begun: bool) -> tuple[str, set[tuple[frozenset[int], bool]]]:
        """Return the rule for the text after these parameters, and the states that it leads to."""
        mark, alternatives, following = self._literal(self._marks.next if has_begun else self._marks.first), [], set()
        for number in self._list_candidates(used):
            # In the schema's order, parameters before this one are no longer allowed.
            used_after = frozenset(range(number + 1)) if self._is_ordered else used | ({number} & self._once)
            following.add((used_after, True))
            alternatives.append(f"{mark} {self._rule}_{number} {self._name_state(used_after, True)}")
        if self._others:
            following.add((used, True))
            alternatives.append(f"{mark} {self._rule}_other {self._name_state(used, True)}")
        if all(number in used for number, key in enumerate(self._keys) if key in self._required):
            alternatives.append('""')
        return f"{self._name_state(used, has_begun)}: {' | '.join(alternatives)}", following

    def _list_candidates(self, used: frozenset[int]) -> list[int]:
        """Return the parameters that may come next."""
        unused = [number for number in range(len(self._keys)) if number not in used]
        if not self._is_ordered:
            return unused
        required_at = next(
            (place for place, number in enumerate(unused) if self._keys[number] in self._required), len(unused)
        )
        return unused[: required_at + 1]

    def _build_parameter(self, rule: str, name: str, form: ParameterForm) -> list[str]:
        """Return the rules of one parameter: its name, value and marks."""
        marks, rules, values = self._marks, list[str](), list[str]()
        is_same = marks.text == marks.json
        if form.texts:
            text, further = self._build_text(rule, form)
            values.append(text)
            rules += further
        if form.other is not None and not (is_same and form.texts and form.choices is None):
            mid, close = marks.json
            values.append(f"{self._literal(mid)} {rule}_o {self._literal(close)}")
            words = "".join(f" | {json.dumps(word)}" for word in form.python_words)
            rules.append(f"{rule}_o: {JSON_MARK}? %json {json.dumps(form.other)}{words}")
        return [f"{rule}: {name} ({' | '.join(values)})", *rules]

    def _build_text(self, rule: str, form: ParameterForm) -> tuple[str, list[str]]:
        """Return the terms for a string with the marks around it, and the rules that these need."""
        mid, close = self._marks.text
        head = f"{self._literal(mid)} {rule}_v"
        if choices := form.choices:
            return f"{head} {self._literal(close)}", [f"{rule}_v: {' | '.join(map(json.dumps, choices))}"]
        first, *rest_fragments = self._tokenizer.split_special(close)
        if isinstance(first, int) and first in self._tokenizer.control_ids:
            return f"{head} {self._literal(close)}", [f"{rule}_v: /{form.pattern}/"]
        text = self._tokenizer.pieces[first] if isinstance(first, int) else first
        after = "".join(
            self._tokenizer.pieces[fragment] if isinstance(fragment, int) else fragment for fragment in rest_fragments
        )
        return f"{head} {self._literal(after)}", [f"{rule}_v[lazy]: /{form.pattern}{escape_regex(text)}/"]


def escape_regex(text: str) -> str:
    """Return a regular expression for a string, in the notation of the grammar."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace("\\ ", " ")


@lru_cache(maxsize=512)  # an agent sends its 10 to 60 tools with each request: 3 ms for each
def prepare_schema(parameters: str, strict: bool, is_open: bool) -> tuple[dict[str, object], dict[str, object] | None]:
    """Return a schema, from its JSON, with llguidance's options: exact if possible, else loosened.

    Also returns the schema for DistinctItems; None if no items have to differ. The results must not be changed.

    is_open: whether objects may have properties that the schema does not list. Raises UsageError for a strict tool
    whose schema cannot be exact.
    """
    from localllm.generation.constraints.constraint import Constraint, require_usable

    schema = json.loads(parameters)
    if is_open:
        schema.setdefault("additionalProperties", True)
    try:
        Constraint.from_schema(schema, additional_properties=is_open)
        schema = make_exact(schema, is_open)
        distinct = schema if has_unique_items(schema) else None
        return {**drop_unique_items(schema), "x-guidance": {**OPTIONS, "lenient": False}}, distinct
    except UsageError:
        if strict:
            raise

    def prepare(schema_given: Mapping[str, object]) -> dict[str, object]:
        plain = rewrite_schema(schema_given)
        ready = {**(plain if is_open else close_objects(plain)), "x-guidance": {**OPTIONS, "lenient": True}}
        require_usable(ready)
        return ready

    return loosen_schema(schema, prepare), None


SHARED = ("$defs", "definitions")
PLAIN = ("type", "properties", "required", "additionalProperties", "description", *SHARED)


def loosen_schema(schema: Schema, prepare: Callable[[Schema], dict[str, object]]) -> dict[str, object]:
    """Prepare the schema of an object; loosen_schema the subschemas that cannot be prepared.

    prepare: converts a schema for the grammar; raises UsageError for a schema that cannot be used.
    """
    shared = {word: schema[word] for word in SHARED if word in schema}
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {}

    def is_usable(name: str) -> bool:
        try:
            prepare({**shared, "type": "object", "properties": {name: named[name]}})
        except UsageError:
            return False
        return True

    changed = {**schema, "properties": {name: part if is_usable(name) else {} for name, part in named.items()}}
    free = {"type": "object", "additionalProperties": True}
    for attempt in (changed, {word: value for word, value in changed.items() if word in PLAIN}):
        try:
            return prepare(attempt)
        except UsageError:
            continue
    return prepare(free)


NOTHING: Schema = {"type": "object", "properties": {}}
CHOICES = ("auto", "required", "none")
_NAME = re.compile(r"[\w./:@+~#$-]{1,128}")
MAX_TOOLS = 256  # maximum number of tools


@frozen
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of an object.
        strict: whether a schema that a grammar cannot enforce exactly raises UsageError.
    """

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=lambda: NOTHING)
    strict: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid tool."""
        if not _NAME.fullmatch(self.name):
            raise UsageError(f"tools: {self.name[:60]!r} is not a valid name; use letters, digits and _-.:/@+~#$")
        object.__setattr__(self, "parameters", _normalize_parameters(self.parameters, self.name))

    def to_json_schema(self) -> dict[str, object]:
        """Return the tool in OpenAI's format."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@frozen
class ToolUse:
    """The tools that an answer may call.

    Attributes:
        choice: "auto", "required" (at least one call), "none", or the name of the tool to call once.
        parallel: whether several calls are allowed.
        json_calls: whether {"name": ..., "arguments": ...} in plain text counts as a call.
        json_whitespace: whether white space in arguments is kept.
        additional_properties: whether properties that a schema does not list are allowed, unless it forbids them.
        allowed: names of the tools that may be called; None: all.
    """

    tools: Sequence[Tool]
    choice: str = "auto"
    parallel: bool = True
    json_calls: bool = True
    json_whitespace: bool = False
    additional_properties: bool = False
    allowed: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for invalid tools or an invalid tool_choice."""
        names = [tool.name for tool in self.tools]
        if len(names) > MAX_TOOLS or len(set(names)) < len(names):
            raise UsageError(f"tools must be at most {MAX_TOOLS}, each with a different name")
        required = [] if self.choice in CHOICES else [self.choice]
        if unknown := next((name for name in (*required, *(self.allowed or ())) if name not in names), None):
            raise UsageError(f"tool_choice names {unknown[:60]!r}, which is not one of the tools")
        if self.choice == "required" and not self.callable:
            raise UsageError("tool_choice requires a call, but allows no tool")

    @property
    def callable(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.choice in CHOICES:
            return [] if self.choice == "none" else [tool for tool in self.tools if self.allows(tool.name)]
        return [tool for tool in self.tools if tool.name == self.choice]

    def allows(self, name: str) -> bool:
        """Return whether a tool may be called."""
        return self.allowed is None or name in self.allowed

    @property
    def requires_call(self) -> bool:
        """Return whether the answer must be a call."""
        return self.choice not in ("auto", "none")

    @property
    def is_single(self) -> bool:
        """Return whether at most one call is allowed."""
        return not self.parallel or self.choice not in CHOICES


class ToolGrammar:
    """The grammar and the parsers of the tool calls of an answer.

    Attributes:
        use: the tools.  format: format of calls.
        shown: text of each special token of the format, by token id, with ESCAPE.
        plain: text of each such token outside of calls, by the text in `shown`.
    """

    def __init__(self, use: ToolUse, format: ToolCallFormat, tokenizer: "Tokenizer"):
        """Prepare the schemas. Raises UsageError for a schema that cannot be used."""
        self.use, self.format, self._tokenizer = use, format, tokenizer
        self._distinct = dict[str, dict[str, object]]()  # schemas with uniqueItems, by tool
        self._schemas = {tool.name: self._prepare_schema(tool) for tool in use.callable}
        marks = {
            *self._find_tokens(format.opening),
            *self._find_tokens(format.between),
            *self._find_tokens(format.closing),
        }
        marks |= self._find_tokens(format.separator or "")
        for first, second in (format.marks.text, format.marks.json) if format.marks else ():
            marks |= self._find_tokens(first) | self._find_tokens(second)
        if format.opening == HARMONY.opening:
            marks |= self._find_tokens("<|channel|><|constrain|><|message|>")
        self._marks = frozenset(marks)
        ids = {token: mark for mark in marks if (token := tokenizer.get_special_id(mark)) is not None}
        self.shown = {token: ESCAPE + mark for token, mark in ids.items()}
        self.plain = {ESCAPE + mark: "" if token in tokenizer.control_ids else mark for token, mark in ids.items()}

    @property
    def requires_call(self) -> bool:
        """Return whether the answer must be a call."""
        return self.use.requires_call

    @property
    def wraps_whole_message(self) -> bool:
        """Return whether a call is a whole message after the reasoning, as in gpt-oss's harmony format."""
        return self.format.opening == HARMONY.opening

    def create_parser(self) -> ToolCallParser:
        """Return a parser at the beginning of an answer."""
        reader = ToolCallParser(self.format, self._schemas, self._marks)
        if self.requires_call and not self.wraps_whole_message:
            reader.begin()
        return reader

    def make_json_parser(self) -> JsonToolCallParser | None:
        """Return a parser of calls written as plain JSON; None if these do not count."""
        if self.requires_call or not self.use.json_calls:
            return None
        return JsonToolCallParser([*self._schemas], self._accepts, self.use.is_single)

    def make_distinct_items(self, name: str) -> DistinctItems | None:
        """Return a filter that enforces uniqueItems in the arguments of a tool; None if its schema has none."""
        return DistinctItems(self._distinct[name]) if name in self._distinct else None

    def _accepts(self, name: str, arguments: str) -> bool:
        """Return whether the schema of a tool accepts arguments (JSON)."""
        from localllm.generation.constraints.constraint import matches_schema

        return matches_schema(arguments, self._schemas[name])

    def make_matcher(self, vocab: int, whole: bool = False) -> "Matcher":
        """Return a matcher of the text after the trigger of a call.

        It includes the trigger if a call is required, or if `whole` is true. Raises UsageError for a grammar that
        cannot be used.
        """
        from localllm.generation.constraints.constraint import TOOLS, Constraint, get_matcher

        return get_matcher(Constraint(TOOLS, self.build_grammar(whole)), self._tokenizer, vocab)

    def _find_tokens(self, piece: str) -> set[str]:
        """Return the special tokens in a piece of the format."""
        return {
            self._tokenizer.pieces[token] for token in self._tokenizer.split_special(piece) if isinstance(token, int)
        }

    def _prepare_schema(self, tool: Tool) -> dict[str, object]:
        """Return the schema of a tool, prepared for the grammar. Raises UsageError if it cannot be used."""
        try:
            schema, distinct = prepare_schema(json.dumps(tool.parameters), tool.strict, self.use.additional_properties)
        except UsageError as error:
            raise UsageError(f"tools: {tool.name}: {error}") from None
        if distinct is not None:
            self._distinct[tool.name] = distinct
        return schema

    # ---- the grammar, in llguidance's dialect of Lark

    def build_grammar(self, whole: bool = False) -> str:
        """Return the grammar of the text after the trigger of a call.

        It includes the trigger if a call is required, or if `whole` is true.
        """
        opening = self.format.opening.lstrip()
        head = self._build_literal(opening if self.requires_call or whole else opening[len(self.format.trigger) :])
        heads = list[str]()
        if self.requires_call and self.wraps_whole_message:
            channel, message, end, start = map(
                self._build_literal, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
            )
            heads = [f'thought: {channel} "analysis" {message} said {end} {start} "assistant"', "said: /(?s:.*)/"]
            head = f'thought* ({channel} "commentary")? {self._build_literal(self.format.opening)}'
        several = self.format.separator is not None and not self.use.is_single
        further_calls = f"({' '.join(self._split_literals(self.format.separator or ''))} call)*" if several else ""
        rules = [f"start: {head} call {further_calls} {self._build_closing(several)}"]
        names = [f"tool_{number}" for number in range(len(self._schemas))]
        rules += [*heads, f"call: {' | '.join(names)}", "id: /[A-Za-z0-9_-]{1,40}/"]
        between = (
            self._build_harmony()
            if self.format.opening == HARMONY.opening
            else self._build_literal(self.format.between)
        )
        for rule, (name, schema) in zip(names, self._schemas.items(), strict=True):
            rules.append(f"{rule}: {json.dumps(name)} {between} {rule}_args")
            if marks := self.format.marks:
                rules += ParameterGrammar(rule, schema, marks, self._tokenizer, self._build_literal).build_rules()
            else:
                rules.append(f"{rule}_args: {JSON_MARK}? %json {json.dumps(schema)}")
        return "\n".join(rules) + "\n"

    def _build_closing(self, several: bool) -> str:
        """Return the grammar rule of the text after calls.

        All of it is optional, since models often stop early. several: whether another call may follow; white space
        before that may also end the answer.
        """
        rest = (self.format.separator or "").removeprefix(self.format.closing) if several else ""
        units = self._split_literals(self.format.closing + rest[: len(rest) - len(rest.lstrip())])
        return " ".join(f"({unit}" for unit in units) + ")?" * len(units)

    def _split_literals(self, piece: str) -> list[str]:
        """Split a string into literals at brackets, white space and tags, where different tokenizations agree."""
        return [self._build_literal(part) for part in re.split(r"([}\])]|\s+|<[^<>]*>)", piece) if part]

    def _build_harmony(self) -> str:
        """Return the grammar terms of gpt-oss's header after the name of a tool."""
        channel, constrain, message = map(self._build_literal, ("<|channel|>", "<|constrain|>", "<|message|>"))
        return f'({channel} "commentary")? (" "? {constrain} "json" | " json")? {message}'

    def _build_literal(self, piece: str) -> str:
        """Return the grammar terms of a string: quoted literals, special tokens by id, and rule `id` for ID."""
        terms = []
        for fragment in self._tokenizer.split_special(piece):
            if isinstance(fragment, int):
                terms.append(f"<[{fragment}]>")
                continue
            for number, part in enumerate(fragment.split(ID)):
                terms += ["id"] * (number > 0) + [json.dumps(part)] * bool(part)
        return " ".join(terms)


_SPEAK = ("properties", "patternProperties", "additionalProperties", "$ref", "anyOf", "oneOf", "allOf")


def _normalize_parameters(parameters: Schema | None, name: str) -> Schema:
    """Return the schema of parameters as that of an object; None and an empty schema get no properties.

    Raises UsageError for a schema of another type.
    """
    if parameters is not None and not isinstance(parameters, Mapping):
        raise UsageError(f"tools: the parameters of {name} must be a schema of an object")
    schema = {word: value for word, value in (parameters or {}).items() if value is not None}
    kind = schema.get("type", "object")
    kinds = [str(each).lower() for each in (kind if isinstance(kind, list) else [kind])]
    if "object" not in kinds:
        raise UsageError(f"tools: the parameters of {name} must be a schema of an object")
    if not any(schema.get(word) for word in _SPEAK):
        schema = {"properties": {}}
    return {**schema, "type": "object"}


def build_tool_prompt(use: ToolUse) -> str:
    """Return a system message that describes the tools, for templates that do not."""
    tools = "\n".join(json.dumps(tool.to_json_schema()["function"], ensure_ascii=False) for tool in use.callable)
    return (
        f"You can call these functions:\n{tools}\n"
        'To call one, answer with nothing but JSON: {"name": its name, "arguments": its arguments}.'
    )
