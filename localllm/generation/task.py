"""A prompt as token ids, and how to answer it."""

import sys
from collections.abc import Sequence as Ids
from dataclasses import field, replace
from typing import TYPE_CHECKING

from localllm.engine.image_tokens import end_outside_images
from localllm.errors import ContextError, UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.token_mask import AnswerState
from localllm.generation.context_overflow import SINK_TOKENS, require_shift
from localllm.generation.options import GenerationOptions
from localllm.generation.reasoning import Thinking
from localllm.generation.transcript import Transcript
from localllm.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.generation.tools.tool_grammar import ToolGrammar


@frozen
class Task:
    """A prompt, as token ids, and how to answer it.

    Attributes:
        decoder: converts the answer's tokens to text.  thinking: the marks of reasoning.
        earlier: length, in tokens, of the stored conversation that the prompt continues; 0 if it continues none.
        calls: the grammar of tool calls, or None.  seen: the images of the prompt's image tokens.
        begun: the part of the answer that the prompt already contains.
    """

    prompt: list[int]
    decoder: StreamDecoder
    options: GenerationOptions = field(default_factory=GenerationOptions)
    thinking: Thinking = field(default_factory=Thinking)
    earlier: int = 0
    calls: "ToolGrammar | None" = None
    seen: "Ids[ImageEmbedding]" = ()
    begun: str = ""

    def require_room(self, context: int) -> None:
        """Raise UsageError for an empty prompt and ContextError for one that leaves no room for an answer."""
        if not self.prompt:
            raise UsageError("the prompt is empty")
        if len(self.prompt) >= context:
            length = len(self.prompt)
            message = f"the prompt has {length} tokens, but the context holds only {context} with the answer"
            raise ContextError(message, length - context + 1)

    def resolve_keep(self, context: int) -> int | None:
        """Return the number of first tokens to keep when the context is full; None without context shift.

        Raises ContextError for a context that is too small to shift, and errors as `require_room`.
        """
        if self.options.on_overflow != "shift":
            self.require_room(context)
            return None
        count = end_outside_images(self.prompt, SINK_TOKENS if self.options.keep is None else self.options.keep)
        require_shift(count, context)
        self.require_room(sys.maxsize)
        return count

    def guide(self, tokenizer: Tokenizer, vocab: int) -> AnswerState:
        """Make the state of an answer before its first token; vocab: vocabulary size. Raises UsageError."""
        matcher, calls = None, self.calls
        if self.options.constraint:
            from localllm.generation.constraints.constraint import matcher_of  # imports llguidance if it is needed

            matcher = matcher_of(self.options.constraint, tokenizer, vocab)
        form = self.options.constraint
        transcript = Transcript(self.decoder, () if form else self.options.stop, self.thinking, calls, form)
        if self.begun and matcher and (advanced := matcher.copy()).accept_text(self.begun):
            matcher = advanced  # otherwise the beginning does not match, and the constraint starts after it
            transcript.go_on_from(self.begun)
        if calls is None:
            if matcher and matcher.names_any(self.thinking.shown):  # a grammar that covers the reasoning, too
                return AnswerState(transcript, replace(self.thinking, budget=None), matcher, is_whole=True)
            return AnswerState(transcript, self.thinking, matcher)
        if calls.must:
            return AnswerState(transcript, self.thinking, calls.matcher(vocab), is_whole=calls.wraps_whole_message)
        if matcher is None or calls.wraps_whole_message:  # the grammar of calls covers whole messages
            return AnswerState(transcript, self.thinking, matcher, calls.matcher(vocab))
        from localllm.generation.constraints.union_matcher import UnionMatcher

        return AnswerState(transcript, self.thinking, UnionMatcher(matcher, calls.matcher(vocab, whole=True)))
