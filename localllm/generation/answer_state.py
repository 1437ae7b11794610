"""Track the text of an answer in progress, and compute masks of its next token.

The masks combine the constraint and the reasoning budget. Reasoning is unconstrained; the answer after it must match.
End tokens are masked until the answer is complete.
"""

from collections.abc import Sequence
from copy import copy, deepcopy
from json import loads
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from localllm.generation.constraints.json_text import JsonCompactor
from localllm.generation.reasoning import (
    ANSWER,
    ARGUMENTS,
    CALL,
    ESCAPE,
    REASONING,
    ReasoningParser,
    TextPart,
    Thinking,
    count_overlap,
)
from localllm.text.tokenizer import StreamDecoder

if TYPE_CHECKING:
    from localllm.generation.constraints.constraint import Constraint, Matcher
    from localllm.generation.constraints.distinct_items import DistinctItems
    from localllm.generation.reasoning import Thinking
    from localllm.generation.tools.tool_call_parser import ToolCall, ToolCallParser
    from localllm.generation.tools.tool_grammar import ToolGrammar


def create_distinct_items(schema: str) -> "DistinctItems":
    """Return what checks that items of arrays differ; schema: JSON text."""
    # Imported here because few answers need it: with what it imports it takes 2 ms of a start.
    from localllm.generation.constraints.distinct_items import DistinctItems

    return DistinctItems(loads(schema))


class StopFilter:
    """Passes text on up to the first stop string; holds back text that may become a stop string.

    Attributes:
        found: whether a stop string has been found.  matched_stop: that string; "" before.
    """

    def __init__(self, stops: Sequence[str]):
        self.found, self.matched_stop = False, ""
        self._stops = tuple(stops)
        self._buffer = ""

    def push(self, text: str) -> str:
        """Add text and return the text that cannot be part of a stop string.

        At a stop string, sets `found` and drops the text from there on.
        """
        if not self._stops:
            return text
        self._buffer += text
        ends, held = list[tuple[int, str]](), 0
        for stop in self._stops:
            index = self._buffer.find(stop)
            if index >= 0:
                ends.append((index, stop))
            else:
                held = max(held, count_overlap(self._buffer, stop))
        if ends:
            self.found, (end, self.matched_stop) = True, min(ends)
            output, self._buffer = self._buffer[:end], ""
            return output
        safe = len(self._buffer) - held
        output, self._buffer = self._buffer[:safe], self._buffer[safe:]
        return output

    def flush(self) -> str:
        """Return the held-back text at the end of the answer, and clear it."""
        text, self._buffer = self._buffer, ""
        return text


class Transcript:
    """The text of the tokens generated so far.

    A stop string ends the answer, but not the reasoning.

    Attributes:
        text: the answer, without text that may still become a stop string.
        thinking: the reasoning before the answer.
        calls: the tool calls; the last one may be incomplete.
        reader: parser of the tool calls; None without tools.
    """

    def __init__(
        self, decoder: StreamDecoder, stops: Sequence[str] = (), thinking: Thinking | None = None,
        calls: "ToolGrammar | None" = None, form: "Constraint | None" = None,
    ):  # fmt: skip
        """Start an empty transcript.

        decoder: the initial state of a stream decoder, which is copied.  stops: stop strings.
        calls: the grammar of tool calls; None without tools.  form: the constraint on the answer, or None.
        """
        self._thinking = thinking or Thinking()
        self.reader = calls.create_parser() if calls else None
        self._json_reader = calls.make_json_parser() if calls and form is None else None
        self._token_texts = {**self._thinking.shown, **(calls.shown if calls else {})}
        self._plain = {**self._thinking.plain, **(calls.plain if calls else {})}
        interrupts = self._thinking.format and self.reader and self.reader.is_marked
        call = self.reader.trigger if self.reader and interrupts else ""
        self._decoder, self._stops = decoder.copy(), StopFilter(stops)
        self._splitter = ReasoningParser(self._thinking, call)
        self._distinct = create_distinct_items(form.distinct) if form and form.distinct else None
        self._call_distinct: DistinctItems | None = None
        self._calls = calls
        self._answer_json = JsonCompactor() if form and form.is_compact else None
        self._call_json = None if calls is None or calls.use.json_whitespace else JsonCompactor()
        self.text = self.thinking = ""
        self.calls: list[ToolCall] = []

    def copy(self) -> "Transcript":
        """Return an independent copy."""
        twin = copy(self)
        twin.reader, twin.calls = self.reader and self.reader.copy(), deepcopy(self.calls)
        twin._json_reader = copy(self._json_reader)
        twin._distinct = self._distinct and self._distinct.copy()
        twin._call_distinct = self._call_distinct and self._call_distinct.copy()
        twin._answer_json, twin._call_json = copy(self._answer_json), copy(self._call_json)
        twin._decoder, twin._splitter, twin._stops = self._decoder.copy(), self._splitter.copy(), copy(self._stops)
        return twin

    @property
    def has_stopped(self) -> bool:
        """Return whether a stop string was found, or the model repeats a tool call."""
        return self._stops.found or (self._json_reader is not None and self._json_reader.repeats)

    @property
    def stopped_by(self) -> str:
        """The stop string that was found; "" if none was."""
        return self._stops.matched_stop

    @property
    def kind(self) -> str | None:
        """The type of the next text, REASONING or ANSWER; None while it is not known (see ReasoningParser)."""
        return self._splitter.kind

    @property
    def is_between_parts(self) -> bool:
        """Return whether the next token would begin a part or its header."""
        return self._splitter.is_between_parts

    @property
    def interruption(self) -> str:
        """The text of the tool call that has just ended the reasoning; "" at any other time."""
        return self._splitter.interruption

    def begin_answer(self) -> None:
        """Treat all text from now on as the answer, and keep white space at its beginning."""
        self._splitter.begin_answer()

    def seed_answer(self, text: str) -> None:
        """Start the answer with text that the prompt already contains; `push` does not return it again."""
        if self._answer_json:
            self._answer_json.push(text)

    def push(self, token: int) -> list[TextPart]:
        """Add a token; return the parts of text that have become certain."""
        text = self._decoder.push(token)
        parts = self._splitter.push(self._token_texts.get(token, text))
        return self._filter_parts(self._parse_calls(self.reader, parts) if self.reader else parts)

    def abandon_call(self) -> list[TextPart]:
        """Treat the text of an incomplete tool call as answer; return the parts of text that this completes."""
        return self._filter_parts(self._parse_json_calls(self.reader.abandon_call())) if self.reader else []

    def flush(self, is_end: bool = False) -> list[TextPart]:
        """Return the held-back text at the end; nothing after a stop string.

        is_end: whether the model itself ended the answer, so that its last tool call is complete.
        """
        if self.has_stopped:
            return []
        parts = [*self._splitter.push(self._decoder.flush()), *self._splitter.flush()]
        parts = self._filter_parts(self._parse_calls(self.reader, parts) if self.reader else parts)
        if self.reader:
            parts += self._filter_parts(self._parse_json_calls(self.reader.flush(is_end)))
        if self._json_reader:
            parts += self._filter_parts(self._json_reader.flush(is_end))
        return parts + self._record(ANSWER, self._stops.flush())

    def _parse_calls(self, reader: "ToolCallParser", parts: list[TextPart]) -> list[TextPart]:
        """Replace the text of tool calls by parts of the calls."""
        parsed = list[TextPart]()
        for part in parts:
            parsed += reader.push(part.text) if part.kind == ANSWER else [part]
        return self._parse_json_calls(parsed)

    def _parse_json_calls(self, parts: list[TextPart]) -> list[TextPart]:
        """Replace tool calls written as plain JSON by parts of the calls."""
        reader = self._json_reader
        return parts if reader is None else [each for part in parts for each in reader.push(part)]

    def _filter_parts(self, parts: list[TextPart]) -> list[TextPart]:
        """Return the parts up to a stop string, without ESCAPE characters and with JSON compacted."""
        output = list[TextPart]()
        for kind, text in parts:
            if self._stops.found:
                break
            if ESCAPE in text:
                for mark, plain in self._plain.items():
                    text = text.replace(mark, plain)
            if items := {ANSWER: self._distinct, ARGUMENTS: self._call_distinct}.get(kind):
                text = items.push(text)
            if compactor := {ANSWER: self._answer_json, ARGUMENTS: self._call_json}.get(kind):
                text = compactor.push(text)
            output += self._record(kind, self._stops.push(text) if kind == ANSWER else text)
        return output

    def _record(self, kind: str, text: str) -> list[TextPart]:
        """Append text to the recorded answer or reasoning; return it as a list of at most one part."""
        if kind == REASONING:
            self.thinking += text
        elif kind == ANSWER:
            self.text += text
        elif text:
            from localllm.generation.tools.tool_call_parser import append_part  # seldom needed

            if kind == CALL:
                self._call_json = self._call_json and JsonCompactor()
                self._call_distinct = self._calls.make_distinct_items(text) if self._calls else None
            append_part(self.calls, TextPart(kind, text))
        return [TextPart(kind, text)] if text else []


class TokenMatcher(Protocol):
    """The methods of a constraint's matcher that AnswerState calls."""

    def copy(self) -> "TokenMatcher": ...
    def compute_allowed_mask(self) -> np.ndarray: ...
    def accept(self, token: int) -> None: ...
    def compute_unfinished_mask(self, thinking: "Thinking") -> np.ndarray: ...
    @property
    def is_complete(self) -> bool: ...
    def get_expected_tokens(self) -> list[int]: ...


class UnionMatcher:
    """Matches either a constraint or a tool call, until a token rules out one of the two.

    Attributes:
        form: matcher of the constraint; None once only tool calls are possible.
        calls: matcher of tool calls; None once no tool call is possible.
    """

    def __init__(self, form: "Matcher", calls: "Matcher"):
        """Combine two matchers that are both at the beginning of the answer."""
        self.form: Matcher | None = form
        self.calls: Matcher | None = calls
        self._first = form

    @property
    def _matchers(self) -> "list[Matcher]":
        return [matcher for matcher in (self.form, self.calls) if matcher]

    def copy(self) -> "UnionMatcher":
        """Return an independent copy."""
        twin = copy(self)
        twin.form, twin.calls = self.form and self.form.copy(), self.calls and self.calls.copy()
        return twin

    def compute_allowed_mask(self) -> np.ndarray:
        """Compute the mask of the tokens that either matcher allows, bool [vocab].

        Raises ConstraintError.
        """
        first, *rest = self._matchers
        return first.compute_allowed_mask() | rest[0].compute_allowed_mask() if rest else first.compute_allowed_mask()

    def accept(self, token: int) -> None:
        """Advance by an allowed token; drop the matcher that does not allow it."""
        if self.form and self.calls:
            self.form, self.calls = (
                matcher if matcher.compute_allowed_mask()[token] else None for matcher in (self.form, self.calls)
            )
        for matcher in self._matchers:
            matcher.accept(token)

    def compute_unfinished_mask(self, thinking: "Thinking") -> np.ndarray:
        """Compute the mask of the tokens allowed within reasoning, bool [vocab]; see Matcher."""
        return self._first.compute_unfinished_mask(thinking)

    @property
    def is_complete(self) -> bool:
        """Return whether the answer must end now."""
        return all(matcher.is_complete for matcher in self._matchers)

    def get_expected_tokens(self) -> list[int]:
        """Return the tokens that must follow; none while both matchers remain."""
        first, *rest = self._matchers
        return [] if rest else first.get_expected_tokens()


class AnswerState:
    """The text and the constraint of one answer in progress, advanced token by token.

    Attributes:
        transcript: the text so far.  thoughts: number of reasoning tokens so far.
    """

    def __init__(
        self, transcript: Transcript, thinking: Thinking, matcher: "TokenMatcher | None" = None,
        calls: "Matcher | None" = None, is_whole: bool = False,
    ):  # fmt: skip
        """Start at the beginning of an answer.

        matcher: matcher of the constraint, or None.
        calls: matcher of tool calls, which starts where a call begins; None without tools.
        is_whole: whether `matcher` also covers the reasoning and the beginnings of tool calls.
        """
        self._calls, self._is_whole = calls, is_whole
        self.transcript = transcript
        self._thinking, self._matcher = thinking, matcher
        self.thoughts = 0
        self._forced: tuple[int, ...] = ()  # the next tokens, whatever the logits
        if matcher and not is_whole and transcript.kind is None and not self._may_think:
            transcript.begin_answer()
        self._limit_reasoning()

    @property
    def _may_think(self) -> bool:
        """Return whether reasoning may begin, or, in formats with headers, any part that has a header."""
        thinking = self._thinking
        return bool(thinking.starts) and (self._has_headers or thinking.budget != 0)

    @property
    def _has_headers(self) -> bool:
        """Return whether every part of the model's output begins with a header."""
        return self._thinking.format is not None and self._thinking.format.repeats

    def copy(self) -> "AnswerState":
        """Return an independent copy."""
        twin = copy(self)
        twin.transcript = self.transcript.copy()
        twin._matcher = self._matcher and self._matcher.copy()
        twin._calls = self._calls and self._calls.copy()
        return twin

    def restore(self, snapshot: "AnswerState") -> None:
        """Return to the state of a snapshot, which stays independent."""
        vars(self).update(vars(snapshot.copy()))

    @property
    def has_ended(self) -> bool:
        """Return whether the answer has ended, at a stop string or because its constraint allows nothing more."""
        is_complete = self._matcher is not None and self.transcript.kind == ANSWER and self._matcher.is_complete
        return is_complete or self.transcript.has_stopped

    @property
    def is_needed(self) -> bool:
        """Return whether any tokens may have to be masked."""
        return self._matcher is not None or self._calls is not None or self._thinking.budget is not None

    def compute_allowed_mask(self, vocab: int) -> np.ndarray | None:
        """Compute the mask of the tokens that may come next, bool [vocab]; None if all may.

        Raises ConstraintError.
        """
        if self._forced:
            return make_token_mask(self._forced[:1], vocab)
        matcher, transcript = self._matcher, self.transcript
        if matcher is None:
            return None
        if self._is_whole:
            return matcher.compute_allowed_mask()[:vocab]
        if transcript.kind == ANSWER:
            allowed = matcher.compute_allowed_mask()
            if self.transcript.reader is None:  # otherwise the grammar of calls handles these tokens
                allowed[list(self._thinking.shown)] = False
        elif not transcript.is_between_parts:
            allowed = matcher.compute_unfinished_mask(self._thinking)
        elif self._has_headers:
            allowed = make_token_mask(self._thinking.starts, vocab)
        else:
            allowed = matcher.compute_allowed_mask()
            allowed[list(self._thinking.starts)] = True
        return allowed[:vocab]

    def accept(self, token: int) -> list[TextPart]:
        """Advance by an allowed token that does not end the answer; return the parts of text that become certain."""
        kind = self.transcript.kind
        if self._matcher and self._is_whole:
            self._matcher.accept(token)
        if self._forced:
            self._forced = self._forced[1:]
        elif kind == REASONING:
            self.thoughts += 1
        elif self._is_whole:
            pass
        elif self._matcher and kind is None and self.transcript.is_between_parts and token in self._thinking.starts:
            self._forced = self._thinking.continuing
        elif self._matcher and (kind == ANSWER or not self._has_headers):
            self.transcript.begin_answer()
            self._matcher.accept(token)
        parts = self.transcript.push(token)
        if kind == REASONING and self.transcript.interruption and not self._is_whole:
            self._interrupt_reasoning(token, self.transcript.interruption)
        if isinstance(self._matcher, UnionMatcher) and any(part.kind == CALL for part in parts):
            self._matcher.form = None  # the text is a tool call, so the constraint on answers is dropped
        if self._calls and self.transcript.reader and self.transcript.reader.in_call:
            parts += self._begin_call(self._calls, self.transcript.reader.pending)
        elif getattr(self._matcher, "calls", self) is None:  # a UnionMatcher that has excluded calls
            parts += self.transcript.abandon_call()
        self._limit_reasoning()
        return parts

    def _interrupt_reasoning(self, token: int, text: str) -> None:
        """Advance the constraint by the beginning of a tool call that ended the reasoning."""
        if isinstance(self._matcher, UnionMatcher):
            self._matcher.form = None
        calls = cast("Matcher | None", getattr(self._matcher, "calls", self._matcher))
        if calls and calls.compute_allowed_mask()[token]:
            calls.accept(token)
        elif calls:
            calls.accept_text(text)  # several tokens write the mark

    def _begin_call(self, calls: "Matcher", pending: str) -> list[TextPart]:
        """Constrain the answer by the grammar of tool calls from now on.

        pending: text after the trigger of the call. Returns the parts of text that become certain if it is not a call.
        """
        self._calls = None
        if calls.accept_text(pending):
            self._matcher = calls
            return []
        return self.transcript.abandon_call()

    def get_expected_tokens(self) -> Sequence[int]:
        """Return tokens that are almost certain to come next, for use as a draft."""
        if self._forced or self._matcher is None or self.transcript.kind != ANSWER:
            return self._forced
        return self._matcher.get_expected_tokens()

    def _limit_reasoning(self) -> None:
        """Force the end of the reasoning if its token budget is used up."""
        budget = self._thinking.budget
        if budget is not None and self.thoughts >= budget and self.transcript.kind == REASONING and not self._forced:
            self._forced = self._thinking.closing


def make_token_mask(tokens: Sequence[int], vocab: int) -> np.ndarray:
    """Return a mask that allows only the tokens given, bool [vocab]."""
    allowed = np.zeros(vocab, bool)
    allowed[list(tokens)] = True
    return allowed
