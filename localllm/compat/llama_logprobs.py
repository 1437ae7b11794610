"""Log probabilities in the layouts of OpenAI's completions and chat completions, as llama-cpp-python returns them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

from localllm.generation.logprobs import LikelyToken, TokenLogprob

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


class CompletionLogprobs(TypedDict):
    """Lists with an item for each token, as in OpenAI's completions."""

    tokens: list[str]
    text_offset: list[int]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


def token_text(token: int, tokenizer: "Tokenizer") -> str:
    """Return a token's text, without bytes of incomplete characters."""
    return tokenizer.token_bytes(token).decode(errors="ignore") if token < tokenizer.vocab_size else ""


def completion_logprobs(tokens: Iterable[LikelyToken], tokenizer: "Tokenizer", offset: int) -> CompletionLogprobs:
    """Return the log probabilities of a completion; offset: characters in front of the first token."""
    lists: CompletionLogprobs = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for token, likeliest in tokens:
        text = token_text(token.token, tokenizer)
        lists["tokens"].append(text)
        lists["text_offset"].append(offset)
        lists["token_logprobs"].append(token.logprob)
        best = {token_text(alternative.token, tokenizer): alternative.logprob for alternative in reversed(likeliest)}
        lists["top_logprobs"].append({**dict(reversed(best.items())), text: token.logprob})
        offset += len(text)
    return lists


def chat_logprobs(tokens: Iterable[LikelyToken], tokenizer: "Tokenizer") -> dict[str, object]:
    """Return the log probabilities of a chat completion's content."""

    def show(token: TokenLogprob) -> dict[str, object]:
        data = tokenizer.token_bytes(token.token) if token.token < tokenizer.vocab_size else b""
        return {"token": data.decode(errors="ignore"), "bytes": [*data], "logprob": token.logprob}

    content = [
        {**show(drawn), "top_logprobs": [show(alternative) for alternative in likeliest]} for drawn, likeliest in tokens
    ]
    return {"content": content, "refusal": None}
