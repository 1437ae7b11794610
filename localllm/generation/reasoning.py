"""Recognize the reasoning before an answer by its marks, and control it by template variables.

Iterators of an answer's text have `parts`, which include the reasoning. For a Generation:

    for kind, text in generation.parts:   # TextPart("thought", "Hm, ...") or TextPart("answer", "Yes.")
        ...

while `for text in generation` yields the answer only; afterwards, generation.thinking and generation.text have the
whole reasoning and answer. Reasoning is recognized only at the beginning of an answer, by marks that the template or
the vocabulary has, so that an answer can mention <think>. Marks may be split over several tokens; they, and the white
space around reasoning, are removed.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from localllm.engine.image_tokens import remove_images
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer

# Types of parts: the reasoning, the answer, a tool call's name, and a chunk of its arguments.
REASONING, ANSWER, CALL, ARGUMENTS = "thought", "answer", "call", "arguments"
ESCAPE = "\ufdd1"  # a noncharacter before a mark that is one token, to tell it from the same characters as plain text
_TAIL = 32  # last tokens of a prompt, in which a template may open the reasoning


class TextPart(NamedTuple):
    """A chunk of text with its type, such as REASONING or ANSWER."""

    kind: str
    text: str


class PartStart(NamedTuple):
    """The type of a part that begins, and the number of characters of its opening marks."""

    kind: str
    length: int


class ThinkingFormat(Protocol):
    """The marks of a model's reasoning.

    Attributes:
        marks: strings that may be control tokens, which are otherwise not decoded.
        opens: mark that begins the reasoning.  closing: text that ends it and begins the answer.
        repeats: whether every part has marks, not only the reasoning.
    """

    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def opens(self) -> str: ...
    @property
    def closing(self) -> str: ...
    @property
    def repeats(self) -> bool: ...

    def detect_part(self, text: str) -> PartStart | None:
        """Return the part that begins with this text; None if the text is too short to tell."""

    def get_end_mark(self, kind: str) -> str:
        """Return the mark that ends a part of this type; "" if it has none."""
        ...

    def get_answer_rest(self, text: str) -> str:
        """Return what belongs to the answer of the text held back at the end of generation."""
        ...

    def escape_marks(self) -> Self:
        """Return a copy with the ESCAPE character before each mark."""
        ...


@frozen
class TagFormat:
    """A format with one reasoning part, between two marks, before the answer."""

    opens: str
    closes: str
    repeats = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens.removesuffix("thought"), self.closes)

    @property
    def closing(self) -> str:
        return f"\n{self.closes}\n\n"

    def detect_part(self, text: str) -> PartStart | None:
        bare = text.lstrip()
        if bare.startswith(self.opens):
            return PartStart(REASONING, len(text) - len(bare) + len(self.opens))
        return None if self.opens.startswith(bare) else PartStart(ANSWER, 0)

    def get_end_mark(self, kind: str) -> str:
        return self.closes if kind == REASONING else ""

    def get_answer_rest(self, text: str) -> str:
        return text

    def escape_marks(self) -> "TagFormat":
        return TagFormat(ESCAPE + self.opens, ESCAPE + self.closes)


@frozen
class ChannelFormat:
    """A format of several messages, each with a header that tells whether it is reasoning.

    Attributes:
        heads: marks that end a header.  thought: text in the header of reasoning.
        closes: mark that ends a message.  others: marks in a header.
        opens: header of reasoning.  answer: header of the answer.
        calls: text in the header of a tool call, if there are tools; such headers stay in the text.
    """

    heads: tuple[str, ...]
    thought: str
    closes: str
    others: tuple[str, ...]  # marks in a header
    opens: str
    answer: str  # the header of an answer
    calls: str = ""  # text in the header of a tool call, if there are tools; such headers stay in the text
    repeats = True

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.heads, self.closes, *self.others)

    @property
    def closing(self) -> str:
        return self.closes + self.answer

    def detect_part(self, text: str) -> PartStart | None:
        if self.calls and self.calls in text:
            return PartStart(ANSWER, 0)
        ends = [place + len(head) for head in self.heads if (place := text.find(head)) >= 0]
        if ends:
            return PartStart(REASONING if self.thought in text[: min(ends)] else ANSWER, min(ends))
        return None if self._may_be_header(text) else PartStart(ANSWER, 0)

    def get_end_mark(self, kind: str) -> str:
        return self.closes

    def get_answer_rest(self, text: str) -> str:
        return "" if self._may_be_header(text) else text

    def escape_marks(self) -> "ChannelFormat":
        heads, other_marks = (tuple(ESCAPE + mark for mark in marks) for marks in (self.heads, self.others))
        return replace(self, heads=heads, others=other_marks, closes=ESCAPE + self.closes)

    def _may_be_header(self, text: str) -> bool:
        """Return whether a string may begin with a mark: all marks begin with the same two characters."""
        begin, bare = self.closes[:2], text.lstrip()
        return bare.startswith(begin) or begin.startswith(bare)


FORMATS: tuple[ThinkingFormat, ...] = (
    ChannelFormat(  # gpt-oss
        ("<|message|>",),
        "analysis",
        "<|end|>",
        ("<|start|>", "<|channel|>", "<|constrain|>"),
        "<|channel|>analysis<|message|>",
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    ChannelFormat(  # Solar
        ("<|think|>", "<|content|>"),
        "<|think|>",
        "<|end|>",
        ("<|begin|>",),
        "<|think|>",
        "<|begin|>assistant<|content|>",
    ),
    TagFormat("<seed:think>", "</seed:think>"),
    TagFormat("<mm:think>", "</mm:think>"),
    TagFormat("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    TagFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B and A
    TagFormat("<|channel>thought", "<channel|>"),  # Gemma 4
    TagFormat("[THINK]", "[/THINK]"),  # Magistral, Ministral
    TagFormat("◁think▷", "◁/think▷"),  # Kimi-VL
    TagFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    TagFormat("<thought>", "</thought>"),  # EXAONE Deep
    TagFormat("<think>", "</think>"),  # DeepSeek R1, Qwen 3, GLM 4.5 and most others
    TagFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


def detect_format(template: str, tokenizer: "Tokenizer") -> ThinkingFormat | None:
    """Return the reasoning format of a chat template (its source), else that of the vocabulary, or None."""
    for format in FORMATS:
        if _is_in_template(format, template):
            return format
    return next((format for format in FORMATS if _has_mark_tokens(format, tokenizer)), None)


def _is_in_template(format: ThinkingFormat, template: str) -> bool:
    """Return whether a template contains the marks of a format."""
    if isinstance(format, ChannelFormat):
        return all(mark in template for mark in (*format.heads, format.closes, *format.others[:1], format.thought))
    return format.marks[-1] in template


def _has_mark_tokens(format: ThinkingFormat, tokenizer: "Tokenizer") -> bool:
    """Return whether each mark of a format is a token of the vocabulary."""
    return all(tokenizer.get_special_id(mark) is not None for mark in format.marks)


@frozen
class Thinking:
    """The marks of an answer's reasoning; by default, the model does not reason.

    Attributes:
        format: the marks, or None.
        is_open: whether the prompt ends within the reasoning, because the template has opened it.
        has_words: whether the reasoning already has text, so that white space at its beginning is kept.
        shown: text of each token that is a mark, by token id, with ESCAPE.
        plain: text of each such token outside of reasoning, by the text in `shown`.
        starts: tokens that begin the reasoning or a header; the tokens of `continuing` follow.
        closing: tokens that end the reasoning.
        budget: maximum number of reasoning tokens, or None.
    """

    format: ThinkingFormat | None = None
    is_open: bool = False
    has_words: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    continuing: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    budget: int | None = None

    @classmethod
    def detect(
        cls, format: ThinkingFormat | None, tokenizer: "Tokenizer", prompt: Sequence[int], budget: int | None
    ) -> Self:
        """Return the state of reasoning after a rendered prompt (token ids)."""
        if format is None:
            return cls()
        is_open = tokenizer.decode(remove_images(prompt[-_TAIL:]), special=True).rstrip().endswith(format.opens)
        closing = tuple(tokenizer.encode(format.closing, special=True))
        tokens = {token: mark for mark in format.marks if (token := tokenizer.get_special_id(mark)) is not None}
        if len(tokens) < len(format.marks):
            return cls(format, is_open, shown=tokens, closing=closing, budget=budget)
        escaped = {token: ESCAPE + mark for token, mark in tokens.items()}
        plain = {ESCAPE + mark: "" if token in tokenizer.control_ids else mark for token, mark in tokens.items()}
        if format.repeats:
            starts, continuing = [token for token, mark in tokens.items() if mark != format.get_end_mark(REASONING)], []
        else:
            first, *continuing = tokenizer.encode(format.opens, special=True)
            starts = [first]
        return cls(
            format.escape_marks(), is_open, False, escaped, plain, tuple(starts), tuple(continuing), closing, budget
        )

    def start_inside(self) -> Self:
        """Return a copy that starts inside the reasoning."""
        return replace(self, is_open=True, has_words=True)


class ReasoningParser:
    """Splits the text of an answer into reasoning and answer while it is generated.

    Attributes:
        kind: type of the next text, REASONING or ANSWER; None while it is not known, or within a header.
        call: mark of a tool call, which also ends reasoning that the model has not ended; "" without one.
        interruption: text from that mark on, once the mark has ended the reasoning; "" before.
    """

    def __init__(self, thinking: Thinking, call: str = ""):
        self.call = "" if thinking.format is None or thinking.format.repeats else call
        self.interruption, self._is_first_line = "", True
        self._format, self._buffer = thinking.format, ""
        self.kind = REASONING if thinking.is_open else None if thinking.format else ANSWER
        self._trims = thinking.is_open and not thinking.has_words

    def begin_answer(self) -> None:
        """Treat all text from now on as the answer, and keep white space at its beginning."""
        self.kind, self._trims = ANSWER, False

    @property
    def is_between_parts(self) -> bool:
        """Return whether neither a part nor its header has begun."""
        return self.kind is None and not self._buffer

    def copy(self) -> "ReasoningParser":
        """Return an independent copy."""
        return copy(self)

    def push(self, text: str) -> list[TextPart]:
        """Add text; return the parts that have become certain."""
        if self._format is None:
            return [TextPart(ANSWER, text)] if text else []
        self._buffer += text
        parts = list[TextPart]()
        while self._consume_mark(self._format, parts):
            pass
        return parts

    def flush(self) -> list[TextPart]:
        """Return the held-back text at the end of the answer, since it has not become a mark."""
        text, self._buffer = self._buffer, ""
        if self.kind is None and self._format:
            text = self._format.get_answer_rest(text)
        parts = list[TextPart]()
        self._add(parts, self.kind or ANSWER, text.rstrip() if self.kind == REASONING else text)
        return parts

    def _consume_mark(self, format: ThinkingFormat, parts: list[TextPart]) -> bool:
        """Move text that has become certain to `parts`; return whether it ended at a mark, so that more may follow."""
        if self.kind is None:
            if (block := format.detect_part(self._buffer)) is None:
                return False
            self.kind, self._buffer = block.kind, self._buffer[block.length :]
            self._trims = self._trims or block.length > 0
            return True
        kind, mark = self.kind, format.get_end_mark(self.kind)
        place = self._buffer.find(mark) if mark else -1
        if kind == REASONING and (call := self._find_call(place)) is not None:
            self.interruption = self._buffer[call:]
            self._add(parts, kind, self._buffer[:call].rstrip())
            self._buffer, self.kind, self._trims = self.interruption, ANSWER, False
            return True
        if place >= 0:
            text, self._buffer = self._buffer[:place], self._buffer[place + len(mark) :]
            self._add(parts, kind, text.rstrip() if kind == REASONING else text)
            self.kind, self._trims = None if format.repeats else ANSWER, True
            return True
        safe = len(self._buffer) - count_overlap(self._buffer, mark)
        if kind == REASONING:
            safe = len(self._buffer[: min(safe, len(self._buffer) - count_overlap(self._buffer, self.call))].rstrip())
            self._is_first_line = self._is_first_line and not safe
        self._add(parts, kind, self._buffer[:safe])
        self._buffer = self._buffer[safe:]
        return False

    def _find_call(self, end: int) -> int | None:
        """Return the index in the reasoning at which a tool call begins; None without one.

        end: index before which to search; -1: no limit. A mark that is not a token counts only at the beginning of a
        line.
        """
        place = self._buffer.find(self.call, 0, None if end < 0 else end) if self.call else -1
        line = self._buffer[: max(place, 0)].rstrip(" ") or "\n" * self._is_first_line
        return place if place >= 0 and (ESCAPE in self.call or line.endswith("\n")) else None

    def _add(self, parts: list[TextPart], kind: str, text: str) -> None:
        """Append text as a part, without white space at the beginning of reasoning or answer."""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        if text:
            parts.append(TextPart(kind, text))


def count_overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


def make_template_variables(template: str, think: str, budget: int | None) -> dict[str, object]:
    """Return the template variables that turn thinking on or off; those that a template does not use have no effect.

    template: its source. think, budget: see GenerationOptions. Each family has its own names: enable_thinking (Qwen,
    GLM, Gemma), thinking (DeepSeek, Granite), thinking_mode (MiniMax), reasoning_effort (gpt-oss, Hunyuan, Solar),
    thinking_budget (Seed).
    """
    variables: dict[str, object] = {} if budget is None else {"thinking_budget": budget}
    if think == "auto":
        return variables
    thinks = think != "off"
    variables |= {"enable_thinking": thinks, "thinking": thinks, "thinking_mode": "enabled" if thinks else "disabled"}
    if not thinks:
        variables["thinking_budget"] = 0
    if think not in ("on", "off"):
        variables["reasoning_effort"] = think
    elif not thinks:
        efforts = ("no_think", "none", "minimal", "low")
        variables["reasoning_effort"] = next((name for name in efforts if _mentions(template, name)), "low")
    elif _mentions(template, "no_think"):  # there it is off unless another effort is named
        variables["reasoning_effort"] = "high"
    return variables


def _mentions(template: str, value: str) -> bool:
    """Return whether a template contains a string literal."""
    return f"'{value}'" in template or f'"{value}"' in template
