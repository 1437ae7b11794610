"""Methods of a model that take prompts or conversations, with options as keyword arguments."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from localllm.errors import LocalllmError, UsageError
from localllm.generation.arguments import AnswerArguments, CallArguments, ChatArguments, gather_options
from localllm.generation.conversation import is_conversation
from localllm.generation.generate import Generation, GenerationOptions
from localllm.generation.request import Completion, Request
from localllm.generation.session import Session
from localllm.text.marker_escaping import Message
from localllm.values import require_several, require_text, whole_number

if TYPE_CHECKING:
    from localllm.generation.async_generation import AsyncGeneration
    from localllm.generation.beam_search import Answer
    from localllm.generation.choices import Choice, Score, TextTree
    from localllm.generation.scheduler import Scheduler
    from localllm.generation.speculation.drafter import Drafter
    from localllm.generation.tools.tool_call import ToolCall
    from localllm.generation.tools.tool_run import ToolRun

Prompt = str | list[int] | list[Message]  # a text, its token ids, or messages


class GenerationMixin:
    """The methods of a Model that generate.

    Attributes:
        session: its conversation.
    """

    session: Session

    def drafter(self, speculate: Any) -> "str | Drafter":
        """Return the proposer of drafts."""
        raise NotImplementedError

    def batch(self, requests: Iterable[Request], parallel: int | None = None, precise: bool = True) -> "Scheduler":
        """Return a scheduler for many requests."""
        raise NotImplementedError

    def generate(
        self,
        prompt: str | list[int],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto",
        **options: Unpack[AnswerArguments],
    ) -> Generation:
        """Continue a text as it is: an iterator of pieces of text, with attributes about the answer (see Generation).

        stop: strings that end the text.  speculate: where drafts come from: "auto", "mtp", "ngram", "off",
        "draft:PATH" or an open Model.  options: how tokens are chosen, as temperature=0 or seed=1; on_overflow and
        keep, what is done when the context is full; what the answer must look like: schema, a JSON schema (a dict, its
        text or a type as a pydantic class, a dataclass, list[int]; see Generation.parsed), grammar in GBNF, or regex:
        it is of that form whenever its finish_reason is "stop". Raises ContextError, UsageError.
        """
        return self.session.complete(prompt, gather_options(max_tokens, stop, options, self.drafter(speculate)))

    def infill(
        self,
        prefix: str,
        suffix: str,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto",
        files: Sequence[tuple[str, str]] = (),
        **options: Unpack[AnswerArguments],
    ) -> Generation:
        """Generate the text between two parts, with a code model trained for it (fill in the middle).

        files: (name, text) of others of the repository, the most important last.  Others and errors as of `generate`;
        UsageError, too, if the model was not trained for it.
        """
        from localllm.generation.infill import Infill

        chosen = gather_options(max_tokens, stop, options, self.drafter(speculate))
        return self.session.complete(Infill(prefix, suffix, files or None).encode(self.session.tokenizer), chosen)

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto",
        **options: Unpack[ChatArguments],
    ) -> Generation:
        """Answer a conversation, [{"role": "user", "content": "Hi"}, ...], as `generate` continues a text.

        options: besides, think="on", "off", "auto" or how much, "low", "medium" or "high"; think_budget, the most
        tokens of reasoning, which is no part of the text (see Generation.parts and .thinking); template_variables, a
        dict for the chat template; continue_final: whether to continue the last message, None for an assistant's
        without calls; tools: functions that the model may call, whose schemas are made of signatures and docstrings
        (see Generation.calls, and `run_tools`, which calls them), with tool_choice.
        """
        return self.session.chat(messages, gather_options(max_tokens, stop, options, self.drafter(speculate)))

    def achat(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto",
        **options: Unpack[ChatArguments],
    ) -> "AsyncGeneration[Generation]":
        """Answer a conversation as `chat`, for `async for`; leaving the loop or cancelling the task ends the answer."""
        from localllm.generation.async_generation import AsyncGeneration

        return AsyncGeneration(lambda: self.chat(messages, max_tokens, stop, speculate, **options))

    async def acomplete(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto",
        **options: Unpack[ChatArguments],
    ) -> Generation:
        """Return the whole answer to messages, or the continuation of a text or token ids, as `chat` and `generate`."""
        from localllm.generation.async_generation import AsyncGeneration

        def begin() -> Generation:
            chosen = gather_options(max_tokens, stop, options, self.drafter(speculate))
            if is_conversation(prompt):
                return self.session.chat(cast("list[Message]", prompt), chosen)
            return self.session.complete(cast("str | list[int]", prompt), chosen)

        return await AsyncGeneration(begin).complete()

    def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., object]],
        max_turns: int = 8,
        permission: Callable[["ToolCall"], bool] | None = None,
        max_tokens: int | None = None,
        **options: Unpack[CallArguments],
    ) -> "ToolRun":
        """Answer a conversation, and call the functions that the model calls, until it answers without a call.

        permission: asked before each call. The model is told about exceptions of functions; asynchronous ones run in an
        event loop of their own. A tool that tool_choice demands is demanded once. Iterating raises LocalllmError after
        max_turns turns with calls.
        """
        from localllm.generation.tools.tool_run import ToolRun

        return ToolRun(self._turns(messages, tools, max_tokens, options), tools, max_turns, permission)

    def arun_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., object]],
        max_turns: int = 8,
        permission: Callable[["ToolCall"], bool] | None = None,
        max_tokens: int | None = None,
        **options: Unpack[CallArguments],
    ) -> "AsyncGeneration[ToolRun]":
        """Do as `run_tools`, for `async for`: asynchronous functions run in the caller's event loop, others in threads.

        Leaving the loop or cancelling the task ends the answer, and cancels a function that runs.
        """
        import asyncio  # 17 ms

        from localllm.generation.async_generation import AsyncGeneration
        from localllm.generation.tools.tool_run import ToolRun

        loop, begin = asyncio.get_running_loop(), self._turns(messages, tools, max_tokens, options)
        return AsyncGeneration(lambda: ToolRun(begin, tools, max_turns, permission, loop))

    def _turns(
        self,
        messages: Sequence[Message],
        tools: Sequence[Callable[..., object]],
        max_tokens: int | None,
        options: CallArguments,
    ) -> "Callable[[Sequence[Message]], Generation]":
        """Return a function that answers the conversation after tool calls, given the messages since."""
        given: ChatArguments = {**options, "tools": tools}
        freely: ChatArguments = {**given, "tool_choice": "auto"}
        first, later = gather_options(max_tokens, (), given), gather_options(max_tokens, (), freely)
        return lambda said: self.session.chat([*messages, *said], later if said else first)

    def candidates(
        self,
        prompt: Prompt,
        n: int = 1,
        beams: int = 0,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **options: Unpack[ChatArguments],
    ) -> "list[Answer]":
        """Return the n best of several answers, best first: n sampled ones, or the likeliest that `beams` beams find.

        prompt: a text to continue, its token ids, or messages to answer. Raises as `generate`.
        """
        return self.session.candidates(prompt, gather_options(max_tokens, stop, options), n, beams)

    @overload
    def map(
        self,
        prompts: Iterable[Prompt],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parallel: int | None = None,
        precise: bool = True,
        errors: Literal["raise"] = "raise",
        **options: Unpack[ChatArguments],
    ) -> Iterator[Completion]: ...

    @overload
    def map(
        self,
        prompts: Iterable[Prompt],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parallel: int | None = None,
        precise: bool = True,
        *,
        errors: Literal["return"],
        **options: Unpack[ChatArguments],
    ) -> Iterator[Completion | LocalllmError]: ...

    def map(
        self,
        prompts: Iterable[Prompt],
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parallel: int | None = None,
        precise: bool = True,
        errors: str = "raise",
        **options: Unpack[ChatArguments],
    ) -> Iterator[Completion | LocalllmError]:
        """Answer many prompts at once, each as `generate` or `chat` would, in the order of the prompts.

        An answer has a text, tokens and a finish_reason. parallel: the most at once (None: 16); precise: keep
        activations in 16 bits; without it is faster, and a token that is as likely as another may be another; errors:
        "raise" the first, as `generate`, or "return" each in the place of its answer, so that the others continue.
        """
        chosen = gather_options(max_tokens, stop, options)
        if errors not in ("raise", "return"):
            raise UsageError(f"errors should be raise or return, not {errors!r}")
        parallel = None if parallel is None else whole_number("parallel", parallel, 1)
        return self._map(require_several("prompts", prompts), chosen, parallel, precise, errors == "return")

    def _map(
        self, prompts: Iterable[Prompt], options: GenerationOptions, parallel: int | None, precise: bool, returns: bool
    ) -> Iterator[Completion | LocalllmError]:
        """Answer prompts in their order."""
        made = dict[int, Completion | LocalllmError]()
        wanted = 0
        with closing(self.batch(self._requests(prompts, options, made, returns), parallel, precise)) as batch:
            for finished in batch:
                made |= {request.key: request.error or request.answers[0] for request in finished}
                while (answer := made.pop(wanted, None)) is not None:
                    if isinstance(answer, LocalllmError) and not returns:
                        raise answer
                    yield answer
                    wanted += 1
        yield from (made[number] for number in sorted(made))

    def _requests(
        self,
        prompts: Iterable[Prompt],
        options: GenerationOptions,
        failed: dict[int, Completion | LocalllmError],
        returns: bool,
    ) -> Iterator[Request]:
        """Make requests; failed: gets the errors of those that cannot be, if they are to be returned."""
        for number, prompt in enumerate(prompts):
            try:
                yield self.session.request(prompt, options, key=number)
            except LocalllmError as error:
                if not returns:
                    raise
                failed[number] = error

    def choose(self, prompt: Prompt, choices: Sequence[str], **options: Unpack[AnswerArguments]) -> "list[Choice]":
        """Return which of some texts answers a prompt best: exact probabilities, the likeliest first.

        Messages are answered without reasoning; a text (or token ids) is continued by each. A text's probability is the
        product of its tokens'; that the answer ends after it counts where messages are answered and one of the texts
        begins another. Raises ContextError, UsageError.
        """
        from localllm.generation.choices import choices_of, require_texts, text_logprobs

        request, tree = self._to_choose(require_texts(choices), options)(prompt)
        return choices_of(choices, text_logprobs(self.session.cache, self.session.tokenizer, request, tree))

    def choose_many(
        self,
        prompts: Iterable[Prompt],
        choices: Sequence[str],
        precise: bool = True,
        **options: Unpack[AnswerArguments],
    ) -> "Iterator[list[Choice] | LocalllmError]":
        """Choose as `choose` for many prompts, read together, in their order.

        An error takes the place of its prompt's choices.

        precise: as of `map`.
        """
        from localllm.generation.choices import PARALLEL, ManyScores, choices_of, require_texts

        scores = ManyScores(self.session.cache.engine, self._to_choose(require_texts(choices), options), precise)
        with closing(self.batch(scores.requests(prompts), PARALLEL, precise)) as batch:
            for result in scores.results(batch):
                yield result if isinstance(result, LocalllmError) else choices_of(choices, result)

    def _to_choose(
        self, texts: Sequence[str], options: AnswerArguments
    ) -> "Callable[[Prompt], tuple[Request, TextTree]]":
        """Return a function from a prompt to the request and the texts to score."""
        given: AnswerArguments = {"think": "off", **options}
        chosen = gather_options(None, (), given)
        with_end = any(one.startswith(other) for one in texts for other in texts if one is not other)

        @cache
        def tree(is_chat: bool) -> "TextTree":
            return self.session.tree(texts, is_chat, with_end)

        return lambda prompt: (self.session.request(prompt, chosen), tree(is_conversation(prompt)))

    def score(self, prompt: Prompt, text: str, **options: Unpack[AnswerArguments]) -> "Score":
        """Return the log probability of a text after a prompt, and of each of its tokens.

        After messages, the end of the answer counts as one more token.
        """
        from localllm.generation.choices import Score, text_logprobs

        given: AnswerArguments = {"think": "off", **options}
        request = self.session.request(prompt, gather_options(None, (), given))
        tree = self.session.tree([require_text("text", text)], is_conversation(prompt), with_end=True)
        (tokens,) = text_logprobs(self.session.cache, self.session.tokenizer, request, tree)
        return Score(sum(token.logprob for token in tokens), tokens)

    def count_tokens(self, prompt: Prompt, **options: Unpack[ChatArguments]) -> int:
        """Count the tokens that a text or a conversation is read as, with what the chat template adds."""
        return len(self.session.request(prompt, gather_options(None, (), options)).prompt)
