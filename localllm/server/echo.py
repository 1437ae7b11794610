"""`echo` of /v1/completions: the prompt in front of the completion, with its log probabilities.

Programs that measure models (lm-evaluation-harness) score texts by it: the prompt is all that they ask about.
"""

import asyncio
from typing import TYPE_CHECKING

from localllm.frozen import frozen
from localllm.generation.logprobs import LikelyToken, TokenLogprob, prompt_logprobs, token_logprobs

if TYPE_CHECKING:
    from localllm.server.service import ResponseStream


@frozen
class EchoedPrompt:
    """A prompt as a response repeats it.

    Attributes:
        text: the prompt; control tokens of token ids, too.
        tokens: what was read of it, without a token in front of a text that the vocabulary begins with.
        has_first: whether the first of them has no predecessor, and so no probability.
        end: the likeliest end token after it, None if no log probabilities are wanted.
    """

    text: str = ""
    tokens: tuple[LikelyToken, ...] = ()
    has_first: bool = False
    end: LikelyToken | None = None


async def echo_prompts(stream: "ResponseStream", top_logprobs: int | None) -> list[EchoedPrompt]:
    """Return the prompts of a request; top_logprobs: alternatives for each token, None for no log probabilities.

    Reads each prompt once more, in short runs, whose activations keep 16 bits. Raises as Sequence.append.
    """
    tokenizer, prompts = stream.model.tokenizer, list[EchoedPrompt]()
    for prompt, ids in stream.prompts():
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids, special=True)
        if top_logprobs is None:
            prompts.append(EchoedPrompt(text))
            continue
        tokens, row = await asyncio.to_thread(prompt_logprobs, stream.model.sequence(), ids, top_logprobs)
        has_bos = isinstance(prompt, str) and ids[:1] == [tokenizer.bos_id]
        first = [] if has_bos or not ids else [LikelyToken(TokenLogprob(ids[0], 0.0), ())]
        end = max(tokenizer.end_ids, key=row.__getitem__, default=None) if len(row) else None
        told = None if end is None else token_logprobs(row, end, top_logprobs)
        prompts.append(EchoedPrompt(text, (*first, *tokens), bool(first), told))
    return prompts
