"""Log probabilities in the forms of OpenAI's two interfaces, as llama-cpp-python gives them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from localllm.generation.logprobs import LikelyToken, TokenLogprob

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


def token_text(token: int, tokenizer: "Tokenizer") -> str:
    """Return a token's text, without bytes that are a part of a character."""
    return tokenizer.token_bytes(token).decode(errors="ignore") if token < tokenizer.vocab_size else ""


def completion_logprobs(tokens: Iterable[LikelyToken], tokenizer: "Tokenizer", offset: int) -> dict[str, Any]:
    """Return the lists of a completion; offset: characters in front of the first token."""
    lists: dict[str, Any] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for chosen, likeliest in tokens:
        text = token_text(chosen.token, tokenizer)
        lists["tokens"].append(text)
        lists["text_offset"].append(offset)
        lists["token_logprobs"].append(chosen.logprob)
        best = {token_text(other.token, tokenizer): other.logprob for other in reversed(likeliest)}
        lists["top_logprobs"].append({**dict(reversed(best.items())), text: chosen.logprob})
        offset += len(text)
    return lists


def chat_logprobs(tokens: Iterable[LikelyToken], tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return the log probabilities of a chat's answer."""

    def show(token: TokenLogprob) -> dict[str, Any]:
        data = tokenizer.token_bytes(token.token) if token.token < tokenizer.vocab_size else b""
        return {"token": data.decode(errors="ignore"), "bytes": [*data], "logprob": token.logprob}

    content = [{**show(chosen), "top_logprobs": [show(other) for other in likeliest]} for chosen, likeliest in tokens]
    return {"content": content, "refusal": None}
