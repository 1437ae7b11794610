"""llama-cpp-python's text completions, as dicts in OpenAI's format."""

from collections.abc import Iterable, Iterator
from time import time
from typing import TYPE_CHECKING, TypedDict
from uuid import uuid4

from localllm.compat.llama_arguments import CompletionArguments, build_answer_options, get_length_options, warn
from localllm.errors import UsageError
from localllm.generation.infill import Infill
from localllm.generation.logprobs import LikelyToken, TokenLogprob, compute_prompt_logprobs
from localllm.generation.model_methods import count_alternatives

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.scheduler import Generation
    from localllm.text.tokenizer import Tokenizer


class CompletionLogprobs(TypedDict):
    """Log probabilities as in OpenAI's completions; each list has one item per token."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


def decode_token(token: int, tokenizer: "Tokenizer") -> str:
    """Return a token's text, without the bytes of incomplete characters."""
    return tokenizer.token_bytes(token).decode(errors="ignore") if token < tokenizer.vocab_size else ""


def format_completion_logprobs(
    tokens: Iterable[LikelyToken], tokenizer: "Tokenizer", offset: int
) -> CompletionLogprobs:
    """Return the log probabilities of a completion; offset: characters before the first token."""
    lists: CompletionLogprobs = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for token, likeliest in tokens:
        text = decode_token(token.token, tokenizer)
        lists["tokens"].append(text)
        lists["text_offset"].append(offset)
        lists["token_logprobs"].append(token.logprob)
        best = {decode_token(alternative.token, tokenizer): alternative.logprob for alternative in reversed(likeliest)}
        lists["top_logprobs"].append({**dict(reversed(best.items())), text: token.logprob})
        offset += len(text)
    return lists


def format_chat_logprobs(tokens: Iterable[LikelyToken], tokenizer: "Tokenizer") -> dict[str, object]:
    """Return the log probabilities of a chat completion's content."""

    def format_token(token: TokenLogprob) -> dict[str, object]:
        data = tokenizer.token_bytes(token.token) if token.token < tokenizer.vocab_size else b""
        return {"token": data.decode(errors="ignore"), "bytes": [*data], "logprob": token.logprob}

    content = [
        {**format_token(drawn), "top_logprobs": [format_token(alternative) for alternative in likeliest]}
        for drawn, likeliest in tokens
    ]
    return {"content": content, "refusal": None}


def make_head(kind: str, prefix: str, model: str) -> dict[str, object]:
    """Return the first fields of a response."""
    return {"id": f"{prefix}-{uuid4()}", "object": kind, "created": int(time()), "model": model}


def count_usage(answer: "Generation") -> dict[str, int]:
    """Count the tokens of a prompt and its answer."""
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class TextCompletion:
    """A completion of llama-cpp-python's form, generated as it is iterated."""

    def __init__(
        self, model: "Model", arguments: CompletionArguments, name: str, last_n: int, seed: int | None
    ) -> None:
        """Start a completion. Raises ContextError, UsageError.

        name: of the model, for responses.  last_n, seed: see build_answer_options.
        """
        count = arguments.logprobs
        count = int(count) if isinstance(count, bool) else count
        self.model, self.arguments, self.logprobs = model, arguments, count_alternatives(count, None)
        max_tokens, stop = get_length_options(arguments)
        if stop and arguments.grammar is not None:
            warn("stop is ignored: grammar determines the end of the answer")
        if arguments.echo and arguments.stream:
            warn("echo is ignored with stream, as in llama-cpp-python")
        self.ids = encode_prompt(model, arguments)
        self.head = make_head("text_completion", "cmpl", name)
        options = build_answer_options(arguments, last_n, seed)
        options["top_logprobs"] = self.logprobs
        self.answer = model.generate(self.ids, max_tokens, stop, **options)

    @property
    def prompt(self) -> str:
        """The prompt as a string."""
        prompt = self.arguments.prompt
        return prompt if isinstance(prompt, str) else self.model.detokenize(prompt)

    def generate_response(self) -> dict[str, object]:
        """Generate the complete answer; return the response."""
        text = "".join(self.answer)
        choice = {
            "text": self.prompt + text if self.arguments.echo else text,
            "index": 0,
            "logprobs": None if self.logprobs is None else self._format_logprobs(self.logprobs),
            "finish_reason": self.answer.finish_reason,
        }
        return {**self.head, "choices": [choice], "usage": count_usage(self.answer)}

    def _format_logprobs(self, count: int) -> CompletionLogprobs:
        """Return the log probabilities of the answer, after those of the prompt if it is echoed."""
        tokenizer = self.model.tokenizer
        if not self.arguments.echo:
            return format_completion_logprobs(self.answer.logprobs, tokenizer, len(self.prompt))
        shown_ids = self.ids[self.ids[:1] == [tokenizer.bos_id] :]
        tokens = [*compute_prompt_logprobs(self.model.sequence(), self.ids, count)[0], *self.answer.logprobs]
        if len(shown_ids) == len(self.ids):  # no token precedes the first one
            tokens = [LikelyToken(TokenLogprob(shown_ids[0], 0.0), ()), *tokens]
        lists = format_completion_logprobs(tokens, tokenizer, 0)
        if tokens:
            lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        return lists

    def stream(self) -> Iterator[dict[str, object]]:
        """Yield the response as chunks; closing the iterator ends the answer."""
        tokens_sent, offset = 0, len(self.prompt)

        def format_chunk(text: str, reason: str | None, tokens: list[LikelyToken]) -> dict[str, object]:
            lists = format_completion_logprobs(tokens, self.model.tokenizer, offset) if tokens else None
            choice = {"text": text, "index": 0, "logprobs": lists, "finish_reason": reason}
            return {**self.head, "choices": [choice]}

        try:
            for text in self.answer:
                tokens = self.answer.logprobs[tokens_sent:] if self.logprobs is not None else []
                yield format_chunk(text, None, tokens)
                tokens_sent, offset = tokens_sent + len(tokens), offset + len(text)
            remaining = self.answer.logprobs[tokens_sent:] if self.logprobs is not None else []
            yield format_chunk("", self.answer.finish_reason, remaining)
        finally:
            self.answer.close()


def encode_prompt(model: "Model", arguments: CompletionArguments) -> list[int]:
    """Return the token ids of a prompt. Raises UsageError."""
    prompt, tokenizer = arguments.prompt, model.tokenizer
    if arguments.suffix is not None:
        if not isinstance(prompt, str):
            raise UsageError("suffix: the prompt must be a string, not token ids")
        return Infill(prompt, arguments.suffix).encode(tokenizer)
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    ids = tokenizer.encode(prompt, special=True, bos=True)
    return ids if ids or tokenizer.bos_id is None else [tokenizer.bos_id]
