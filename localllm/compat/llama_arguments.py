"""Arguments of llama-cpp-python's Llama, with its names, order and defaults, and their conversion.

Source of names and defaults: llama-cpp-python 0.3.36.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import update_wrapper
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

import numpy as np

from localllm.arch.rope_scaling import RopeScaling
from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.model_methods import AnswerArguments
from localllm.generation.sampling.options import DEFAULTS, OPTIONS
from localllm.text.builtin_templates import BUILTIN_TEMPLATES
from localllm.text.messages import Message

if TYPE_CHECKING:
    from localllm.api import Model


class LlamaGrammar:
    """A validated constraint on answers; create it with from_string, from_file or from_json_schema.

    Attributes:
        grammar: in GBNF, or None.  schema: the JSON schema, or None.
    """

    def __init__(self, grammar: str | None = None, schema: object = None) -> None:
        """Validate either a grammar (GBNF) or a schema. Raises UsageError if it cannot be used."""
        make_constraint(schema, grammar)
        self.grammar, self.schema = grammar, schema

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:
        """Create a constraint from a GBNF grammar. Raises UsageError."""
        return cls(grammar=grammar)

    @classmethod
    def from_file(cls, file: str | PathLike[str], verbose: bool = True) -> Self:
        """Create a constraint from a GBNF file. Raises UsageError."""
        try:
            return cls.from_string(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"grammar: cannot read {file}: {error}") from None

    @classmethod
    def from_json_schema(cls, json_schema: str | Mapping[str, object], verbose: bool = True) -> Self:
        """Create a constraint from a JSON schema. Raises UsageError."""
        try:
            schema = json.loads(json_schema) if isinstance(json_schema, str) else dict(json_schema)
        except ValueError as error:
            raise UsageError(f"json_schema must be JSON: {error}") from None
        return cls(schema=schema)


RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED
# By GGML's type ids.
KV_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16",
}  # fmt: skip
DEFAULT_ROPE = 10000.0, 1.0  # base and scale
ROPE_TYPES = {0: "none", 1: "linear", 2: "yarn"}  # by llama.cpp's ids
POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # by llama.cpp's ids
CHAT_FORMATS = {"llama-3": "llama3"}  # names that differ in localllm
IGNORED = (
    "split_mode", "main_gpu", "tensor_split", "vocab_only", "use_mmap", "use_mlock", "n_batch", "n_ubatch",
    "n_threads_batch", "offload_kqv", "flash_attn", "op_offload", "swa_full", "no_perf", "lora_base",
    "numa", "draft_model",
)  # fmt: skip
UNSUPPORTED = {
    "kv_overrides": "write a file with other metadata with `localllm edit`",
    "attention_type": "the model file determines the attention type",
    "yarn_ext_factor": "YaRN's factors are fixed to the values of its paper",
    "yarn_attn_factor": "YaRN's factors are fixed to the values of its paper",
    "yarn_beta_fast": "YaRN's factors are fixed to the values of its paper",
    "yarn_beta_slow": "YaRN's factors are fixed to the values of its paper",
    "chat_handler": "the file's chat template is used, and the projector in the model's folder for images",
    "tokenizer": "the file's own tokenizer is used",
    "spm_infill": "the suffix always follows the prefix",
}
LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (ids int32 [tokens], logits float32 [vocab]): logits
StoppingCriterion = Callable[[np.ndarray, np.ndarray], bool]
P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
R = TypeVar("R")


def accept_arguments(arguments: Callable[P, A]) -> Callable[[Callable[[S, A], R]], Callable[Concatenate[S, P], R]]:
    """Let a method of one arguments object be called with the arguments of its class.

    The method's signature is that of the class.
    """

    def decorate(method: Callable[[S, A], R]) -> Callable[Concatenate[S, P], R]:
        def call(self: S, /, *positional: P.args, **named: P.kwargs) -> R:
            return method(self, arguments(*positional, **named))

        update_wrapper(call, method)
        signature = inspect.signature(arguments)
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [me, *signature.parameters.values()]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters, return_annotation=inspect.Signature.empty
        )
        return call

    return decorate


def warn(message: str) -> None:
    """Warn at the line of the program that called this API; Python shows a warning once per line."""
    frame = inspect.currentframe()
    level = 1
    while frame and frame.f_globals.get("__name__", "").startswith("localllm.compat"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@frozen
class OpenArguments:
    """Arguments of the constructor after model_path."""

    n_gpu_layers: int = 0
    split_mode: int = 1
    main_gpu: int = 0
    tensor_split: Sequence[float] | None = None
    vocab_only: bool = False
    use_mmap: bool = True
    use_mlock: bool = False
    kv_overrides: Mapping[str, object] | None = None
    seed: int = RANDOM_SEED
    n_ctx: int = 512
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int | None = None
    n_threads_batch: int | None = None
    rope_scaling_type: int | None = -1
    pooling_type: int = -1
    attention_type: int = -1
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_orig_ctx: int = 0
    logits_all: bool = False
    embedding: bool = False
    offload_kqv: bool = True
    flash_attn: bool = False
    op_offload: bool | None = None
    swa_full: bool | None = None
    no_perf: bool = False
    last_n_tokens_size: int = 64
    lora_base: str | None = None
    lora_scale: float = 1.0
    lora_path: str | None = None
    numa: bool | int = False
    chat_format: str | None = None
    chat_handler: object = None
    draft_model: object = None
    tokenizer: object = None
    type_k: int | None = None
    type_v: int | None = None
    spm_infill: bool = False
    verbose: bool = True

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "OpenArguments":
        """Check arguments, and warn of those without an effect. Raises UsageError for unsupported ones."""
        defaults = {each.name: each.default for each in fields(cls)}
        for name, reason in UNSUPPORTED.items():
            if name in arguments and arguments[name] not in (defaults[name], None):
                raise UsageError(f"{name} is not supported: {reason}")
        idle = [
            name
            for name in arguments
            if name not in defaults or (name in IGNORED and arguments[name] != defaults[name])
        ]
        if arguments.get("lora_scale", 1.0) != 1.0 and not arguments.get("lora_path"):
            idle.append("lora_scale")
        if idle:
            warn(f"ignored arguments (no effect in localllm): {', '.join(idle)}")
        return cls(**{name: value for name, value in arguments.items() if name in defaults})

    def open_model(self, path: str) -> "Model":
        """Open a GGUF file with these arguments. Raises ModelError, MemoryLimitError, UsageError."""
        from localllm.api import open_model
        from localllm.services.hub.catalogue import resolve_adapter

        return open_model(
            path,
            threads=self.n_threads or None,
            context=self.n_ctx,
            kv_type=f"k={get_kv_type('type_k', self.type_k)},v={get_kv_type('type_v', self.type_v)}",
            rope=self.rope,
            backend="auto" if self.n_gpu_layers else "cpu",
            gpu_layers="auto" if self.n_gpu_layers <= 0 else self.n_gpu_layers,
            chat_template=self.chat_template,
            lora={resolve_adapter(self.lora_path): self.lora_scale} if self.lora_path else "",
        )

    @property
    def chat_template(self) -> str | None:
        """The built-in chat template of chat_format; warns and returns None for an unknown one."""
        name = CHAT_FORMATS.get(self.chat_format or "", self.chat_format)
        if not name or name in BUILTIN_TEMPLATES:
            return name or None
        warn(f"chat_format {self.chat_format!r} is ignored: the model file's chat template is used")
        return None

    @property
    def is_default_rope(self) -> bool:
        """Return whether base and scale are the defaults that LangChain passes."""
        return (self.rope_freq_base, self.rope_freq_scale) == DEFAULT_ROPE

    @property
    def rope(self) -> RopeScaling | None:
        """The RoPE scaling; None for the file's own. Raises UsageError."""
        if self.rope_scaling_type not in (None, -1, *ROPE_TYPES):
            choices = ", ".join(f"{number} ({kind})" for number, kind in ROPE_TYPES.items())
            raise UsageError(f"rope_scaling_type must be -1, {choices}, not {self.rope_scaling_type!r}")
        kind = ROPE_TYPES.get(-1 if self.rope_scaling_type is None else self.rope_scaling_type)
        base, scale = (0.0, 0.0) if self.is_default_rope else (self.rope_freq_base, self.rope_freq_scale)
        scaling = RopeScaling(kind, 1 / scale if scale else None, base or None, self.yarn_orig_ctx or None)
        return None if scaling == RopeScaling() else scaling

    @property
    def pooling(self) -> str | None:
        """The pooling of embeddings; None for the file's own. Raises UsageError."""
        if self.pooling_type == -1:
            return None
        if self.pooling_type not in POOLINGS:
            raise UsageError(f"pooling_type must be -1, {', '.join(map(str, POOLINGS))}, not {self.pooling_type}")
        return POOLINGS[self.pooling_type]


def get_kv_type(name: str, number: int | None) -> str:
    """Return the KV cache type for a GGML type id. Raises UsageError."""
    if number is None:
        return "f16"
    if number not in KV_TYPES:
        choices = ", ".join(f"{key} ({kind})" for key, kind in KV_TYPES.items())
        raise UsageError(f"{name} must be {choices}, not {number!r}")
    return KV_TYPES[number]


@frozen
class CompletionArguments:
    """Arguments of create_completion."""

    prompt: str | Sequence[int]
    suffix: str | None = None
    max_tokens: int | None = 16
    temperature: float = 0.8
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    logprobs: int | None = None
    echo: bool = False
    stop: str | Sequence[str] | None = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_penalty: float = 1.0
    top_k: int = 40
    stream: bool = False
    seed: int | None = None
    tfs_z: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    model: str | None = None
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion] | None = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None
    grammar: LlamaGrammar | None = None
    logit_bias: Mapping[int, float] | None = None


@frozen
class ChatArguments:
    """Arguments of create_chat_completion."""

    messages: Sequence[Message]
    functions: Sequence[Mapping[str, object]] | None = None
    function_call: object = None
    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: object = None
    temperature: float = 0.2
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    typical_p: float = 1.0
    stream: bool = False
    stop: str | Sequence[str] | None = ()
    seed: int | None = None
    response_format: Mapping[str, object] | None = None
    max_tokens: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    tfs_z: float = 1.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    model: str | None = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None
    grammar: LlamaGrammar | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def build_answer_options(
    arguments: CompletionArguments | ChatArguments, last_n: int, seed: int | None
) -> AnswerArguments:
    """Return keyword arguments for generate and chat: sampling, grammar, functions. Raises UsageError.

    last_n: count of tokens to which penalties apply.
    """
    if arguments.grammar is not None and not isinstance(arguments.grammar, LlamaGrammar):
        raise UsageError(f"grammar must be a LlamaGrammar, not {type(arguments.grammar).__name__}")
    if arguments.tfs_z != 1.0:
        warn("tfs_z is ignored: llama.cpp no longer has tail-free sampling")
    options = build_sampling_options(arguments, last_n, seed)
    options["on_overflow"] = "error"
    if arguments.grammar is not None and arguments.grammar.grammar is not None:
        options["grammar"] = arguments.grammar.grammar
    elif arguments.grammar is not None:
        options["schema"] = arguments.grammar.schema
    processors = to_list(arguments.logits_processor)
    criteria = to_list(arguments.stopping_criteria) if isinstance(arguments, CompletionArguments) else []

    def process(ids: list[int], logits: np.ndarray) -> np.ndarray:
        for each in processors:
            logits = each(np.array(ids, np.intc), logits)
        return logits

    def ends(ids: list[int], logits: np.ndarray) -> bool:
        return any([bool(each(np.array(ids, np.intc), logits)) for each in criteria])

    if processors:
        options["logits_processor"] = process
    if criteria:
        options["stopping_criteria"] = ends
    return options


def get_length_options(arguments: CompletionArguments | ChatArguments) -> tuple[int | None, list[str]]:
    """Return max_tokens, None for no limit, and the stop strings."""
    stop = [arguments.stop] if isinstance(arguments.stop, str) else list(arguments.stop or ())
    return arguments.max_tokens if (arguments.max_tokens or 0) > 0 else None, stop


def to_list(functions: Callable[P, R] | Sequence[Callable[P, R]] | None) -> list[Callable[P, R]]:
    """Return a function, several or none as a list."""
    if functions is None or isinstance(functions, list | tuple):
        return list(functions or ())
    return [functions] if callable(functions) else [*functions]


def build_sampling_options(
    arguments: CompletionArguments | ChatArguments, last_n: int, seed: int | None
) -> AnswerArguments:
    """Return all sampling options, which override the file's recommended ones.

    A negative temperature samples from the model's own distribution; mirostat uses no temperature.
    """
    plain, is_greedy = arguments.temperature < 0, arguments.temperature == 0
    numbers = {  # each with the value that turns its step off
        "top_k": (arguments.top_k, 0), "top_p": (arguments.top_p, 1.0), "min_p": (arguments.min_p, 0.0),
        "typical": (arguments.typical_p, 1.0),
    }  # fmt: skip
    options = dict(DEFAULTS)
    options |= {name: off if plain else OPTIONS[name].clamp(value) for name, (value, off) in numbers.items()}
    options |= {
        "temperature": 1.0 if plain or (arguments.mirostat_mode and not is_greedy) else arguments.temperature,
        "mirostat": 0 if plain or is_greedy else arguments.mirostat_mode,
        "mirostat_tau": arguments.mirostat_tau,
        "mirostat_eta": arguments.mirostat_eta,
        "repeat_last_n": last_n,
        "repeat_penalty": arguments.repeat_penalty,
        "presence_penalty": arguments.presence_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "logit_bias": {int(token): float(value) for token, value in (arguments.logit_bias or {}).items()},
        "seed": seed,
    }
    return cast("AnswerArguments", options)
