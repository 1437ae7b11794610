"""Define the methods of a model that generate, choose or score text, also for event loops."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from localllm.errors import LocalllmError, UnknownOptionError, UsageError
from localllm.generation.conversation import is_conversation
from localllm.generation.options import GenerationOptions
from localllm.generation.request import Completion, Request
from localllm.generation.sampling.options import SamplingArguments, SamplingOptions
from localllm.generation.scheduler import Generation
from localllm.generation.session import Session
from localllm.text.messages import Message
from localllm.values import require_integer, require_iterable, require_string, to_python_number

if TYPE_CHECKING:
    import numpy as np

    from localllm.generation.beam_search import Answer
    from localllm.generation.choices import Choice, Score, TokenTrie
    from localllm.generation.scheduler import Scheduler
    from localllm.generation.speculation.acceptance import Drafter
    from localllm.generation.tool_run import ToolRun
    from localllm.generation.tools.tool_call_parser import ToolCall


class AnswerArguments(SamplingArguments, total=False):
    """Options of an answer, besides those of sampling.

    on_overflow, keep: what happens when the context is full. think: "on", "off", "auto", "low", "medium" or "high".
    think_budget: maximum number of reasoning tokens. template_variables: variables for the chat template.
    continue_final: whether to continue the last message; None: if it is an assistant's without tool calls. schema,
    grammar (GBNF), regex: the constraint on the answer, at most one of them. json_whitespace, additional_properties:
    allow white space and unlisted properties in the answer to a schema. logprobs: whether to return log probabilities,
    or, like top_logprobs, with how many alternatives to each token. logits_processor: called before each token is drawn
    with all token ids and a copy of the logits, float32 [vocab]; returns the logits to draw from. stopping_criteria:
    called with the same arguments; returns whether the answer ends. ban: strings that must not occur in the answer, in
    upper or lower case; their tokens are undone and drawn again. lora: scales of the adapters by name; None: the scales
    with which the model was opened.
    """

    on_overflow: str | None
    keep: int | None
    think: str
    think_budget: int | None
    template_variables: Mapping[str, object]
    continue_final: bool | None
    schema: object
    grammar: str | None
    regex: str | None
    json_whitespace: bool
    additional_properties: bool
    logprobs: bool | int | None
    top_logprobs: int | None
    logits_processor: Callable[[list[int], "np.ndarray"], "np.ndarray"] | None
    stopping_criteria: Callable[[list[int], "np.ndarray"], bool] | None
    ban: Sequence[str]
    lora: Mapping[str, float] | None


class CallArguments(AnswerArguments, total=False):
    """Options of an answer, with those of tool calls.

    tool_choice: "auto", "required", "none", or the tool to call.
    parallel_tool_calls: whether an answer may have several calls.
    json_calls: whether JSON text that names a tool counts as a call.
    """

    tool_choice: object
    parallel_tool_calls: bool
    json_calls: bool


class ChatArguments(CallArguments, total=False):
    """Options of an answer to a conversation, with the tools.

    tools: functions that the model may call, or descriptions of functions in OpenAI's format.
    """

    tools: Sequence[object]


_CONSTRAINTS = ("schema", "grammar", "regex")
_JSON = ("json_whitespace", "additional_properties")
_BOOLEANS = {*_JSON, "continue_final", "parallel_tool_calls", "json_calls"}
_TOOLS = {"tool_choice": "choice", "parallel_tool_calls": "parallel", "json_calls": "json_calls"}


def describe_unknown_option(name: str) -> str:
    """Return the message for an unknown option, with the name that it resembles."""
    from difflib import get_close_matches  # seldom needed

    from localllm.foreign_names import ANSWER_NAMES, describe_foreign_name

    if hint := describe_foreign_name(name, ANSWER_NAMES):
        return f"there is no option {name!r}{hint}"
    close = get_close_matches(name.lower(), sorted(ChatArguments.__annotations__), n=1)
    return f"there is no option {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def count_alternatives(logprobs: object, top_logprobs: object) -> int | None:
    """Return how many alternatives to each token to report; None if no log probabilities are wanted.

    logprobs: True or False as in OpenAI's chat API, or a count as in its completions API. top_logprobs: a count, or
    None. Raises UsageError for invalid values, or two different counts.
    """
    if logprobs is None or isinstance(logprobs, bool):
        is_asked, count = bool(logprobs), None
    else:
        is_asked, count = True, require_integer("logprobs", logprobs)
    if top_logprobs is None:
        return (count or 0) if is_asked else None
    top = require_integer("top_logprobs", top_logprobs)
    if count not in (None, top):
        raise UsageError(f"logprobs and top_logprobs must not differ (found {count} and {top}): give only one of them")
    return top


def gather_options(
    max_tokens: int | None, stop: Sequence[str], arguments: AnswerArguments, speculate: "str | Drafter" = "auto"
) -> GenerationOptions:
    """Convert the keyword arguments of a method to options.

    Raises UnknownOptionError for an unknown name, UsageError for an invalid value.
    """
    remaining = {name: to_python_number(value) for name, value in cast("dict[str, Any]", arguments).items()}
    sampling = {name: remaining.pop(name) for name in SamplingArguments.__annotations__ if name in remaining}
    constraint = {name: remaining.pop(name) for name in _CONSTRAINTS if remaining.get(name) is not None}
    style = {name: remaining.pop(name) for name in _JSON if name in remaining}
    use = {name: remaining.pop(argument) for argument, name in _TOOLS.items() if argument in remaining}
    for name in _BOOLEANS & arguments.keys():
        if not isinstance(value := to_python_number(cast("dict[str, Any]", arguments)[name]), bool | None):
            raise UsageError(f"{name} must be True or False, not {value!r:.60}")
    if unknown := remaining.keys() - ChatArguments.__annotations__.keys():
        raise UnknownOptionError(describe_unknown_option(sorted(unknown)[0]))
    answer_options = {name: value for name, value in remaining.items() if name not in _CONSTRAINTS}
    if answer_options.get("tools"):
        from localllm.generation.tools.python_tools import make_tool_use  # seldom needed

        answer_options["tools"] = make_tool_use(answer_options["tools"], **use, **style)
    answer_options["top_logprobs"] = count_alternatives(
        answer_options.pop("logprobs", None), answer_options.get("top_logprobs")
    )
    if constraint:
        from localllm.generation.constraints.constraint import make_constraint  # llguidance takes 30 ms to import
        from localllm.generation.constraints.json_text import is_type

        answer_options["constraint"] = make_constraint(**constraint, **style)
        answer_options["result_type"] = schema if is_type(schema := constraint.get("schema")) else None
    return GenerationOptions(
        to_python_number(max_tokens), stop, SamplingOptions(**sampling), None, speculate, **answer_options
    )


def make_options(arguments: Mapping[str, Any]) -> GenerationOptions:
    """Convert keyword arguments, including max_tokens and stop, to options. Raises UsageError."""
    remaining = dict(arguments)
    max_tokens, stop = remaining.pop("max_tokens", None), remaining.pop("stop", ())
    return gather_options(max_tokens, stop, cast("AnswerArguments", remaining))


def pair_options(
    prompts: Iterable["Prompt"], each: Iterable[Mapping[str, Any]], common: Mapping[str, Any]
) -> "Iterator[tuple[Prompt, Callable[[], GenerationOptions]]]":
    """Pair prompts with functions that make their options. Raises UsageError if their counts differ."""
    for prompt, own in zip_longest(prompts, each, fillvalue=MISSING):
        if prompt is MISSING or own is MISSING:
            raise UsageError("per_prompt must have options for each prompt: the two lists have different lengths")
        if not isinstance(own, Mapping):
            raise UsageError(f"per_prompt must be a list of dicts, not of {type(own).__name__}")
        yield cast("Prompt", prompt), partial(make_options, {**common, **own})


MISSING = object()
Prompt = str | list[int] | list[Message]  # a string or token ids to continue, or messages to answer


class GenerationMixin:
    """The methods of a Model that generate, choose and score text.

    Attributes:
        session: the model's conversation.  receipt_maker: makes the receipt of an answer from this model, the
        prompt, the options and the answer; None: answers have no receipts.
    """

    session: Session
    receipt_maker: "Callable[[Any, object, GenerationOptions, Generation], dict[str, Any]] | None" = None

    def resolve_drafter(self, speculate: Any) -> "str | Drafter":
        """Convert the argument `speculate` of a method to a value of GenerationOptions.speculate."""
        raise NotImplementedError

    def batch(self, requests: Iterable[Request], parallel: int | None = None, precise: bool = True) -> "Scheduler":
        """Return a scheduler that answers many requests; see Scheduler for the arguments."""
        raise NotImplementedError

    def generate(
        self, prompt: str | list[int], max_tokens: int | None = None, stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto", **options: Unpack[AnswerArguments],
    ) -> Generation:  # fmt: skip
        """Continue a prompt without a chat template.

        Returns an iterator over chunks of text, see Generation.

        stop: strings that end the answer. speculate: source of drafts: "auto", "mtp", "ngram", "off", "draft:PATH" or
        an open Model.

        options: sampling, such as temperature=0 or seed=1; on_overflow and keep, for a full context; one constraint,
        which the answer matches if its finish_reason is "stop": schema, a JSON schema (a dict, a string, or a type such
        as a pydantic class, a dataclass or list[int]; see Generation.parsed), grammar in GBNF, or regex; and the others
        of AnswerArguments.

        Raises ContextError if the prompt does not fit, UsageError for invalid arguments.
        """
        generation = gather_options(max_tokens, stop, options, self.resolve_drafter(speculate))
        return self._note(self.session.complete(prompt, generation), prompt, generation)

    def infill(
        self, prefix: str, suffix: str, max_tokens: int | None = None, stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto", files: Sequence[tuple[str, str]] = (),
        **options: Unpack[AnswerArguments],
    ) -> Generation:  # fmt: skip
        """Generate the text between a prefix and a suffix (fill-in-the-middle).

        files: (name, content) of other files of the repository, the most important last. Other arguments and errors as
        for `generate`; also raises UsageError for a model without fill-in-the-middle tokens.
        """
        from localllm.generation.infill import Infill

        generation = gather_options(max_tokens, stop, options, self.resolve_drafter(speculate))
        return self.session.complete(Infill(prefix, suffix, files or None).encode(self.session.tokenizer), generation)

    def chat(
        self, messages: Sequence[Message], max_tokens: int | None = None, stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto", **options: Unpack[ChatArguments],
    ) -> Generation:  # fmt: skip
        """Answer a conversation, such as [{"role": "user", "content": "Hi"}].

        Returns an iterator over chunks of text, see Generation.

        options: as for `generate`, and: think, "on", "off", "auto", or an effort, "low", "medium" or "high";
        think_budget, the maximum number of reasoning tokens, which are not part of the text (see Generation.parts and
        .thinking); template_variables, a dict for the chat template; continue_final, whether to continue the last
        message (None: if it is an assistant's without tool calls); tools, functions that the model may call, described
        by their signatures and docstrings (see Generation.calls, and `run_tools`, which calls them), with tool_choice.

        Other arguments and errors as for `generate`.
        """
        generation = gather_options(max_tokens, stop, options, self.resolve_drafter(speculate))
        return self._note(self.session.chat(messages, generation), messages, generation)

    def _note(self, answer: Generation, prompt: object, options: GenerationOptions) -> Generation:
        """Let an answer make its receipt."""
        if self.receipt_maker:
            answer.receipt_maker = partial(self.receipt_maker, self, prompt, options)
        return answer

    def achat(
        self, messages: Sequence[Message], max_tokens: int | None = None, stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto", **options: Unpack[ChatArguments],
    ) -> "AsyncGeneration[Generation]":  # fmt: skip
        """Answer a conversation like `chat`, for `async for`.

        Leaving the loop or cancelling the task ends the answer.
        """

        return AsyncGeneration(lambda: self.chat(messages, max_tokens, stop, speculate, **options))

    async def acomplete(
        self, prompt: Prompt, max_tokens: int | None = None, stop: Sequence[str] = (),
        speculate: "str | GenerationMixin" = "auto", **options: Unpack[ChatArguments],
    ) -> Generation:  # fmt: skip
        """Return the complete answer to messages, like `chat`, or the continuation of a prompt, like `generate`."""

        def begin() -> Generation:
            generation = gather_options(max_tokens, stop, options, self.resolve_drafter(speculate))
            if is_conversation(prompt):
                return self.session.chat(cast("list[Message]", prompt), generation)
            return self.session.complete(cast("str | list[int]", prompt), generation)

        return await AsyncGeneration(begin).complete()

    def run_tools(
        self, messages: Sequence[Message], tools: Sequence[Callable[..., object]], max_turns: int = 8,
        permission: Callable[["ToolCall"], bool] | None = None, max_tokens: int | None = None,
        **options: Unpack[CallArguments],
    ) -> "ToolRun":  # fmt: skip
        """Answer a conversation with tools: call functions and return their results until the model calls none.

        permission: returns whether a call may be performed. Exceptions of functions are reported to the model;
        asynchronous functions run in a new event loop. A tool_choice that requires a call holds for the first answer.
        Iterating raises LocalllmError after max_turns answers with calls.
        """
        from localllm.generation.tool_run import ToolRun

        return ToolRun(self._make_turn_starter(messages, tools, max_tokens, options), tools, max_turns, permission)

    def arun_tools(
        self, messages: Sequence[Message], tools: Sequence[Callable[..., object]], max_turns: int = 8,
        permission: Callable[["ToolCall"], bool] | None = None, max_tokens: int | None = None,
        **options: Unpack[CallArguments],
    ) -> "AsyncGeneration[ToolRun]":  # fmt: skip
        """Answer a conversation with tools like `run_tools`, for `async for`.

        Asynchronous functions run in the caller's event loop, others in threads. Leaving the loop or cancelling the
        task ends the answer, and cancels a running asynchronous function.
        """
        import asyncio  # 17 ms

        from localllm.generation.tool_run import ToolRun

        loop, begin = asyncio.get_running_loop(), self._make_turn_starter(messages, tools, max_tokens, options)
        return AsyncGeneration(lambda: ToolRun(begin, tools, max_turns, permission, loop))

    def _make_turn_starter(
        self, messages: Sequence[Message], tools: Sequence[Callable[..., object]], max_tokens: int | None,
        options: CallArguments,
    ) -> "Callable[[Sequence[Message]], Generation]":  # fmt: skip
        """Return a function that starts the next answer, after the messages that a run has added."""
        arguments: ChatArguments = {**options, "tools": tools}
        freely: ChatArguments = {**arguments, "tool_choice": "auto"}
        first, later = gather_options(max_tokens, (), arguments), gather_options(max_tokens, (), freely)
        return lambda new: self.session.chat([*messages, *new], later if new else first)

    def candidates(
        self, prompt: Prompt, n: int = 1, beams: int = 0, max_tokens: int | None = None, stop: Sequence[str] = (),
        length_penalty: float = 0.0, **options: Unpack[ChatArguments],
    ) -> "list[Answer]":  # fmt: skip
        """Return n answers, best first: sampled ones, or, with `beams`, the likeliest of a beam search.

        prompt: a string or token ids to continue, or messages to answer.  length_penalty: beams are ranked by their log
        probability divided by their number of tokens to this power: 0 by their probability, 1 by the mean of their
        tokens. Raises the errors of `generate`.
        """
        penalty = to_python_number(length_penalty)
        return self.session.candidates(prompt, gather_options(max_tokens, stop, options), n, beams, penalty)

    @overload
    def map(
        self, prompts: Iterable[Prompt], max_tokens: int | None = None, stop: Sequence[str] = (),
        parallel: int | None = None, precise: bool = True, errors: Literal["raise"] = "raise",
        per_prompt: Iterable[Mapping[str, Any]] | None = None, **options: Unpack[ChatArguments],
    ) -> Iterator[Completion]: ...  # fmt: skip

    @overload
    def map(
        self, prompts: Iterable[Prompt], max_tokens: int | None = None, stop: Sequence[str] = (),
        parallel: int | None = None, precise: bool = True, *, errors: Literal["return"],
        per_prompt: Iterable[Mapping[str, Any]] | None = None, **options: Unpack[ChatArguments],
    ) -> Iterator[Completion | LocalllmError]: ...  # fmt: skip

    def map(
        self, prompts: Iterable[Prompt], max_tokens: int | None = None, stop: Sequence[str] = (),
        parallel: int | None = None, precise: bool = True, errors: str = "raise",
        per_prompt: Iterable[Mapping[str, Any]] | None = None, **options: Unpack[ChatArguments],
    ) -> Iterator[Completion | LocalllmError]:  # fmt: skip
        """Answer many prompts in a batch, each as `generate` or `chat` would.

        Yields the answers in the order of the prompts, with the attributes of Completion, such as text and
        finish_reason.

        parallel: maximum number of concurrent answers; None: 16.
        precise: whether each answer is computed to the bit as if it were alone (exceptions: docs/map.md); False is
        faster, but some tokens differ.
        errors: "raise" the first error, or "return" each in place of its answer.
        per_prompt: options of each prompt, in their order, such as [{"seed": 1}, {"max_tokens": 5}], in place of those
        for all.
        """
        common = {"max_tokens": max_tokens, "stop": stop, **options}
        generation = make_options(common)
        if errors not in ("raise", "return"):
            raise UsageError(f"errors must be raise or return, not {errors!r}")
        parallel = None if parallel is None else require_integer("parallel", parallel, 1)
        prompts = require_iterable("prompts", prompts)
        if per_prompt is None:
            pairs: Iterator[tuple[Prompt, Callable[[], GenerationOptions]]] = (
                (prompt, lambda: generation) for prompt in prompts
            )
        else:
            pairs = pair_options(prompts, require_iterable("per_prompt", per_prompt), common)
        return self._map(pairs, parallel, precise, errors == "return")

    def _map(
        self, pairs: "Iterator[tuple[Prompt, Callable[[], GenerationOptions]]]", parallel: int | None, precise: bool,
        returns: bool,
    ) -> Iterator[Completion | LocalllmError]:  # fmt: skip
        """Yield the answers of `map`.

        pairs: each prompt, and a function that returns its options. returns: whether errors are yielded in place of
        answers.
        """
        results = dict[int, Completion | LocalllmError]()
        next_number = 0
        with closing(self.batch(self._create_requests(pairs, results, returns), parallel, precise)) as batch:
            for finished in batch:
                results |= {request.key: request.error or request.answers[0] for request in finished}
                while (answer := results.pop(next_number, None)) is not None:
                    if isinstance(answer, LocalllmError) and not returns:
                        raise answer
                    yield answer
                    next_number += 1
        yield from (results[number] for number in sorted(results))

    def _create_requests(
        self, pairs: "Iterator[tuple[Prompt, Callable[[], GenerationOptions]]]",
        failed: dict[int, Completion | LocalllmError], returns: bool,
    ) -> Iterator[Request]:  # fmt: skip
        """Yield a request for each prompt.

        failed: receives the errors of invalid prompts by index if `returns` is true; otherwise they are raised.
        """
        for number, (prompt, get_options) in enumerate(pairs):
            try:
                yield self.session.request(prompt, get_options(), key=number)
            except LocalllmError as error:
                if not returns:
                    raise
                failed[number] = error

    def choose(
        self, prompt: Prompt, choices: Sequence[str], precise: bool = True, **options: Unpack[AnswerArguments]
    ) -> "list[Choice]":
        """Return the choices with their exact probabilities as answers to a prompt, the likeliest first.

        Messages are answered without reasoning; a string or token ids are continued. The probability of a choice is the
        product of the probabilities of its tokens. After messages, if one choice is a prefix of another, the end of the
        answer counts, too.

        precise: whether a long prompt is prefilled with 16-bit activations; False: with 8 bits, as for an answer.
        Raises ContextError if a choice does not fit, and UsageError.
        """
        from localllm.generation.choices import rank_choices, require_choices, score_request

        request, tree = self._prepare_choices(require_choices(choices), options)(prompt)
        return rank_choices(choices, score_request(self.session.cache, self.session.tokenizer, request, tree, precise))

    def choose_many(
        self, prompts: Iterable[Prompt], choices: Sequence[str], precise: bool = True,
        **options: Unpack[AnswerArguments],
    ) -> "Iterator[list[Choice] | LocalllmError]":  # fmt: skip
        """Choose like `choose` for many prompts in a batch.

        Yields the choices of each prompt, or its error, in the order of the prompts.
        """
        return self.choose_adapted(((prompt, None) for prompt in prompts), choices, precise, **options)

    def choose_adapted(
        self, prompts: Iterable[tuple[Prompt, Mapping[str, float] | None]], choices: Sequence[str],
        precise: bool = True, **options: Unpack[AnswerArguments],
    ) -> "Iterator[list[Choice] | LocalllmError]":  # fmt: skip
        """Choose like `choose_many`, with adapters that differ from prompt to prompt.

        prompts: each with the scales of its adapters; None: those of the options.
        """
        from localllm.generation.choices import PARALLEL, BatchScorer, rank_choices, require_choices

        prepare = self._prepare_choices(require_choices(choices), options)
        scores = BatchScorer[Any](self.session.cache.engine, lambda prompt: prepare(*prompt), precise)
        with closing(self.batch(scores.create_requests(prompts), PARALLEL, precise)) as batch:
            for result in scores.collect_results(batch):
                yield result if isinstance(result, LocalllmError) else rank_choices(choices, result)

    def _prepare_choices(
        self, texts: Sequence[str], options: AnswerArguments
    ) -> "Callable[..., tuple[Request, TokenTrie]]":
        """Return a function that converts a prompt, and adapter scales, to a request and the texts to score."""
        arguments: AnswerArguments = {"think": "off", **options}
        generation = gather_options(None, (), arguments)
        with_end = any(text.startswith(longer) for text in texts for longer in texts if text is not longer)

        @cache
        def build_tree(is_chat: bool) -> "TokenTrie":
            return self.session.build_trie(texts, is_chat, with_end)

        def prepare(prompt: Prompt, lora: Mapping[str, float] | None = None) -> "tuple[Request, TokenTrie]":
            chosen = generation if lora is None else replace(generation, lora=lora)
            return self.session.request(prompt, chosen), build_tree(is_conversation(prompt))

        return prepare

    def score(self, prompt: Prompt, text: str, precise: bool = True, **options: Unpack[AnswerArguments]) -> "Score":
        """Return the log probability of a continuation, and of each of its tokens.

        After messages, the end of the answer counts as one more token. precise: see `choose`. Raises ContextError and
        UsageError.
        """
        from localllm.generation.choices import Score, score_request

        arguments: AnswerArguments = {"think": "off", **options}
        request = self.session.request(prompt, gather_options(None, (), arguments))
        tree = self.session.build_trie([require_string("text", text)], is_conversation(prompt), with_end=True)
        (tokens,) = score_request(self.session.cache, self.session.tokenizer, request, tree, precise)
        return Score(sum(token.logprob for token in tokens), tokens)

    def count_tokens(self, prompt: Prompt, **options: Unpack[ChatArguments]) -> int:
        """Return the number of tokens of a string, or of a conversation with what the chat template adds."""
        return len(self.session.request(prompt, gather_options(None, (), options)).prompt)


Iterated = TypeVar("Iterated", bound="Generation | ToolRun")


class AsyncGeneration(Generic[Iterated]):
    """An answer in progress for `async for`, which yields chunks of text.

    It has the attributes of the answer. Leaving the loop or cancelling the task ends the answer before the model's next
    step.
    """

    def __init__(self, begin: Callable[[], Iterated]):
        """Store `begin`, which starts the answer in a thread, since templates and vocabularies take time to load."""
        self._begin: Callable[[], Iterated] | None = begin
        self._generation: Iterated | None = None

    @property
    def generation(self) -> Iterated | None:
        """The answer; None until the first chunk is requested."""
        return self._generation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._generation is None:
            advice = "iterate over it with `async for`, or await complete()"
            raise AttributeError(f"the answer has no {name!r} before generation starts: {advice}", name=name, obj=self)
        return getattr(self._generation, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Return the next chunk of text. Raises the errors of Generation, and StopAsyncIteration at the end."""
        import asyncio  # 17 ms

        try:
            chunk = await asyncio.to_thread(self._read_next)
        except asyncio.CancelledError:
            self.stop()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def _read_next(self) -> str | None:
        """Return the next chunk of text; None at the end. Runs in a thread."""
        if self._begin:
            begin, self._begin = self._begin, None
            self._generation = begin()
        return next(self._generation, None) if self._generation else None

    async def complete(self) -> Iterated:
        """Generate the rest and return the finished answer."""
        async for _ in self:
            pass
        assert self._generation
        return self._generation

    def stop(self) -> None:
        """End the answer before the model's next step."""
        self._begin = None
        if self._generation:
            self._generation.stop()

    async def aclose(self) -> None:
        """Stop the answer, and release its sequence for other answers."""
        import asyncio  # 17 ms

        self.stop()
        if self._generation:
            await asyncio.to_thread(self._generation.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and deepcopy the answer so far as plain data. Raises TypeError if it has not begun."""
        if self._generation is None:
            raise TypeError("an answer that has not begun cannot be copied or pickled: await complete() first")
        return self._generation.__reduce__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
