"""Sample the next token from a row of logits, with steps in llama.cpp's default order.

docs/sampling.md shows the order. A step is a function from candidates to candidates, and the chain is a list of the
steps that are on. After top_k, few candidates remain for the later steps.
"""

import copy
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.engine.image_tokens import remove_images
from localllm.errors import UsageError
from localllm.files.gguf.metadata_reader import MetadataReader
from localllm.generation.sampling.candidates import LARGEST, Candidates, SamplerState
from localllm.generation.sampling.options import LETTERS, OPTIONS, CompleteOptions, SamplingOptions
from localllm.generation.sampling.steps import STEPS, draw, keep_allowed, logit_bias

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


def list_active_steps(options: CompleteOptions) -> list[str]:
    """Return the names of the steps that have an effect with these options, in order.

    As in llama.cpp, mirostat replaces all steps but temperature, and adaptive_p always comes last, because it depends
    on the token that is drawn. At temperature 0, two groups of steps have no effect and are left out: those after
    temperature, and earlier ones that always keep the most likely token.
    """
    if options.mirostat:
        names = [name for name in ("temperature", "mirostat") if STEPS[name].is_on(options)]
    else:
        names = [name for name in options.samplers if name != "adaptive_p" and STEPS[name].is_on(options)]
        names += ["adaptive_p"] * ("adaptive_p" in options.samplers and STEPS["adaptive_p"].is_on(options))
    if "temperature" in names and options.temperature <= 0 and (options.mirostat or options.dynatemp_range == 0):
        steps_before = names[: names.index("temperature")]
        names = [*(name for name in steps_before if not STEPS[name].keeps_best), "likeliest"]
    return names


def list_unused_options(options: SamplingOptions, names: Iterable[str]) -> list[str]:
    """Return the options in `names` whose step is turned on, but not among the samplers or replaced by mirostat."""
    complete = options.complete
    used = {"temperature"} if complete.mirostat else {*complete.samplers, "adaptive_p"}
    steps = {name: OPTIONS[name].step for name in names}
    return [name for name, step in steps.items() if step and step not in used and STEPS[step].is_on(complete)]


class Sampler:
    """Draws one token after the other; the same seed, options and logits give the same tokens."""

    def __init__(self, options: SamplingOptions, vocab: int, tokenizer: "Tokenizer | None" = None):
        """Set up a sampler.

        vocab: size of the vocabulary; logits beyond it are padding. tokenizer: only needed for DRY's breakers, infill
        and ignore_eos. Raises UsageError for a bias of a token that does not exist.
        """
        self.options = complete = options.complete
        self.vocab = vocab
        self.seed = random.SystemRandom().getrandbits(32) if complete.seed is None else complete.seed
        names = list_active_steps(complete)
        self._chain, self._ids = [STEPS[name].apply for name in names], make_token_ids(vocab)
        self._biases = resolve_biases(complete, vocab, tokenizer)
        self._state = SamplerState.create(complete, names, random.Random(self.seed), vocab, tokenizer)
        self._learns = bool({"penalties", "dry", "mirostat", "adaptive_p"}.intersection(names))

    def copy(self, vocab: int | None = None) -> "Sampler":
        """Return an independent sampler in the same state.

        vocab: a smaller vocabulary size for the copy, or None.
        """
        twin = copy.copy(self)
        twin._state = self._state.copy()
        if vocab is not None and vocab < self.vocab:
            twin.vocab, twin._ids, twin._state.vocab = vocab, self._ids[:vocab], vocab
        return twin

    def undo_draw(self) -> "Sampler":
        """Return a copy in the state before the last draw, whose token must not have been accepted yet."""
        twin = self.copy()
        twin._state.repeats = True
        return twin

    def restore(self, snapshot: "Sampler") -> None:
        """Return to the state of a snapshot, which stays independent."""
        self._state = snapshot._state.copy()

    def read(self, prompt: Sequence[int]) -> None:
        """Append a prompt, without its images, to the history of tokens."""
        prompt, limit = remove_images(prompt), self._state.history.most
        for token in prompt if limit < 0 else prompt[len(prompt) - min(limit, len(prompt)) :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Append a token of the prompt or the answer to the history of tokens."""
        if self._learns:
            self._state.accept(self.options, token)

    def sample(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """Draw the id of the next token; see compute_distribution for the arguments and errors."""
        state = self._state
        if not state.repeats:
            state.key = state.random.getrandbits(64)  # exactly one for each token, whatever the logits
        state.repeats = False
        candidates = self._apply_chain(logits, allowed)
        token = int(candidates.ids[candidates.best]) if len(candidates.ids) == 1 else draw(candidates, state.key)
        state.drawn = token
        return token

    def compute_distribution(
        self, logits: np.ndarray, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the distribution of the next token: ids, int64 [n], and probabilities, float64 [n].

        logits: float32 [vocab] or longer. allowed: mask of a constraint, bool [vocab] or longer; None: all. A greedy
        sampler returns one token with probability 1. Raises LocalllmError if no token is allowed or the logits are NaN.
        """
        twin = self.copy()
        twin._state.key = twin._state.random.getrandbits(64)
        candidates = twin._apply_chain(logits, allowed)
        return candidates.ids, candidates.compute_probabilities()

    def _apply_chain(self, logits: np.ndarray, allowed: np.ndarray | None) -> Candidates:
        """Apply the steps in order; return the remaining candidates."""
        candidates = Candidates(self._ids, logits[: self.vocab])
        if allowed is not None:
            candidates = keep_allowed(candidates, allowed[: self.vocab])
        self._state.allowed = allowed
        if self._biases:
            candidates = logit_bias(candidates, *self._biases)
        for step in self._chain:
            candidates = step(candidates, self.options, self._state)
        return candidates


@lru_cache(2)
def make_token_ids(vocab: int) -> np.ndarray:
    """Return the ids from 0 on, int64 [vocab], read-only.

    Callers share the array, which takes 0.4 to 2 MB.
    """
    ids = np.arange(vocab)
    ids.flags.writeable = False
    return ids


def resolve_biases(
    options: CompleteOptions, vocab: int, tokenizer: "Tokenizer | None"
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the tokens with a bias, int64 [n], and the biases of their logits, float64 [n]; None without any.

    Raises UsageError for a token that does not exist.
    """
    biases = dict(options.logit_bias)
    for token in biases:
        if token >= vocab:
            raise UsageError(f"logit_bias: token {token} does not exist: the vocabulary has {vocab} tokens")
    if options.ignore_eos:
        assert tokenizer
        biases |= dict.fromkeys(tokenizer.end_ids, -math.inf)
    return (np.array(list(biases)), np.array(list(biases.values()), np.float64)) if biases else None


def log_sum_exp(logits: np.ndarray) -> float:
    """Compute log(sum(exp(logits))) of logits, float32 [vocab]; logits minus this are log probabilities."""
    largest = float(logits.max())
    return largest + math.log(np.exp(logits.astype(np.float64) - largest).sum())


def make_samplers(
    options: SamplingOptions, prompt: list[int], vocab: int, n: int, tokenizer: "Tokenizer | None" = None
) -> list[Sampler]:
    """Return n samplers after the prompt, with consecutive seeds.

    The first seed is that of the options, or random if it is None.
    """
    first = Sampler(options, vocab, tokenizer)
    further = [Sampler(replace(options, seed=first.seed + number), vocab, tokenizer) for number in range(1, n)]
    for sampler in (first, *further):
        sampler.read(prompt)
    return [first, *further]


def read_recommended(metadata: Mapping[str, object], path: str = "") -> tuple[SamplingOptions, list[str]]:
    """Return the sampling options that a file recommends, and a warning for each invalid value.

    An invalid value is left out, so that the model still runs.
    """
    checked, values, warnings = MetadataReader(metadata, "general.sampling.", path), dict[str, Any](), list[str]()
    for name, key in ((name, option.key) for name, option in OPTIONS.items()):
        if not key or not checked.has(key):
            continue
        option_value: dict[str, Any] = {name: normalize_value(key, checked.read_raw(key))}
        try:
            SamplingOptions(**option_value)
        except UsageError:
            warnings.append(f"{checked.make_value_error(key, describe_valid_values(name))}; using the default")
        else:
            values |= option_value
    return SamplingOptions(**values), warnings


def describe_valid_values(name: str) -> str:
    """Return a description of the valid values of an option."""
    if name == "samplers":
        return f"names of steps with semicolons between them, as in {';'.join(LETTERS)}"
    range = OPTIONS[name].range
    assert range
    return range.text


def normalize_value(key: str, value: object) -> object:
    """Return a metadata value as its author wrote it: 0.6 for its float32, 0 (off) for a top_k below 0."""
    if isinstance(value, float) and abs(value) <= LARGEST:
        return float(str(np.float32(value)))
    if key == "top_k" and isinstance(value, int):
        return max(value, 0)
    return value
