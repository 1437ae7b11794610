"""Hold a conversation with a local model: prompts, answers, and the policy for a long history."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from localllm.errors import UsageError
from localllm.generation.context_overflow import SINK_TOKENS
from localllm.generation.conversation import (
    AnswerDefaults,
    ChatFormat,
    Conversation,
    PartialAnswer,
    find_partial_answer,
    has_calls,
    is_conversation,
    is_instruction,
    refuse_image,
    render_partial_answer,
    report_long_prompts,
)
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache, count_common
from localllm.generation.reasoning import TagFormat, Thinking, make_template_variables
from localllm.generation.request import PromptTask, Request
from localllm.generation.sampling.sampler import Sampler
from localllm.generation.scheduler import Generation
from localllm.images.parts import extract_images
from localllm.text.messages import Message, require_messages, validate_messages
from localllm.text.tokenizer import StreamDecoder, Tokenizer
from localllm.values import require_string, to_token_ids

if TYPE_CHECKING:
    from localllm.engine.image_tokens import ImageEmbedding
    from localllm.generation.beam_search import Answer
    from localllm.generation.choices import TokenTrie
    from localllm.generation.image_encoder import EncodedImage
    from localllm.generation.reasoning import ThinkingFormat
    from localllm.generation.tool_run import Permission, ToolRun
    from localllm.text.templates import ChatTemplate


TOOL_USE = "tool_use"  # name of a file's chat template for conversations with tools


class EncodedPrompt(NamedTuple):
    """The token ids of a prompt, with its images and the partial answer at its end.

    Attributes:
        seen: embeddings of the images, referenced so that the engine keeps their ids.
        begun: the partial answer that the answer continues, or None.
    """

    ids: list[int]
    seen: "Sequence[ImageEmbedding]" = ()
    begun: PartialAnswer | None = None


class Session(Conversation[Generation]):
    """A conversation with a local model, and the methods that answer single prompts.

    Not thread-safe.

    Attributes:
        template_choice: name or source of the chat template; None: the file's.
    """

    def __init__(
        self, cache: PrefixCache, tokenizer: Tokenizer, chat_template: str | None = None,
        defaults: AnswerDefaults | None = None,
    ):  # fmt: skip
        """Set up a session.

        chat_template: choice of the template, see ChatTemplate.from_tokenizer. defaults: values of options that
        requests leave unset. Set `encode_image` to accept images, and `on_warning` to receive warnings about the
        template.
        """
        super().__init__()
        self.cache, self.tokenizer, self.template_choice = cache, tokenizer, chat_template
        self.encode_image: Callable[[object], EncodedImage] = refuse_image
        self.defaults = defaults or AnswerDefaults()
        self.on_warning: Callable[[str], object] = str  # called with a line about the chat template

    def resume(self, options: GenerationOptions | None = None) -> Generation:
        """Continue the latest answer.

        Raises UsageError without an answer, or if it has a constraint or tool calls, and ContextError if the context is
        full.
        """
        options, latest, history = self.with_defaults(options), self._answer, self._stop()
        if not history or history[-1]["role"] != "assistant":
            raise UsageError("there is no answer to continue: ask a question first")
        if options.constraint:
            raise UsageError(f"an answer with a {options.constraint.kind} cannot be continued")
        if history[-1].get("tool_calls"):
            raise UsageError("an answer with a tool call cannot be continued")
        final_answer = PartialAnswer(history[-1]["content"], history[-1].get("reasoning_content", ""))
        if options.on_overflow == "shift" and options.keep is None:
            options = replace(
                options, keep=self._count_shared_prefix(self.defaults.build_head(self._build_system()), options)
            )
        if latest and latest.tokens and self._is_exact_text(latest):
            prompt, is_thought = [*latest.prompt, *latest.tokens], not final_answer.text and bool(final_answer.thinking)
            images = latest.seen
        else:
            prompt, images, partial_answer = self._encode_conversation(
                [*self.defaults.build_head(self._build_system()), *history], replace(options, continue_final=True)
            )
            is_thought = partial_answer is not None and not partial_answer.text
        thinking = Thinking.detect(self._get_format(options).thoughts, self.tokenizer, prompt, None).start_inside()
        decoder, generation = self.tokenizer.stream(continued=True), self._add_stops(options)
        task = PromptTask(
            prompt, decoder, generation, thinking if is_thought else Thinking(), self.earlier, seen=images
        )
        answer = Generation(self.cache, self.tokenizer, task)
        self._history, self._answer, self._earlier_part, self.forgotten = history[:-1], answer, final_answer, 0
        return answer

    def park(self) -> None:
        self.cache.park()

    def leave(self) -> None:
        self.cache.write_conversation()

    @property
    def warning(self) -> str | None:
        return self.template.warning

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))

    def _is_exact_text(self, answer: Generation) -> bool:
        """Return whether an answer's tokens decode to exactly its text, with no stop string after it."""
        return bool(answer.thinking) or self.tokenizer.decode(answer.tokens) == answer.text

    def chat(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> Generation:
        """Answer a conversation without adding it to this one.

        Raises ContextError if it does not fit the context.
        """
        options, messages = options or GenerationOptions(), require_messages(messages)
        first = sum(map(is_instruction, messages[:1]))
        return self._start_answer(messages[:first], messages[first:], options, is_own=False)[1]

    def run_tools(
        self, text: str, tools: Sequence[Callable[..., object]], options: GenerationOptions | None = None,
        max_turns: int = 8, permission: "Permission | None" = None,
    ) -> "ToolRun":  # fmt: skip
        """Ask a question in this conversation and let the model call tools; see GenerationMixin.run_tools."""
        from localllm.generation.tool_run import ToolRun
        from localllm.generation.tools.python_tools import make_tool_use

        generation = replace(options or GenerationOptions(), tools=make_tool_use(tools))

        def reply(messages: Sequence[Message]) -> Generation:
            latest = next((place for place in reversed(range(len(messages))) if messages[place]["role"] != "tool"), -1)
            return self.continue_with(messages[latest + 1 :], generation) if messages else self.ask(text, generation)

        return ToolRun(reply, tools, max_turns, permission)

    def complete(self, prompt: str | list[int], options: GenerationOptions | None = None) -> Generation:
        """Continue a string, or token ids, without a chat template."""
        task = PromptTask(self._get_ids(prompt), self.tokenizer.stream(continued=True), self.with_defaults(options))
        return Generation(self.cache, self.tokenizer, task)

    def candidates(
        self, prompt: "str | list[int] | Sequence[Message]", options: GenerationOptions | None = None, n: int = 1,
        beams: int = 0, length_penalty: float = 0.0,
    ) -> "list[Answer]":  # fmt: skip
        """Return the n best of several answers to a conversation, or of several continuations of a prompt."""
        from localllm.generation.beam_search import generate_answers

        return generate_answers(
            self.cache, self.tokenizer, self._prepare_task(prompt, options), n, beams, length_penalty
        )

    def request(
        self, prompt: "str | list[int] | Sequence[Message]", options: GenerationOptions | None = None, n: int = 1,
        key: object = None,
    ) -> Request:  # fmt: skip
        """Return a request for a Scheduler.

        key: the caller's name for it.
        """
        return Request(self._prepare_task(prompt, options), n, key)

    def build_trie(self, texts: Sequence[str], is_chat: bool, with_end: bool) -> "TokenTrie":
        """Return the trie of texts to score after a prompt.

        is_chat: whether they are answers to messages. with_end: whether an end token must follow each answer.
        """
        from localllm.generation.choices import TokenTrie

        encode = self.tokenizer.encode if is_chat else self.tokenizer.encode_inside
        return TokenTrie([encode(text) for text in texts], self.tokenizer.end_ids if is_chat and with_end else ())

    def validate_combination(self, options: GenerationOptions) -> None:
        """Raise UsageError for sampling options that this model does not accept."""
        Sampler(self.with_defaults(options).sampling, self.tokenizer.vocab_size, self.tokenizer)

    @property
    def is_single_turn(self) -> bool:
        """Return whether the model is an encoder-decoder, which answers single questions only."""
        return self.cache.engine.hyperparameters.start_token is not None

    def require_conversation(self) -> None:
        """Raise UsageError for a model without a chat format."""
        if self.is_single_turn:
            arch = self.cache.engine.hyperparameters.arch
            raise UsageError(f"{arch} models have no chat format: use localllm run")

    def _prepare_task(
        self, prompt: "str | list[int] | Sequence[Message]", options: GenerationOptions | None
    ) -> PromptTask:
        """Return the task of answering a prompt or conversation outside of this session's history."""
        is_chat = is_conversation(prompt)
        if is_chat and isinstance(prompt[-1], Mapping) and isinstance(prompt[0], str | list):
            raise UsageError("a prompt cannot have options beside it: give them as per_prompt=[{...}, ...]")
        if options and options.on_overflow not in (None, "error"):
            raise UsageError(f"several answers cannot be combined with on_overflow={options.on_overflow}")
        generation = self.with_defaults(options)
        decoder = self._create_decoder(generation) if is_chat else self.tokenizer.stream(continued=True)
        if not is_chat:
            return PromptTask(self._get_ids(prompt), decoder, generation)  # type: ignore[arg-type]
        messages = self.defaults.build_conversation(prompt)  # type: ignore[arg-type]
        return self._create_task(self._encode_conversation(messages, generation), generation, decoder)

    def _encode_conversation(self, messages: Sequence[Message], options: GenerationOptions) -> EncodedPrompt:
        """Encode a conversation with images, tool calls and results, and the tools of the options."""
        use = options.tools
        messages, images = extract_images(messages)
        messages = validate_messages(messages)
        if not (use and use.tools) and not any(has_calls(message) for message in messages):
            return self._encode(messages, images, options)
        from localllm.generation.tools.tool_messages import convert_calls, escape_results

        format = self._get_format(options)
        converted = convert_calls(escape_results(messages, format.result_marks), format.calls, use)
        # `convert_calls` may have turned calls into text.
        if find_partial_answer(messages, options.continue_final, None) is None:
            options = replace(options, continue_final=False)
        if format.calls.is_known and use and use.callable:
            variables = {**options.template_variables, "tools": [tool.to_json_schema() for tool in use.callable]}
            options = replace(options, template_variables=variables)
        return self._encode(converted, images, options)

    def _create_task(
        self, prompt: EncodedPrompt, options: GenerationOptions, decoder: StreamDecoder, earlier_tokens: int = 0
    ) -> PromptTask:
        """Return the task of answering an encoded conversation."""
        (ids, thinking), partial_text = self._apply_thinking(prompt.ids, options), ""
        if prompt.begun:
            ids, partial_text, decoder = prompt.ids, prompt.begun.text, self.tokenizer.stream(continued=True)
            thinking = Thinking() if partial_text else thinking.start_inside()
        calls, use = None, options.tools
        if use and use.callable:
            from localllm.generation.tools.tool_messages import prepare_calls

            calls, thinking = prepare_calls(use, self._get_format(options).calls, self.tokenizer, thinking)
        return PromptTask(
            ids, decoder, self._add_stops(options), thinking, earlier_tokens, calls, prompt.seen, partial_text
        )

    def _get_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt. Raises UsageError for a value of another type."""
        start = self.cache.engine.hyperparameters.start_token
        if isinstance(prompt, str) and start is not None:
            return [*self.tokenizer.encode(prompt, bos=True, eos=True), start]
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special=True, bos=True)
        if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not isinstance(prompt, Iterable):
            require_string("the prompt", prompt)
        ids = [*prompt]
        if any(isinstance(each, str | list | tuple) for each in ids):
            raise UsageError("a prompt's token ids must be a list of integers; `map` takes several prompts")
        if any(isinstance(each, Mapping) for each in ids):
            raise UsageError("a prompt must be a string or token ids: `chat` takes messages")
        return to_token_ids(ids)

    def encode_chat(self, messages: Sequence[Message], options: GenerationOptions | None = None) -> list[int]:
        """Return the token ids of a conversation up to where the answer begins or continues.

        options: template variables and others. Control tokens in messages are encoded as plain text, since only the
        template writes control tokens. Raises UsageError for invalid messages.
        """
        messages, images = extract_images(messages)
        return self._encode(validate_messages(messages), images, options).ids

    def _encode(
        self, messages: Sequence[Message], images: Sequence[object], options: GenerationOptions | None
    ) -> EncodedPrompt:
        """Encode valid messages that contain an IMAGE character for each image."""
        self.require_conversation()
        generation = options or GenerationOptions()
        format = self._get_format(generation)
        answer = find_partial_answer(messages, generation.continue_final, format.thoughts)
        is_thought = answer is not None and bool(answer.thinking) and not answer.text
        variables = make_template_variables(
            format.template.source, "on" if is_thought else generation.think, generation.think_budget
        )
        variables |= generation.template_variables
        marks = (format.thoughts.opens, format.thoughts.closes) if isinstance(format.thoughts, TagFormat) else None

        def render(messages: Sequence[Message], **fields: object) -> str:
            return self.tokenizer.markers.render(format.template, messages, marks, **{**variables, **fields})

        with report_long_prompts(messages, self.tokenizer, self.cache.engine.context):
            partial_prompt = answer and self._render_partial(render, messages, answer, format.thoughts)
            text, rest_ids = partial_prompt or (render(messages), ())
        encoded = [self.encode_image(image) for image in images]
        ids = self.tokenizer.encode_rendered(text, [image.ids for image in encoded])
        embeddings = [embedding for image in encoded for embedding in image.seen]
        return EncodedPrompt([*ids, *rest_ids], embeddings, answer if answer and any(answer) else None)

    def _render_partial(
        self, render: Callable[..., str], messages: Sequence[Message], answer: PartialAnswer,
        format: "ThinkingFormat | None",
    ) -> tuple[str, Sequence[int]]:  # fmt: skip
        """Return the text of a conversation up to where its last answer continues, and tokens to append.

        The tokens repeat reasoning that the template drops from answers; they follow the generation prompt.
        """
        encode = self.tokenizer.encode
        rendered = (
            render_partial_answer(partial(render, add_generation_prompt=False), messages, answer)
            if answer.text
            else None
        )
        if rendered and rendered[1]:
            return rendered[0], ()
        text = render(messages[:-1])
        is_open = format is not None and text.rstrip().endswith(format.opens)
        if answer.text:
            if rendered and not is_open:
                return rendered[0], ()
            closed = [*encode(answer.thinking), *encode(format.closing, special=True)] if format and is_open else []
            return text, [*closed, *encode(answer.text)]
        if format is None or not answer.thinking:
            return text, ()
        opening = "" if is_open else format.opens + "\n" * isinstance(format, TagFormat)
        return text, [*encode(opening, special=True), *encode(answer.thinking)]

    def _apply_thinking(self, prompt: list[int], options: GenerationOptions) -> tuple[list[int], Thinking]:
        """Return the tokens of a conversation and the marks of its reasoning; think "off" closes open reasoning."""
        budget = 0 if options.think == "off" else options.think_budget
        thinking = Thinking.detect(self._get_format(options).thoughts, self.tokenizer, prompt, budget)
        if options.think == "off" and thinking.is_open:
            return [*prompt, *thinking.closing], replace(thinking, is_open=False)
        return prompt, thinking

    @cached_property
    def template(self) -> "ChatTemplate":
        """The chat template. Raises UsageError if the chosen template does not exist."""
        from localllm.text.templates import ChatTemplate  # Jinja takes 40 ms to import

        template = ChatTemplate.from_tokenizer(self.tokenizer, self.template_choice)
        if template.warning:
            self.on_warning(template.warning)
        return template

    @cached_property
    def _formats(self) -> tuple[ChatFormat, ChatFormat]:
        """The chat formats without and with tools.

        Like transformers and llama.cpp, a file's separate template for tools is used, unless a template was chosen.
        """
        plain, tokenizer = ChatFormat(self.template, self.tokenizer), self.tokenizer
        if self.template_choice is not None or tokenizer.chat_templates.get(TOOL_USE) in (None, self.template.source):
            return plain, plain
        return plain, ChatFormat(type(self.template).from_tokenizer(tokenizer, TOOL_USE), tokenizer)

    def _get_format(self, options: GenerationOptions) -> ChatFormat:
        return self._formats[bool(options.tools and options.tools.callable)]

    def _start_answer(
        self, system: list[Message], history: list[Message], options: GenerationOptions, is_own: bool
    ) -> tuple[list[Message], Generation]:
        """Start an answer; see Conversation._start_answer."""
        system, options = self.defaults.build_head(system), self.with_defaults(options)
        on_overflow = options.on_overflow or ("drop-turns" if is_own else None)
        if on_overflow == "drop-turns":
            history_left, prompt = self._fit_history(system, history, options)
        else:
            history_left, prompt = history, self._encode_conversation(system + history, options)
        if on_overflow == "shift" and options.keep is None:
            options = replace(options, keep=self._count_shared_prefix(system, options))
        task = self._create_task(prompt, options, self._create_decoder(options), self.earlier if is_own else 0)
        answer = Generation(self.cache, self.tokenizer, task)
        self.forgotten = sum(message["role"] == "user" for message in history[: len(history) - len(history_left)])
        return history_left, answer

    def _count_shared_prefix(self, system: list[Message], options: GenerationOptions) -> int:
        """Return how many tokens all conversations with this system message share, at least SINK_TOKENS."""
        first, second = (
            self._encode_conversation([*system, {"role": "user", "content": text}], options).ids for text in ("a", "b")
        )
        return max(count_common(first, second), SINK_TOKENS)

    def _create_decoder(self, options: GenerationOptions) -> StreamDecoder:
        """Return the decoder of an answer, which keeps a space at its beginning if there is a constraint."""
        return self.tokenizer.stream(continued=options.constraint is not None)

    def with_defaults(self, options: GenerationOptions | None) -> GenerationOptions:
        """Return the options, with the model's defaults and recommended sampling in place of unset ones."""
        return self.defaults.complete(options)

    def _add_stops(self, options: GenerationOptions) -> GenerationOptions:
        """Return the options with the stop strings of the template, unless there is a constraint."""
        stops = self._get_format(options).template.stops
        return options if options.constraint or not stops else replace(options, stop=(*options.stop, *stops))

    def _fit_history(
        self, system: list[Message], history: list[Message], options: GenerationOptions
    ) -> tuple[list[Message], EncodedPrompt]:
        """Return the turns of the history that fit together with an answer, and their tokens.

        A history is too long if it leaves less room for the answer than an eighth of the context and less than its
        limit. Then the oldest turns are dropped until the rest fits into half of the context, because the rest has to
        be prefilled again, which should not happen at every turn.
        """
        context = self.cache.context
        answer_room = min(context // 8, context if options.max_tokens is None else options.max_tokens)
        prompt = self._encode_conversation(system + history, options)
        turns = [index for index, message in enumerate(history) if message["role"] == "user"]
        if len(prompt.ids) + answer_room <= context or not turns:
            return history, prompt

        def fits(turn: int) -> bool:
            return len(self._encode_conversation(system + history[turns[turn] :], options).ids) <= context // 2

        first = bisect_left(range(len(turns) - 1), True, key=fits)  # at least the last turn stays
        history_left = history[turns[first] :]
        return history_left, self._encode_conversation(system + history_left, options)
