"""The API of llama-cpp-python, for programs written for it.

    from localllm.compat.llama_cpp import Llama
    llm = Llama(model_path="model.gguf", n_ctx=2048)
    print(llm("The capital of France is", max_tokens=8)["choices"][0]["text"])

docs/llama-cpp-python.md lists the differences and what is not supported. Source of the API: llama-cpp-python 0.3.36.
"""

import random
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from localllm.compat.llama_arguments import (
    DEFAULT_ROPE,
    RANDOM_SEED,
    ChatArguments,
    CompletionArguments,
    LlamaGrammar,
    LogitsProcessor,
    OpenArguments,
    StoppingCriterion,
    accept_arguments,
    warn,
)
from localllm.compat.llama_chat import ChatCompletion
from localllm.compat.llama_completion import TextCompletion
from localllm.compat.llama_low_level import *
from localllm.compat.llama_low_level import Context
from localllm.errors import UsageError
from localllm.services.hub.catalogue import resolve_model

if TYPE_CHECKING:
    from localllm.engine.sequence import Sequence as TokenSequence

__all__ = ["Llama", "LlamaGrammar", "LlamaState", "LlamaTokenizer", "LogitsProcessorList", "StoppingCriteriaList"]


class LogitsProcessorList(list[LogitsProcessor]):
    """Functions of token ids, int32 [tokens], and logits, float32 [vocab], that change the logits in turn."""

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriterion]):
    """Functions of token ids, int32 [tokens], and logits, float32 [vocab]; True from one ends the answer."""

    def __call__(self, input_ids: np.ndarray, logits: np.ndarray) -> bool:
        return any([criterion(input_ids, logits) for criterion in self])


class LlamaState:
    """Evaluated tokens, for Llama.load_state of the same model.

    Attributes:
        n_tokens: count of tokens.  input_ids: the tokens, int32 [n_tokens].  seed: the model's.
        scores: logits after each token, float32 [n_tokens, vocab]; None without logits_all.
    """

    def __init__(self, sequence: "TokenSequence | None", rows: list[np.ndarray], seed: int) -> None:
        """Take ownership of `sequence`; rows: arrays of logits, float32 [tokens, vocab], in order."""
        self.sequence, self.rows, self.seed = sequence, rows, seed
        self.input_ids = np.array(sequence.tokens if sequence else [], np.intc)
        self.n_tokens = len(self.input_ids)

    @property
    def scores(self) -> np.ndarray | None:
        """The logits after each token; None if some were not stored."""
        rows = np.concatenate(self.rows) if self.rows else None
        return rows if rows is not None and len(rows) == self.n_tokens else None


class LlamaTokenizer:
    """The tokenizer of a Llama: converts between text and token ids."""

    def __init__(self, llama: "Llama") -> None:
        self._llama = llama

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """See Llama.tokenize."""
        return self._llama.tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """See Llama.detokenize."""
        return self._llama.detokenize(tokens, prev_tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the token ids of a string."""
        return self.tokenize(text.encode("utf-8", errors="ignore"), add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the string of token ids."""
        return self.detokenize(tokens).decode("utf-8", errors="ignore")


class Llama:
    """A model with llama-cpp-python's methods; use it in a `with` statement, or close it.

    Attributes:
        model_path: as passed.  metadata: the file's as strings, without lists.  model: the localllm.Model.
        n_batch: as passed, without an effect: the size of prefill chunks is chosen automatically.
    """

    def __init__(self, model_path: str, **arguments: object) -> None:
        """Open a GGUF file, or a local model by its name.

        arguments: see OpenArguments. Raises ModelError, MemoryLimitError, UsageError.
        """
        self._closed = True
        opening = OpenArguments.from_arguments(arguments)
        self.model_path, self.verbose, self.chat_format = model_path, opening.verbose, opening.chat_format
        self._pooling, self._logits_all, self._last_n = opening.pooling, opening.logits_all, opening.last_n_tokens_size
        self.model = opening.open_model(resolve_model(model_path))
        self._closed = False
        for warning in self.model.warnings:
            warn(warning)
        self.metadata = {
            key: str(value).lower() if isinstance(value, bool) else str(value)
            for key, value in self.model.file.metadata.items()
            if isinstance(value, str | int | float)
        }
        self._warn_rope_base(opening)
        self._context: Context | None = None
        self.n_batch = opening.n_batch
        self._sequence: TokenSequence | None = None
        self._rows = list[np.ndarray]()
        self.set_seed(opening.seed)

    def _warn_rope_base(self, opening: OpenArguments) -> None:
        """Warn if LangChain's default base and scale are ignored although the file's base differs."""
        base = float(self.metadata.get(f"{self.model.arch}.rope.freq_base", DEFAULT_ROPE[0]))
        if opening.is_default_rope and base != DEFAULT_ROPE[0]:
            usual = f"rope_freq_base {DEFAULT_ROPE[0]:g} with rope_freq_scale 1"
            warn(f"{usual} is ignored, as LangChain's default: the file's base {base:g} is used")

    # ---- completions

    @accept_arguments(CompletionArguments)
    def create_completion(self, arguments: CompletionArguments) -> Any:
        """Complete a prompt; return a dict in OpenAI's format, or with `stream` an iterator of chunks.

        Raises ContextError, UsageError.
        """
        name, seed = arguments.model or self.model_path, self._draw_seed(arguments.seed)
        completion = TextCompletion(self.model, arguments, name, self._last_n, seed)
        return completion.stream() if arguments.stream else completion.generate_response()

    @accept_arguments(CompletionArguments)
    def __call__(self, arguments: CompletionArguments) -> Any:
        """Complete a prompt; see create_completion."""
        return self.create_completion(**vars(arguments))

    @accept_arguments(ChatArguments)
    def create_chat_completion(self, arguments: ChatArguments) -> Any:
        """Answer a conversation; return a dict in OpenAI's format, or with `stream` an iterator of chunks.

        Raises ContextError, UsageError.
        """
        name, seed = arguments.model or self.model_path, self._draw_seed(arguments.seed)
        completion = ChatCompletion(self.model, arguments, name, self._last_n, seed)
        return completion.stream() if arguments.stream else completion.generate_response()

    @accept_arguments(ChatArguments)
    def create_chat_completion_openai_v1(self, arguments: ChatArguments) -> Any:
        """Answer a conversation; return objects of the package openai, which must be installed."""
        from openai.types.chat import ChatCompletion as Whole
        from openai.types.chat import ChatCompletionChunk

        completion = self.create_chat_completion(**vars(arguments))
        return (
            Whole(**completion)
            if isinstance(completion, dict)
            else (ChatCompletionChunk(**chunk) for chunk in completion)
        )

    def set_seed(self, seed: int | None) -> None:
        """Set the seed of the generator that draws seeds for completions without one."""
        self._seed = RANDOM_SEED if seed is None or seed < 0 else seed
        self._seeds = None if self._seed == RANDOM_SEED else random.Random(self._seed)

    def _draw_seed(self, seed: int | None) -> int | None:
        """Return the seed of a completion; None for a random one."""
        if seed is None:
            return self._seeds.randrange(2**32) if self._seeds else None
        return None if seed < 0 or seed == RANDOM_SEED else seed

    # ---- embeddings

    def embed(
        self,
        input: str | Sequence[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embed a string as a list of floats, or several as a list of lists; return_count: also count the tokens.

        Raises ContextError, ModelError, UsageError.
        """
        texts = [input] if isinstance(input, str) else list(input)
        overflow = "cut" if truncate else "refuse"
        rows = self.model.embed(texts, normalize=normalize, overflow=overflow, pooling=self._pooling).tolist()
        result = rows[0] if isinstance(input, str) else rows
        if not return_count:
            return result
        encode, context = self.model.tokenizer.encode, self.model.context
        return result, sum(min(len(encode(text, bos=True, eos=True)), context) for text in texts)

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> dict[str, object]:
        """Embed one or several strings; return a dict in OpenAI's format. Raises the errors of embed."""
        rows, count = self.embed([input] if isinstance(input, str) else input, return_count=True)
        data = [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": usage}

    # ---- tokens

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 bytes, with the file's BOS and EOS if add_bos. Raises UsageError."""
        try:
            return self.model.tokenizer.encode(bytes(text).decode(), special, add_bos, add_bos)
        except (TypeError, UnicodeDecodeError):
            raise UsageError("text must be bytes of UTF-8 text; encode strings with text.encode()") from None

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the bytes of token ids. Raises UsageError."""
        data = b"".join(self.model.tokenizer.token_bytes(int(token), special) for token in tokens)
        return data[1:] if len(tokens) and tokens[0] == self.token_bos() and data[:1] == b" " else data

    def tokenizer(self) -> LlamaTokenizer:
        """Return the tokenizer."""
        return LlamaTokenizer(self)

    def token_bos(self) -> int:
        """Return the BOS token, or -1."""
        return -1 if self.model.tokenizer.bos_id is None else self.model.tokenizer.bos_id

    def token_eos(self) -> int:
        """Return the EOS token, or -1."""
        return -1 if self.model.tokenizer.eos_id is None else self.model.tokenizer.eos_id

    def token_nl(self) -> int:
        """Return the line break token."""
        return self.model.tokenizer.encode_inside("\n")[-1]

    def n_ctx(self) -> int:
        """Return the context length: the maximum tokens of a prompt and its answer."""
        return self.model.context

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self.model.engine.vocab_size

    def n_embd(self) -> int:
        """Return the width of the hidden states."""
        return self.model.engine.hyperparameters.width

    # ---- evaluation

    @property
    def n_tokens(self) -> int:
        """Count of evaluated tokens; setting a smaller one removes the last tokens."""
        return len(self._sequence.tokens) if self._sequence else 0

    @n_tokens.setter
    def n_tokens(self, count: int) -> None:
        if not 0 <= count <= self.n_tokens:
            raise UsageError(f"n_tokens must be from 0 to {self.n_tokens}, not {count}")
        if self._sequence and count < self.n_tokens:
            tokens = [int(token) for token in self._sequence.tokens[:count]]
            kept_tokens = self._sequence.truncate(count)
            if kept_tokens < count:
                self._sequence.append(tokens[kept_tokens:], "none")
            self._rows = [self.scores[:count].copy()] if self._logits_all else []

    @property
    def input_ids(self) -> np.ndarray:
        """The evaluated tokens, int32 [n_tokens]."""
        return np.array(self._sequence.tokens if self._sequence else [], np.intc)

    @property
    def eval_tokens(self) -> deque[int]:
        """The evaluated tokens as a deque."""
        return deque(self.input_ids.tolist(), maxlen=self.model.context)

    @property
    def scores(self) -> np.ndarray:
        """The logits after each evaluated token, float32 [n_tokens, vocab]. Raises UsageError."""
        if not self._logits_all:
            raise UsageError("logits_all must be True for scores")
        return np.concatenate(self._rows) if self._rows else np.empty((0, self.n_vocab()), np.float32)

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The logits after each evaluated token; without logits_all, only after the last one."""
        rows = self.scores if self._logits_all else np.concatenate(self._rows[-1:] or [np.empty((0, 0))])
        return deque(rows.tolist(), maxlen=self.model.context if self._logits_all else 1)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the earlier ones. Raises ContextError, UsageError."""
        if not len(tokens):
            return
        self._sequence = self._sequence or self.model.sequence()
        rows = self._sequence.append([int(token) for token in tokens], "all" if self._logits_all else "last")
        self._rows = [*(self._rows if self._logits_all else []), np.array(rows, np.float32)]

    def reset(self) -> None:
        """Remove all evaluated tokens."""
        if self._sequence:
            self._sequence.close()
        self._sequence, self._rows = None, []

    def save_state(self) -> LlamaState:
        """Return a copy of the evaluated tokens' state, which takes memory while it exists."""
        return LlamaState(self._sequence.fork() if self._sequence else None, [*self._rows], self._seed)

    def load_state(self, state: LlamaState) -> None:
        """Restore a state of this model from save_state. Raises UsageError."""
        if state.sequence and state.sequence.engine is not self.model.engine:
            raise UsageError("state must be a result of this model's save_state")
        self.reset()
        self._sequence, self._rows = state.sequence.fork() if state.sequence else None, [*state.rows]
        self.set_seed(state.seed)

    def set_cache(self, cache: object) -> None:
        """Do nothing except warn, since processed prompts are always cached."""
        warn("set_cache is ignored: processed prompts are always cached")

    # ---- llama.cpp's C API, see llama_low_level.py

    @property
    def ctx(self) -> Context:
        """The low-level context, which llama_decode uses.

        It is separate from the one that eval uses, and shares no tokens with it.
        """
        self._context = self._context or Context(self.model)
        return self._context

    @property
    def context_params(self) -> SimpleNamespace:
        """An object with n_ctx."""
        return SimpleNamespace(n_ctx=self.model.context)

    # ---- lifecycle

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, *given: object, **named: object) -> NoReturn:
        """Raise UsageError, since only `localllm pull` downloads models."""
        raise UsageError(
            f'from_pretrained is not supported: run `localllm pull hf:{repo_id}` once, then use Llama("hf:{repo_id}")'
        )

    def close(self) -> None:
        """Free the memory and end the threads; idempotent."""
        if not self._closed:
            self._closed = True
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
