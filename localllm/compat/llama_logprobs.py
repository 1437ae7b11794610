"""Log probabilities in the forms of OpenAI's two interfaces, as llama-cpp-python gives them."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from localllm.generation.logprobs import LikelyToken, TokenLogprob, token_logprobs

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.text.tokenizer import Tokenizer

CHUNK = 256  # tokens of a prompt whose logits are in memory at once


def token_text(token: int, tokenizer: "Tokenizer") -> str:
    """Return a token's text, without bytes that are a part of a character."""
    return tokenizer.token_bytes(token).decode(errors="ignore") if token < tokenizer.vocab_size else ""


def prompt_logprobs(model: "Model", ids: Sequence[int], count: int) -> list[LikelyToken]:
    """Return the log probabilities of a prompt's tokens but the first, each with the `count` likeliest."""
    found, read = list[LikelyToken](), ids[:-1]
    with closing(model.sequence()) as sequence:
        for begin in range(0, len(read), CHUNK):
            rows = sequence.append(read[begin : begin + CHUNK], "all")
            following = ids[begin + 1 : begin + 1 + len(rows)]
            found += [token_logprobs(row, token, count) for row, token in zip(rows, following, strict=True)]
    return found


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
