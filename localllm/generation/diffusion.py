"""Generate answers of masked diffusion models by denoising all positions together, the most certain first.

It works like llama.cpp's diffusion example. Each step runs the model on all positions; the schedule determines how many
it fills: by time (Dream: Ye et al. 2025, arXiv 2508.15487), or block by block (LLaDA: Nie et al. 2025, arXiv
2502.09992).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from localllm.errors import ContextError, UsageError
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.engine.engine import Engine

ORIGIN, ENTROPY, MARGIN, RANDOM, CONFIDENCE = range(5)  # order of filling, by llama.cpp's numbers
MAX_STEPS = 10_000
Read = Callable[[Sequence[int]], np.ndarray]  # returns the logits at each position, float32 [tokens, vocab]


@frozen
class DiffusionOptions:
    """Options of denoising.

    Attributes:
        length: number of masked positions after the prompt.  steps: number of denoising steps.
        epsilon: remaining time at the end of a schedule by time; 0 for a schedule by blocks.
        block_length: number of positions of a block; 0 for a schedule by time.
        algorithm: order in which positions are filled, ORIGIN to CONFIDENCE.
        algorithm_temperature: randomness of this order; 0: the most confident positions first.
        guidance: scale of classifier-free guidance; 0: none.
        temperature, top_k, top_p: sampling of tokens; temperature 0 is greedy, top_k 0 and top_p 1 are off.
        seed: seed of sampling; None: random.
        has_noise: whether Gumbel noise is added to the logits before sampling.
    """

    length: int = 128
    steps: int = 128
    epsilon: float = 0.0
    block_length: int = 0
    algorithm: int = CONFIDENCE
    algorithm_temperature: float = 0.0
    guidance: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    has_noise: bool = False

    def require_valid(self) -> None:
        """Raise UsageError for options that are invalid or do not fit together."""
        if not ORIGIN <= self.algorithm <= CONFIDENCE:
            raise UsageError(f"the diffusion algorithm must be an integer from 0 to 4, not {self.algorithm}")
        if self.length < 1 or not 1 <= self.steps <= MAX_STEPS:
            raise UsageError(f"diffusion needs a length of at least 1, and from 1 to {MAX_STEPS} steps")
        if (self.epsilon > 0) == (self.block_length > 0) or self.epsilon >= 1 or self.block_length < 0:
            raise UsageError("diffusion needs either an epsilon between 0 and 1 or a block length")
        blocks = self.length / self.block_length if self.block_length else 1
        if blocks % 1 or self.steps % blocks:
            raise UsageError(
                f"the block length {self.block_length} must divide the length {self.length}, "
                "and the number of blocks must divide the steps"
            )


class DiffusionModel(NamedTuple):
    """A masked diffusion model.

    Attributes:
        read: returns the logits at each position.  mask: id of the mask token.
        is_shifted: whether the logits at a position predict the next one.
    """

    read: Read
    mask: int
    is_shifted: bool


def denoise(model: DiffusionModel, prompt: Sequence[int], options: DiffusionOptions) -> Iterator[list[int]]:
    """Yield the tokens after the prompt after each step; unfilled positions hold the mask token.

    Raises UsageError for invalid options or an empty prompt, ContextError if one run cannot hold all positions.
    """
    options.require_valid()
    if not prompt:
        raise UsageError("the prompt is empty: it must have at least one token")
    tokens, first = np.array([*prompt, *[model.mask] * options.length], np.int64), len(prompt)
    random = np.random.default_rng(options.seed)
    for begin, end, step, count in plan_steps(options):
        inside = np.arange(first + begin, first + end)
        places = inside[tokens[inside] == model.mask]
        if len(places):
            rows = compute_logits(model, tokens, first, options)[places]
            fill_positions(
                tokens,
                places,
                rows,
                count_positions_to_fill(options, step, count, len(places), end - begin),
                options,
                random,
            )
        yield tokens[first:].tolist()


def plan_steps(options: DiffusionOptions) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each step: begin and end of the positions that it may fill, its index in its block, steps per block."""
    length = options.block_length or options.length
    blocks = options.length // length
    for block in range(blocks):
        for step in range(options.steps // blocks):
            yield block * length, (block + 1) * length, step, options.steps // blocks


def count_positions_to_fill(options: DiffusionOptions, step: int, steps: int, masked: int, length: int) -> int:
    """Return how many positions a step fills.

    step: index in its block of `steps` steps. masked: number of masked positions. length: that before the first step.
    """
    if options.block_length:
        return length // steps + (step < length % steps)
    share, next_share = (1 - at / steps * (1 - options.epsilon) for at in (step, step + 1))
    return int(masked * (1 - next_share / share)) if step < steps - 1 else masked


def compute_logits(model: DiffusionModel, tokens: np.ndarray, first: int, options: DiffusionOptions) -> np.ndarray:
    """Compute the logits at each position with classifier-free guidance, float64 [tokens, vocab].

    first: number of prompt tokens, which guidance masks.
    """
    rows = model.read(tokens.tolist()).astype(np.float64)
    if options.guidance:
        unprompted = tokens.copy()
        unprompted[:first] = model.mask
        unguided = model.read(unprompted.tolist()).astype(np.float64)
        rows = unguided + (options.guidance + 1) * (rows - unguided)
    return rows[np.maximum(np.arange(len(tokens)) - 1, 0)] if model.is_shifted else rows


def fill_positions(
    tokens: np.ndarray, places: np.ndarray, rows: np.ndarray, count: int, options: DiffusionOptions,
    random: np.random.Generator,
) -> None:  # fmt: skip
    """Sample tokens for `count` of the masked positions, and write them to `tokens`.

    places: the masked positions. rows: logits at these positions, float64 [places, vocab].
    """
    if options.has_noise and options.temperature > 0:  # (Zheng et al. 2024, arXiv 2409.02908)
        noise = np.maximum(random.random(rows.shape), 1e-20)
        rows = rows - options.temperature * np.log(-np.log(noise))
    tokens_drawn, sure = sample_tokens(rows, options, random)
    if options.algorithm == ORIGIN:
        unmasked = random.random(len(places)) < count / len(places)
        tokens[places[unmasked]] = tokens_drawn[unmasked]
        return
    if options.algorithm_temperature > 0:  # Gumbel noise samples positions without replacement
        sure = sure / options.algorithm_temperature - np.log(-np.log(np.maximum(random.random(len(sure)), 1e-20)))
    best = np.argsort(-sure, kind="stable")[:count]
    tokens[places[best]] = tokens_drawn[best]


def sample_tokens(
    rows: np.ndarray, options: DiffusionOptions, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Sample a token from each row of logits, float64 [rows, vocab].

    Returns the tokens, int64 [rows], and the model's confidence in each, float64 [rows].
    """
    chances = compute_probabilities(rows, options)
    if options.temperature > 0:
        sums = chances.cumsum(axis=1)
        tokens_drawn = (sums > random.random((len(rows), 1)) * sums[:, -1:]).argmax(axis=1)
    else:
        tokens_drawn = chances.argmax(axis=1)
    if options.algorithm == ENTROPY:
        return tokens_drawn, (chances * np.log(chances + 1e-10)).sum(axis=1)
    if options.algorithm == MARGIN:
        second, best = np.sort(chances, axis=1)[:, -2:].T
        return tokens_drawn, best - second
    if options.algorithm == RANDOM:
        return tokens_drawn, random.random(len(rows))
    return tokens_drawn, np.take_along_axis(chances, tokens_drawn[:, None], axis=1)[:, 0]


def compute_probabilities(rows: np.ndarray, options: DiffusionOptions) -> np.ndarray:
    """Compute the probabilities of sampling, float64 [rows, vocab], after top_k, top_p and temperature."""
    if 0 < options.top_k < rows.shape[1]:
        least = np.partition(rows, -options.top_k, axis=1)[:, -options.top_k, None]
        rows = np.where(rows >= least, rows, -np.inf)
    if options.top_p < 1:
        order = np.argsort(-rows, axis=1, kind="stable")
        chances = np.take_along_axis(softmax(rows), order, axis=1)
        sums_before = chances.cumsum(axis=1) - chances
        keeps = np.zeros(rows.shape, bool)
        np.put_along_axis(keeps, order, sums_before < options.top_p, axis=1)
        rows = np.where(keeps, rows, -np.inf)
    return softmax(rows / options.temperature if options.temperature > 0 else rows)


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def make_diffusion_model(engine: "Engine", metadata: Mapping[str, object]) -> DiffusionModel:
    """Return the diffusion model of an engine.

    metadata: of the GGUF file. Raises UsageError for a model of another kind, or without a mask token.
    """
    if not engine.hyperparameters.is_diffusion:
        raise UsageError(
            f"{engine.hyperparameters.arch} models are not diffusion models: leave out the --diffusion options"
        )
    mask, shifted = metadata.get("tokenizer.ggml.mask_token_id"), metadata.get("diffusion.shift_logits", True)
    if not isinstance(mask, int | np.integer) or not 0 <= mask < engine.vocab_size or not isinstance(shifted, bool):
        raise UsageError("the file has no tokenizer.ggml.mask_token_id, or its diffusion.shift_logits is not a boolean")
    return DiffusionModel(engine.forward_full, int(mask), shifted)


def require_room(tokens: int, maximum: int) -> None:
    """Raise ContextError if `tokens` exceeds the maximum number of tokens of a run."""
    if tokens > maximum:
        raise ContextError(f"{tokens} tokens (the prompt and the positions to fill) exceed the limit of {maximum}")
