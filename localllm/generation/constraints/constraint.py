"""Constrain an answer to JSON by a schema, a grammar or a regular expression.

Tokens that cannot lead to a match are masked, so a finished answer always matches.

llguidance (https://github.com/guidance-ai/llguidance), a parser in Rust, computes the mask over a vocabulary in about
ten microseconds; it is imported when it is needed. Grammars in GBNF have a matcher of our own (grammar_matcher.py),
because llguidance's lexer always takes the longest match.
"""

import json
import re
import threading
from collections.abc import Container, Hashable, Mapping
from copy import copy
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from localllm.errors import ConstraintError, UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.distinct_items import drop_unique_items, has_unique_items
from localllm.generation.constraints.grammar_matcher import GrammarMatcher
from localllm.generation.constraints.grammar_network import build_network, yield_to_threads
from localllm.generation.constraints.json_matcher import JsonMatcher
from localllm.generation.constraints.json_text import is_type, make_json_schema
from localllm.generation.constraints.schemas import OPTIONS, Schema, make_exact, order_properties
from localllm.generation.constraints.vocabulary import (
    JSON_MARK,
    SpellingVocabulary,
    TokenTrie,
    build_trie,
    convert_vocabulary,
)
from localllm.generation.reasoning import REASONING, Thinking
from localllm.system.processes import register_after_fork

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from localllm.text.tokenizer import Tokenizer

_MAX_ERROR_LENGTH = 300  # characters of an error
GRAMMAR = "grammar"  # kind of a grammar in GBNF, which does not use llguidance
TOOLS = "tools"  # kind of a grammar of tool calls, with token ids of one vocabulary
_CACHED_SCHEMAS = 64  # cached schemas
_MATCHERS = 64  # cached matchers of a tokenizer


@frozen
class Constraint:
    """A validated constraint on answers.

    Attributes:
        kind: "schema", "grammar", "regex" or "tools".  grammar: in GBNF for "grammar", else in llguidance's format.
        is_compact: whether white space in JSON, which the model may write, is removed from the text.
        distinct: the schema as JSON, if it has uniqueItems: repeated items are removed from the text; else "".
    """

    kind: str
    grammar: str
    is_compact: bool = False
    distinct: str = ""

    @property
    def promise(self) -> str:
        """Return what a finished answer has done, for messages: "matched its schema"."""
        promises = {"schema": "matched its schema", "grammar": "matched its grammar"}
        return promises.get(self.kind, "matched its regex")

    def __post_init__(self) -> None:
        """Raise UsageError for a constraint that is invalid, matches nothing or exceeds llguidance's limits."""
        if self.kind == GRAMMAR:
            build_network(self.grammar)
        elif self.kind != TOOLS:
            from llguidance import LLTokenizer

            self.create_matcher(LLTokenizer("byte"))

    def create_matcher(self, vocabulary: "LLTokenizer") -> "LLMatcher":
        """Return llguidance's matcher at the beginning of an answer.

        The first one takes 0.2 s for a vocabulary of 49 thousand tokens, 0.7 s for 128 thousand; later ones take 20 us.
        Raises UsageError for an invalid constraint.
        """
        from llguidance import LLMatcher, LLParserLimits

        grammar = self.grammar.replace(JSON_MARK, f"<[{vocabulary.vocab_size - 1}]>")
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        matcher.compute_bitmask()
        problems = [matcher.get_error()] if matcher.is_error() else []
        if self.kind != TOOLS:  # schemas of tools were checked before
            problems = problems or matcher.get_grammar_warnings()
        if problems:
            raise UsageError(f"the {self.kind} cannot be used: {_shorten_error(problems[0])}")
        return matcher

    @classmethod
    def from_schema(cls, schema: object, whitespace: bool = False, additional_properties: bool = False) -> "Constraint":
        """Return the constraint of a JSON schema: a dict, a string, or a type that pydantic accepts.

        Types are classes, list[int], Literal and the like. whitespace: keep the white space that the model writes;
        otherwise it is removed. additional_properties: allow properties that the schema does not list; objects of
        classes never have them. Raises UsageError for a schema that cannot be used.
        """
        from llguidance import LLMatcher

        options = {"lenient": False, **OPTIONS}
        try:
            prepared = make_exact(_parse_schema(schema), additional_properties and not is_type(schema))
            distinct = json.dumps(prepared) if has_unique_items(prepared) else ""
            prepared = drop_unique_items(prepared)
            grammar = LLMatcher.grammar_from_json_schema(prepared, overrides=options)  # type: ignore[arg-type]
            return cls("schema", grammar, not whitespace, distinct)
        except ValueError as error:
            raise UsageError(f"the schema cannot be used: {_shorten_error(str(error))}") from None
        except RecursionError:
            raise UsageError("the schema cannot be used: it is nested too deeply") from None

    @classmethod
    def from_grammar(cls, text: str) -> "Constraint":
        """Return the constraint of a grammar in GBNF, llama.cpp's notation."""
        return cls(GRAMMAR, text)

    @classmethod
    def from_regex(cls, regex: str) -> "Constraint":
        r"""Return the constraint of a regular expression, in the syntax of Rust's regex crate.

        The whole answer must match it. \d, \w and \s match ASCII only, unless the regex begins with (?u). Raises
        UsageError for an invalid regex.
        """
        from llguidance import LLMatcher

        if not isinstance(regex, str):
            raise UsageError(f"a regular expression must be a string, not {regex!r:.60}")
        return cls("regex", LLMatcher.grammar_from_regex(restrict_to_ascii(regex)))


_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}


def restrict_to_ascii(regex: str) -> str:
    r"""Restrict \d, \w, \s and their complements to ASCII, unless the regex begins with (?u)."""
    if regex.startswith("(?u)"):
        return regex.removeprefix("(?u)")
    depth = 0  # of brackets

    def replaced(match: re.Match[str]) -> str:
        nonlocal depth
        text = match[0]
        depth = max(0, depth + (text == "[") - (text == "]"))
        if text[0] != "\\" or text[1] not in "dwsDWS":
            return text
        inside = _CLASSES[text[1].lower()]
        return f"[^{inside}]" if text[1].isupper() else inside if depth else f"[{inside}]"

    return re.sub(r"\\.|\[|\]", replaced, regex, flags=re.DOTALL)


def make_constraint(
    schema: object = None, grammar: str | None = None, regex: str | None = None, json_whitespace: bool = False,
    additional_properties: bool = False,
) -> Constraint | None:  # fmt: skip
    """Return the constraint of a schema, a grammar or a regex; None if all three are None.

    json_whitespace, additional_properties: see Constraint.from_schema. Raises UsageError for more than one of the
    three, or an invalid one.
    """
    by_kind = {"schema": schema, "grammar": grammar, "regex": regex}
    names = [name for name, value in by_kind.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} cannot be combined: give only one of them")
    if schema is not None:
        return Constraint.from_schema(schema, json_whitespace, additional_properties)
    if grammar is not None:
        return Constraint.from_grammar(grammar)
    return None if regex is None else Constraint.from_regex(regex)


@lru_cache(maxsize=_CACHED_SCHEMAS)
def _make_byte_matcher(grammar: str) -> "LLMatcher":
    """Return a matcher at the beginning of a text, whose tokens are single bytes."""
    from llguidance import LLMatcher, LLTokenizer

    return LLMatcher(LLTokenizer("byte"), grammar, log_level=0)


def matches_schema(text: str, schema: Schema) -> bool:
    """Return whether a string is JSON that matches a schema, with properties in any order.

    schema: with llguidance's options.
    """
    from llguidance import LLMatcher

    try:
        data = json.dumps(order_properties(json.loads(text), schema, schema), ensure_ascii=False).encode()
        data = data.replace(b"\x7f", b"\\u007f")  # which llguidance expects
    except (ValueError, RecursionError):
        return False
    matcher = _make_byte_matcher(LLMatcher.grammar_from_json_schema(dict(schema))).deep_copy()
    return matcher.try_consume_tokens([*data]) == len(data) and matcher.is_accepting()


def require_usable(schema: Schema) -> None:
    """Raise UsageError for a schema that llguidance does not accept.

    schema: with llguidance's options.
    """
    from llguidance import LLMatcher

    try:
        matcher = _make_byte_matcher(LLMatcher.grammar_from_json_schema(dict(schema))).deep_copy()
    except ValueError as error:
        raise UsageError(f"the schema cannot be used: {_shorten_error(str(error))}") from None
    if matcher.is_error():
        raise UsageError(f"the schema cannot be used: {_shorten_error(matcher.get_error())}")


def _parse_schema(schema: object) -> dict[str, object]:
    """Return a schema as a dict. Raises UsageError for a value that is not a JSON schema."""
    if is_type(schema):
        schema = make_json_schema(schema)
    if isinstance(schema, str | bytes):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise UsageError(f"the schema is not valid JSON: {error}") from None
    if schema is True:
        return {}
    if schema is False:
        raise UsageError("the schema cannot be used: false allows no value")
    if not isinstance(schema, Mapping):
        raise UsageError(f"a JSON schema must be an object, not {str(schema)[:80]!r}")
    return dict(schema)


def _shorten_error(message: str) -> str:
    """Return an error message of llguidance, shortened to one line."""
    message = re.split(r"\n *\d+ \| ", re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message))[0]
    if message.startswith("NoExtension"):
        return "it matches no text"
    if outside := re.match(r"Resource '([^']*)'", message):
        name = outside[1][:_MAX_ERROR_LENGTH]
        return f"{name} is another document, which cannot be looked at: put what it says into the schema"
    if number := re.match(r"Value is not JSON serializable: (-?\d+)", message):
        return f"{number[1][:40]} is beyond 64 bits"
    if message.startswith("oneOf constraints"):
        return "oneOf is supported for schemas that obviously exclude each other only"
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", message):
        return f"{keys[1]} {'are' if ', ' in keys[1] else 'is'} not supported"
    if "regex parse error" in message or "invalid regex" in message:
        message = re.split(r"\n +1 \|", message)[0]
        if "error: " in message:
            message = "the regular expression is invalid: " + message.rpartition("error: ")[2]
    return " ".join(message.split())[:_MAX_ERROR_LENGTH]


class Matcher:
    """Matches an answer with a constraint, token by token, and computes masks of the next token."""

    def __init__(self, matcher: "LLMatcher | GrammarMatcher | JsonMatcher", vocab: int, tokenizer: "Tokenizer"):
        """Start at the beginning of an answer.

        vocab: size of the vocabulary, with padding.
        """
        self._matcher, self._vocab, self._tokenizer = matcher, vocab, tokenizer
        self._unfinished: np.ndarray | None = None
        self._raise_error()

    def copy(self) -> "Matcher":
        """Return an independent copy."""
        twin = copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def compute_allowed_mask(self) -> np.ndarray:
        """Compute the mask of the next token, bool [vocab], which includes end tokens if the answer may end.

        Raises ConstraintError if llguidance's limits are exceeded.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._raise_error()
        return np.unpackbits(mask, count=self._vocab, bitorder="little").view(bool)

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)
        self._raise_error()

    def accept_text(self, text: str) -> bool:
        """Advance by a string if it is allowed; return whether it is."""
        tokens = self._tokenizer.encode_inside(text)
        return self._matcher.try_consume_tokens(tokens) == len(tokens)

    def names_any_token(self, tokens: Container[int]) -> bool:
        """Return whether the grammar names any of these tokens by text or id."""
        return isinstance(self._matcher, GrammarMatcher) and self._matcher.names_any_token(tokens)

    def compute_unfinished_mask(self, thinking: Thinking) -> np.ndarray:
        """Compute the mask of the tokens within reasoning, bool [vocab]: all except end tokens.

        If the mark that ends reasoning is not a single token, tokens that contain its end and more text are excluded.
        """
        if self._unfinished is None:
            self._unfinished = np.arange(self._vocab) < self._tokenizer.vocab_size
            self._unfinished[list(self._tokenizer.end_ids)] = False
            mark = thinking.format.get_end_mark(REASONING)[-1:] if thinking.format and not thinking.starts else ""
            for token, piece in enumerate(self._tokenizer.pieces if mark else ()):
                if mark in piece and self._tokenizer.decode([token]).partition(mark)[2].strip():
                    self._unfinished[token] = False
        return self._unfinished

    @property
    def is_complete(self) -> bool:
        """Return whether the answer must end now."""
        return self._matcher.is_stopped()

    def get_expected_tokens(self) -> list[int]:
        """Return the usual tokens of the forced text, as a draft; other tokens may write the same text."""
        if isinstance(self._matcher, GrammarMatcher):
            forced, is_last = self._matcher.find_forced()
            tokens = self._tokenizer.encode_inside(forced.decode(errors="ignore")) if forced else []
            return tokens if is_last else tokens[:-1]  # later text may change the last token
        return [*takewhile(lambda token: token < self._vocab, self._matcher.compute_ff_tokens())]

    def _raise_error(self) -> None:
        """Raise ConstraintError if the matcher cannot continue."""
        if self._matcher.is_error():
            raise ConstraintError(
                f"the answer cannot be constrained any further: {_shorten_error(self._matcher.get_error())}"
            )


_WHOLE = ""  # the vocabulary without slices


class MatcherCache:
    """The converted vocabularies and the matchers of one tokenizer.

    It has no reference to the tokenizer, so that the tokenizer can be freed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.vocabularies: dict[str, SpellingVocabulary] = {}
        self.beginnings: dict[Hashable, LLMatcher | GrammarMatcher | JsonMatcher] = {}
        self.trie: TokenTrie | None = None
        self.gates: dict[Hashable, threading.Lock] = {}  # of constraints that are being compiled

    def get_lock(self, constraint: Hashable) -> threading.Lock:
        """Return the lock that a thread holds while it compiles a constraint, for which others wait."""
        with self.lock:
            return self.gates.setdefault(constraint, threading.Lock())

    def get_vocabulary(self, kind: str, tokenizer: "Tokenizer", size: int) -> SpellingVocabulary:
        """Return the vocabulary for a kind of constraint, converted when it is first needed.

        size: number of tokens with padding.
        """
        with self.lock:
            if kind not in self.vocabularies:
                whole = self.vocabularies.get(_WHOLE) or convert_vocabulary(tokenizer, size)
                self.vocabularies |= {_WHOLE: whole, kind: whole.with_slices(is_json=kind == "schema")}
            return self.vocabularies[kind]

    def get_trie(self, tokenizer: "Tokenizer", size: int) -> TokenTrie:
        """Return the trie of the vocabulary, built when it is first needed."""
        with self.lock:
            self.trie = self.trie or build_trie(tokenizer, size)
            return self.trie

    def keep(self, constraint: Hashable, beginning: "LLMatcher | GrammarMatcher | JsonMatcher") -> None:
        """Cache the matcher at the beginning of an answer; drop the oldest if the cache is full."""
        with self.lock:
            if len(self.beginnings) >= _MATCHERS:
                del self.beginnings[next(iter(self.beginnings))]
            self.beginnings[constraint] = beginning
            self.gates.pop(constraint, None)


_CACHES: "WeakKeyDictionary[Tokenizer, MatcherCache]" = WeakKeyDictionary()
_LOCK = threading.Lock()


def _reset_after_fork() -> None:
    """Replace the locks and the data that they protect in a forked process.

    The threads that may hold the locks do not exist there.
    """
    global _LOCK, _CACHES
    _LOCK, _CACHES = threading.Lock(), WeakKeyDictionary()


register_after_fork(_reset_after_fork)


def get_matcher(constraint: Constraint, tokenizer: "Tokenizer", vocab: int) -> Matcher:
    """Return a matcher at the beginning of an answer; cached, see Constraint.create_matcher for times.

    vocab: the model's vocabulary size, which may be larger than the tokenizer's. Raises UsageError for a vocabulary
    without an end token.
    """
    if not tokenizer.end_ids:
        raise UsageError("the model's vocabulary has no token that ends an answer, which a constraint needs")
    with _LOCK:
        cache = _CACHES.setdefault(tokenizer, MatcherCache())
    size = max(vocab, tokenizer.vocab_size)
    beginning = cache.beginnings.get(constraint)
    if beginning is None:
        with cache.get_lock(constraint):
            if (beginning := cache.beginnings.get(constraint)) is None:
                with yield_to_threads():
                    beginning = _make_matcher(cache, constraint, tokenizer, size)
                cache.keep(constraint, beginning)
    return Matcher(beginning.deep_copy(), size, tokenizer)


def _make_matcher(
    cache: MatcherCache, constraint: Constraint, tokenizer: "Tokenizer", size: int
) -> "LLMatcher | GrammarMatcher | JsonMatcher":
    """Return a new matcher at the beginning of an answer. Raises UsageError for an invalid constraint."""
    if constraint.kind == GRAMMAR:
        return GrammarMatcher(constraint.grammar, tokenizer, cache.get_trie(tokenizer, size))
    vocabulary = cache.get_vocabulary(constraint.kind, tokenizer, size)
    beginning = constraint.create_matcher(vocabulary.tokens)
    return beginning if constraint.kind == "regex" else JsonMatcher(beginning, vocabulary, constraint.kind == "schema")
