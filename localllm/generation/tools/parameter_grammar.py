"""The grammar of arguments whose parameters have marks of their own, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from localllm.generation.constraints.json_pointers import Schema
from localllm.generation.constraints.spelling_vocabulary import JSON_MARK
from localllm.generation.tools.parameter_forms import ParameterForm, form_of, form_of_others
from localllm.generation.tools.tool_call_format import ParameterMarks

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer

MOST_FREE = 6  # parameters that may come in any order, each once: there is a rule for each subset of them
FREE_NAME = "[A-Za-z0-9_.-]{1,64}"


class ParameterGrammar:
    """The rules of one tool's arguments: each parameter at most once, in any order, and all required ones.

    With more than MOST_FREE parameters, optional ones may be repeated (the parser takes the first value); more than
    MOST_FREE required ones must come in the schema's order.
    """

    def __init__(self, rule: str, schema: Schema, marks: ParameterMarks, tokenizer: "Tokenizer",
                 literal: Callable[[str], str]):  # fmt: skip
        """Build the rules; rule: the prefix of all rules' names.  literal: makes a rule from a text."""
        self._rule, self._schema, self._marks, self._tokenizer, self._literal = rule, schema, marks, tokenizer, literal
        self._keys = [*(schema.get("properties") or {})]
        self._required = {key for key in schema.get("required") or () if key in self._keys}
        self._others = form_of_others(schema)
        numbers = range(len(self._keys))
        by_need = sorted(numbers, key=lambda number: self._keys[number] not in self._required)
        self._is_ordered = len(self._required) > MOST_FREE
        self._once = frozenset(numbers if self._is_ordered else by_need[:MOST_FREE])

    def rules(self) -> list[str]:
        """Return the grammar's rules; the arguments are the rule with the suffix _args."""
        rules = list[str]()
        for number, key in enumerate(self._keys):
            form = form_of(self._schema["properties"][key], self._schema)
            rules += self._parameter(f"{self._rule}_{number}", json.dumps(key), form)
        if self._others:
            key_patterns = "|".join(re.escape(key) for key in self._keys)
            but = f" & ~/{key_patterns}/" if key_patterns else ""
            rules.append(f"{self._rule.upper()}_NAME: /{FREE_NAME}/{but}")
            rules += self._parameter(f"{self._rule}_other", f"{self._rule.upper()}_NAME", self._others)
        begin = (frozenset[int](), False)
        waiting, finished = [begin], {begin}
        while waiting:
            state = waiting.pop()
            text, following = self._state(*state)
            rules.append(text)
            waiting += following - finished
            finished |= following
        return [f"{self._rule}_args: {self._name(*begin)}", *rules]

    def _name(self, used: frozenset[int], has_begun: bool) -> str:
        return f"{self._rule}_{'b' if has_begun else 'a'}{sum(1 << number for number in used)}"

    def _state(self, used: frozenset[int], has_begun: bool) -> tuple[str, set[tuple[frozenset[int], bool]]]:
        """Return the rule for the text after these parameters."""
        mark, alternatives, following = self._literal(self._marks.next if has_begun else self._marks.first), [], set()
        for number in self._candidates(used):
            # In the schema's order, parameters before this one cannot come any more.
            used_after = frozenset(range(number + 1)) if self._is_ordered else used | ({number} & self._once)
            following.add((used_after, True))
            alternatives.append(f"{mark} {self._rule}_{number} {self._name(used_after, True)}")
        if self._others:
            following.add((used, True))
            alternatives.append(f"{mark} {self._rule}_other {self._name(used, True)}")
        if all(number in used for number, key in enumerate(self._keys) if key in self._required):
            alternatives.append('""')
        return f"{self._name(used, has_begun)}: {' | '.join(alternatives)}", following

    def _candidates(self, used: frozenset[int]) -> list[int]:
        unused = [number for number in range(len(self._keys)) if number not in used]
        if not self._is_ordered:
            return unused
        required_at = next(
            (place for place, number in enumerate(unused) if self._keys[number] in self._required), len(unused)
        )
        return unused[: required_at + 1]

    def _parameter(self, rule: str, name: str, form: ParameterForm) -> list[str]:
        """Return the rules of one parameter: its name, value and marks."""
        marks, rules, values = self._marks, list[str](), list[str]()
        is_same = marks.text == marks.json
        if form.texts:
            text, further = self._text(rule, form)
            values.append(text)
            rules += further
        if form.other is not None and not (is_same and form.texts and form.choices is None):
            mid, close = marks.json
            values.append(f"{self._literal(mid)} {rule}_o {self._literal(close)}")
            words = "".join(f" | {json.dumps(word)}" for word in form.python_words)
            rules.append(f"{rule}_o: {JSON_MARK}? %json {json.dumps(form.other)}{words}")
        return [f"{rule}: {name} ({' | '.join(values)})", *rules]

    def _text(self, rule: str, form: ParameterForm) -> tuple[str, list[str]]:
        """Return the terms, and further rules, for a string with the marks around it."""
        mid, close = self._marks.text
        head = f"{self._literal(mid)} {rule}_v"
        if choices := form.choices:
            return f"{head} {self._literal(close)}", [f"{rule}_v: {' | '.join(map(json.dumps, choices))}"]
        first, *rest_fragments = self._tokenizer.fragments(close)
        if isinstance(first, int) and first in self._tokenizer.control_ids:
            return f"{head} {self._literal(close)}", [f"{rule}_v: /{form.pattern}/"]
        text = self._tokenizer.pieces[first] if isinstance(first, int) else first
        after = "".join(
            self._tokenizer.pieces[fragment] if isinstance(fragment, int) else fragment for fragment in rest_fragments
        )
        return f"{head} {self._literal(after)}", [f"{rule}_v[lazy]: /{form.pattern}{regex(text)}/"]


def regex(text: str) -> str:
    """Quote a text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n").replace("\\ ", " ")
