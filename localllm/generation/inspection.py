"""Look into a model: log probabilities of a text's tokens, hidden states, attention weights, and hooks."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np

from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import LocalllmError, UsageError
from localllm.generation.conversation import is_conversation
from localllm.generation.logprobs import TokenLogprob, compute_prompt_logprobs
from localllm.generation.model_methods import AnswerArguments, ChatArguments, GenerationMixin, Prompt, gather_options
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.scheduler import PARALLEL, Scheduler
from localllm.generation.session import Session
from localllm.text.offsets import locate_tokens
from localllm.values import require_integer, require_iterable, require_string, to_token_ids

if TYPE_CHECKING:
    from localllm.engine.hooks import HookFunction, LayerHook
    from localllm.engine.sequence import Sequence as Tokens
    from localllm.generation.choices import Score, TokenTrie
    from localllm.generation.request import Request


class ScoredToken(NamedTuple):
    """A token of a text, with the natural logarithm of its probability after those before it.

    Attributes:
        text: what the token decodes to alone.  start, end: its characters in the text; None for token ids, whose text
            is not known, and for a token that is not in the text, such as BOS.  logprob: None for the first token.
        likeliest: the likeliest tokens at its position, best first.
    """

    token: int
    text: str
    start: int | None
    end: int | None
    logprob: float | None
    likeliest: tuple[TokenLogprob, ...]


class TextScores(list[ScoredToken]):
    """The tokens of a text with their log probabilities; a notebook shows it as a table."""

    @property
    def logprob(self) -> float:
        """The log probability of the text after its first token: the sum over its tokens."""
        return math.fsum(token.logprob for token in self if token.logprob is not None)

    @property
    def perplexity(self) -> float:
        """Return e to the mean negative log probability of a token; NaN for fewer than two tokens."""
        count = sum(token.logprob is not None for token in self)
        return math.exp(-self.logprob / count) if count else math.nan

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for each token, as pandas.DataFrame takes them."""
        return [token._asdict() | {"likeliest": [*map(tuple, token.likeliest)]} for token in self]

    def __repr__(self) -> str:
        return f"TextScores({len(self)} tokens, logprob={self.logprob:.4f}, perplexity={self.perplexity:.4g})"

    def _repr_markdown_(self) -> str:
        rows = [
            f"| {number} | {format_code(token.text)} | {'' if token.logprob is None else f'{token.logprob:.4f}'} |"
            for number, token in enumerate(self)
        ]
        total = f"log probability {self.logprob:.4f}, perplexity {self.perplexity:.4g}"
        return "\n".join(["| # | token | log probability |", "|--:|---|--:|", *rows, "", total])


def format_code(text: str) -> str:
    """Format a token's text as a cell of a Markdown table, with visible white space at its ends."""
    return f"<code>{escape_cell(repr(text)[1:-1])}</code>"


def escape_cell(text: str) -> str:
    """Escape a text for HTML in a cell of a Markdown table."""
    from html import escape

    return escape(text).replace("|", "&#124;").replace("`", "&#96;").replace(" ", "&nbsp;")


class InspectionMixin:
    """The methods of a Model that look into it.

    Attributes:
        session: the model's conversation.
    """

    session: Session

    def sequence(self) -> "Tokens":
        """Create an empty token sequence."""
        raise NotImplementedError

    def batch(self, requests: "Iterable[Request]", parallel: int | None = None, precise: bool = True) -> Scheduler:
        """Return a scheduler for many requests."""
        raise NotImplementedError

    def logprobs(self, text: Prompt, top: int = 0) -> TextScores:
        """Return each token of a text with its log probability after those before it.

        text: a string, read as `generate` reads it; token ids; or messages, with the chat template.  top: number of
        likeliest tokens to return for each position. Activations keep 16 bits. Raises ContextError, UsageError.
        """
        ids, tokenizer = self._encode(text), self.session.tokenizer
        top = min(require_integer("top", top), tokenizer.vocab_size)
        likely, _ = compute_prompt_logprobs(self.sequence(), ids, top)
        spans = locate_tokens(tokenizer, ids, text) if isinstance(text, str) else [(None, None)] * len(ids)
        scores = TextScores()
        for number, (token, (start, end)) in enumerate(zip(ids, spans, strict=True)):
            chosen = likely[number - 1] if number else None
            logprob, likeliest = (chosen.chosen.logprob, chosen.likeliest) if chosen else (None, ())
            scores.append(ScoredToken(token, tokenizer.decode([token], True), start, end, logprob, likeliest))
        return scores

    def score_many(
        self, pairs: Iterable[tuple[Prompt, str]], precise: bool = True, **options: Unpack[AnswerArguments]
    ) -> "Iterator[Score | LocalllmError]":
        """Score like `score` for many pairs of prompt and text, in a batch.

        Yields the score of each pair, or its error, in order. precise: see `choose`.
        """
        from localllm.generation.choices import PARALLEL as MOST
        from localllm.generation.choices import BatchScorer, Score

        arguments: AnswerArguments = {"think": "off", **options}
        generation = gather_options(None, (), arguments)

        def prepare(pair: tuple[Prompt, str]) -> "tuple[Request, TokenTrie]":
            prompt, text = require_pair(pair)
            tree = self.session.build_trie([text], is_conversation(prompt), with_end=True)
            return self.session.request(prompt, generation), tree

        scorer = BatchScorer[Any](self.session.cache.engine, prepare, precise)
        with closing(self.batch(scorer.create_requests(require_iterable("pairs", pairs)), MOST, precise)) as batch:
            for result in scorer.collect_results(batch):
                if isinstance(result, LocalllmError):
                    yield result
                    continue
                (tokens,) = result
                yield Score(sum(token.logprob for token in tokens), tokens)

    def render(self, messages: Prompt, **options: Unpack[ChatArguments]) -> str:
        """Return the text that the model reads for messages: the chat template's, with control tokens and tools.

        options: as in `chat`. Each image is shown as "[image]". Raises UsageError.
        """
        tokenizer, parts, run = self.session.tokenizer, list[str](), list[int]()
        for token in self._encode(messages, options):
            if token >= 0:
                run.append(token)
            elif run or not parts:
                parts += [tokenizer.decode(run, special=True), "[image]"]
                run = []
        return "".join([*parts, tokenizer.decode(run, special=True)])

    def hidden_states(self, text: Prompt, layers: int | Iterable[int] | None = None) -> np.ndarray:
        """Compute the hidden states of a text's tokens: float32 [layers, tokens, width].

        text: as in `logprobs`.  layers: indices of layers, whose inputs are returned: 0 has the embeddings, the number
        of layers the last one's output, before the final norm; None: all; a single one gives float32 [tokens, width].
        Computed on the CPU; activations keep 16 bits. Raises UnsupportedError for architectures and devices that cannot
        show them, ContextError, UsageError.
        """
        from localllm.engine.hooks import LayerHook

        ids, count = self._encode(text), self.session.cache.engine.hyperparameters.layers
        wanted = list_layers(layers, count)
        rows = {layer: list[np.ndarray]() for layer in wanted}

        def collect(states: np.ndarray, layer: int, position: int) -> None:
            rows[layer].append(states)

        self._read(ids, LayerHook(frozenset(wanted), collect))
        arrays = [np.concatenate(rows[layer]) for layer in wanted]
        return arrays[0] if isinstance(layers, int) else np.stack(arrays)

    def attention(self, text: Prompt, layer: int) -> np.ndarray:
        """Compute the attention weights of a layer: float32 [heads, tokens, tokens], a row for each token that attends.

        They are computed in float32 from the layer's queries and keys. text: as in `logprobs`. Raises the errors of
        `hidden_states`, and UnsupportedError for a layer without such weights.
        """
        from localllm.engine.hooks import AttentionInputs, LayerHook, compute_weights

        inputs = list[AttentionInputs]()
        engine = self.session.cache.engine
        hook = LayerHook(attention_layer=require_integer("layer", layer), on_attention=inputs.append)
        self._read(self._encode(text), hook)
        return compute_weights(inputs, engine.context)

    def hooked(self, function: "HookFunction", layers: int | Iterable[int] | None = None) -> "HookedModel":
        """Return this model with a function that sees, and may change, the hidden states between its layers.

        function(states, layer, position): gets the input of a layer, float32 [tokens, width], for tokens from this
        position on; it may change the array in place, or return another of the same shape. It is called in prefill and
        decode, in each run of the model, for each sequence alone.  layers: as in `hidden_states`.

        The result has `generate`, `chat`, `map`, `score`, `logprobs` and the like; this model stays as it is. It uses
        neither drafts nor the prefix cache. Raises UnsupportedError, UsageError.
        """
        from localllm.engine.hooks import LayerHook

        if not callable(function):
            raise UsageError(f"function must be callable, not {type(function).__name__}")
        engine = self.session.cache.engine
        hook = LayerHook(frozenset(list_layers(layers, engine.hyperparameters.layers)), function)
        engine.require_hook(hook)
        return HookedModel(self.session, hook)

    def _encode(self, text: Prompt, options: ChatArguments | None = None) -> list[int]:
        ids = self.session.request(text, gather_options(None, (), options or {})).prompt
        if not ids:
            raise UsageError("the text is empty")
        return ids

    def _make_sequence(self, hook: "LayerHook") -> "Tokens":
        """Create a sequence with a hook."""
        return self.session.cache.engine.sequence(hook)

    def _read(self, ids: Sequence[int], hook: "LayerHook") -> None:
        """Run the model over a text with a hook, as precisely as for log probabilities."""
        with closing(self._make_sequence(hook)) as sequence:
            for begin in range(0, len(ids), PRECISE_TOKENS):
                part = ids[begin : begin + PRECISE_TOKENS]
                sequence.append(part, "last", kernel_tokens=PRECISE_TOKENS)


class HookedModel(GenerationMixin, InspectionMixin):
    """A Model with a hook; see Model.hooked. It is closed with the model.

    Attributes:
        session: a conversation of its own.
    """

    def __init__(self, session: Session, hook: "LayerHook"):
        """Share the engine of a session; hook: of all sequences."""
        self._engine, self._hook = session.cache.engine, hook
        cache = PrefixCache(self._engine, hook=hook)
        self.session = Session(cache, session.tokenizer, session.template_choice, session.defaults)
        self.session.on_warning = session.on_warning

    def sequence(self) -> "Tokens":
        return self._engine.sequence(self._hook)

    def resolve_drafter(self, speculate: Any) -> str:
        """Return "off": the hook would see drafts that are rejected."""
        return "off"

    def batch(self, requests: "Iterable[Request]", parallel: int | None = None, precise: bool = True) -> Scheduler:
        cache = PrefixCache(self._engine, is_shared=True, hook=self._hook)
        most = parallel or PARALLEL
        return Scheduler(self._engine, self.session.tokenizer, requests, most, precise=precise, cache=cache)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits after each token in one prefill: float32 [len(ids), vocab], as Model.logits."""
        with closing(self.sequence()) as sequence:
            return sequence.append(to_token_ids(ids), "all", kernel_tokens=PRECISE_TOKENS)

    def _make_sequence(self, hook: "LayerHook") -> "Tokens":
        from localllm.engine.hooks import chain_hooks

        return self._engine.sequence(chain_hooks(self._hook, hook))


def list_layers(layers: int | Iterable[int] | None, count: int) -> list[int]:
    """Return the indices of layers, where `count` stands for the last one's output. Raises UsageError."""
    if layers is None:
        return [*range(count + 1)]
    some = [layers] if isinstance(layers, int) else [*require_iterable("layers", layers)]
    if not some:
        raise UsageError("layers must not be empty")
    if any(isinstance(layer, int) and layer < 0 for layer in some):
        raise UsageError(f"layers must be from 0 to {count}, the output of the last layer, not {min(some)}")
    return [require_integer("a layer", layer) for layer in some]


def require_pair(pair: object) -> tuple[Prompt, str]:
    """Return a prompt and a text. Raises UsageError for anything else."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError("pairs must be pairs of a prompt and a text")
    return pair[0], require_string("text", pair[1])
