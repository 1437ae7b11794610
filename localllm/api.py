"""Open a model: the Python API, on which the commands are built."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ids
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np

from localllm.arch import load_architecture
from localllm.arch.weights import Weights
from localllm.engine.forks import was_forked
from localllm.engine.runs import PRECISE_TOKENS
from localllm.errors import ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.conversation import AnswerDefaults
from localllm.generation.inspection import InspectionMixin, escape_cell
from localllm.generation.model_methods import GenerationMixin
from localllm.generation.options import GenerationOptions
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.sampler import read_recommended
from localllm.generation.session import Session
from localllm.generation.speculation.ngram import NgramCache
from localllm.generation.speculation.speculator import ModelDrafter, attach_draft_head
from localllm.generation.vision_adapter import VisionAdapter
from localllm.renamed import RenamedAttribute
from localllm.text.tokenizer import Tokenizer
from localllm.values import require_integer, require_iterable, require_string, to_token_ids

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling
    from localllm.engine.engine import Engine
    from localllm.engine.options import EngineOptions
    from localllm.engine.prefix_store import PrefixStore
    from localllm.engine.sequence import Sequence
    from localllm.engine.trace.imatrix_collector import ImatrixCollector
    from localllm.generation.embedding.embedder import Embedder
    from localllm.generation.embedding.reranker import Reranker
    from localllm.generation.request import Request
    from localllm.generation.scheduler import Scheduler


E = TypeVar("E")


class Model(GenerationMixin, InspectionMixin):
    """An open model; use it in a `with` statement, or close it.

    Several generations may run at the same time, also in several threads: their tokens are batched into the same steps.

    Attributes:
        path: path of the (first) file.  arch: the architecture, such as "llama".  format: of most weights, such as
        "Q4_K".  name: the file's general.name, or "".  file: the mapped GGUFFile.  tokenizer: its Tokenizer.
        engine: the Engine that runs it.  session: its Session.  context: the maximum tokens of a prompt and its answer.
        trained_context: the context that the model was trained with.  prefixes: the PrefixStore, which keeps the KV
        cache of long prompts on disk, or None.  vision: the VisionAdapter, which encodes images.  ngrams: the
        NgramCache of earlier answers, from which drafts are proposed, or None.  warnings: lines to show to the user.
    """

    def __init__(
        self,
        file: GGUFFile,
        tokenizer: Tokenizer,
        engine: "Engine",
        chat_template: str | None = None,
        threads: int | None = None,
        prefixes: "PrefixStore | None" = None,
        ngrams: "NgramCache | None" = None,
    ):
        """Wrap an open file; threads: for draft models, embedders and rerankers that this model opens."""
        self.file, self.path, self.arch, self.format = file, file.path, engine.hyperparameters.arch, file.main_format
        name = file.metadata.get("general.name")
        self.name = name if isinstance(name, str) else ""
        self.context, self.trained_context = engine.context, engine.hyperparameters.context
        self.tokenizer, self.engine = tokenizer, engine
        advice, ignored = read_recommended(file.metadata, str(file.path))
        self.warnings = [warning for warning in (*tokenizer.warnings, engine.warning, *ignored) if warning]
        if self.context > self.trained_context:
            trained = f"the model's training context, {self.trained_context}"
            self.warnings.append(f"the context of {self.context} tokens exceeds {trained}; answers may get worse")
        self.prefixes, self.ngrams = prefixes, ngrams
        defaults = AnswerDefaults(options=GenerationOptions(sampling=advice))
        self.session = Session(PrefixCache(engine, prefixes, ngrams), tokenizer, chat_template, defaults)
        self.session.on_warning = self.warnings.append
        self._threads, self._opening = threads, threading.Lock()
        self.vision = VisionAdapter(file.path, engine, tokenizer, threads, prefixes is not None)
        self.session.encode_image = self.vision.encode
        self._draft_models: dict[str, Model] = {}
        self._embedders: dict[str | None, Embedder] = {}  # by their pooling
        self._rerankers: dict[str | None, Reranker] = {}

    @property
    def file_type(self) -> str:
        """The file's name for its mixture of formats, such as "Q4_K_M"."""
        return self.file.type_name

    @property
    def is_diffusion(self) -> bool:
        """Return whether it is a diffusion model, which denoises positions in any order."""
        return self.engine.hyperparameters.is_diffusion

    if not TYPE_CHECKING:  # names before 0.3
        sight, fills, written = map(RenamedAttribute, ("vision", "is_diffusion", "ngrams"))

        def __getattr__(self, name: str) -> NoReturn:
            from localllm.foreign_names import MODEL_NAMES, refuse_attribute  # seldom needed

            refuse_attribute(self, name, MODEL_NAMES)

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """Name the methods to a caller who knows llama-cpp-python or transformers."""
            raise TypeError("a Model cannot be called: use generate(prompt), chat(messages) or logits(ids)")

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.engine.hyperparameters.layers

    @property
    def width(self) -> int:
        """The number of columns of a hidden state."""
        return self.engine.hyperparameters.width

    @property
    def memory(self) -> int:
        """The memory that it holds, in bytes: weights, an opened projector, and the occupied part of the KV cache.

        Weights are pages of the file, which the system may drop when it needs memory. Draft models and embedders that
        it opened have their own.
        """
        weights = self.file.nbytes - self.engine.streamed_bytes + self.vision.nbytes
        return weights + self.engine.get_cache_usage()[0] * self.engine.bytes_per_token

    def weight(self, name: str) -> np.ndarray:
        """Dequantize a tensor of the file: float32, rows first, such as [4096, 1024] for 4096 outputs.

        name: as `localllm inspect --tensors` lists them, and as keys of `file.tensors`, whose values have format, shape
        and bytes. Raises UsageError for an unknown name, ModelError for an unsupported format.
        """
        from localllm.kernels.reference import dequantize

        if (tensor := self.file.tensors.get(require_string("name", name))) is None:
            from difflib import get_close_matches  # seldom needed

            close = get_close_matches(name, self.file.tensors, n=3) or [*self.file.tensors][:3]
            raise UsageError(f"there is no tensor {name!r}; similar or first ones: {', '.join(close)}")
        return dequantize(tensor)

    @property
    def metadata(self) -> Mapping[str, object]:
        """The file's metadata by key, such as "general.name"."""
        return self.file.metadata

    @property
    def sha256(self) -> str:
        """The SHA-256 of its file, 64 hexadecimal digits; of split files, those of all, joined by commas.

        A file is read once; later its hash comes from the cache. Raises OSError.
        """
        from localllm.files.cache.checksummed_cache import get_sha256  # seldom needed

        return ",".join(get_sha256(path) for path in self.file.parts)

    def _describe(self) -> dict[str, object]:
        return {
            "name": self.name or os.path.basename(self.path), "path": self.path, "architecture": self.arch,
            "format": self.file_type or self.format, "parameters": f"{self.file.parameters:,}",
            "layers": self.layers, "width": self.width, "vocabulary": self.vocab_size,
            "context": f"{self.context} of {self.trained_context}",
            "device": self.device,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<localllm.Model {', '.join(f'{name}: {value}' for name, value in self._describe().items())}>"

    def _repr_markdown_(self) -> str:
        rows = [f"| {name} | {escape_cell(str(value))} |" for name, value in self._describe().items()]
        return "\n".join(["| model | |", "|---|---|", *rows])

    @property
    def device(self) -> str:
        """The device that computes: "CPU", or a GPU's name."""
        return self.engine.device

    @property
    def files(self) -> list[str]:
        """The paths of all files read, including those of draft models."""
        drafts = [path for model in self._draft_models.values() for path in model.files]
        return [*self.file.parts, *drafts, *filter(None, [self.engine.draft_head_path])]

    def tokenize(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        """Return the token ids of a text; see Tokenizer.encode."""
        return self.tokenizer.encode(text, special, bos)

    def detokenize(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode token ids to text; see Tokenizer.decode."""
        return self.tokenizer.decode(ids, special)

    def sequence(self) -> "Sequence":
        """Create an empty token sequence; see its append, fork, truncate and close."""
        return self.engine.sequence()

    def step(self, requests: Ids[tuple["Sequence", Ids[int]]], precise: bool = True) -> list[np.ndarray]:
        """Append tokens to several sequences in one run; return the last logits of each, float32 [1, vocab].

        precise: keep activations in 16 bits instead of 8; with 8 bits, 8 sequences take little more than twice the time
        of one.
        Raises the errors of Sequence.append.
        """
        return self.engine.step(requests, precise)

    def logits(self, ids: Ids[int], precise: bool = True) -> np.ndarray:
        """Compute the logits after each token in one prefill: float32 [len(ids), vocab], unnormalized.

        precise: keep 16-bit activations; otherwise 8 bits, if there are many tokens. Raises the errors of
        Sequence.append.
        """
        if self.engine.hyperparameters.is_diffusion:
            return self.engine.forward_full(to_token_ids(ids))
        with closing(self.sequence()) as sequence:
            return sequence.append(to_token_ids(ids), "all", kernel_tokens=PRECISE_TOKENS if precise else 0)

    def embed(
        self,
        texts: str | Iterable[str | list[int]],
        dims: int | None = None,
        normalize: bool = True,
        role: str | None = None,
        overflow: str = "refuse",
        pooling: str | None = None,
        max_tokens: int | None = None,
    ) -> np.ndarray:
        """Embed texts or token ids: float32 [texts, width], or [width] for a single str.

        dims: keep only the first dimensions, for a Matryoshka model.  normalize: scale to length 1.  role: "query" or
        "document": prepend the model's own prompt.  overflow: texts that exceed the context: "refuse", "cut", or
        "split" and
        average.  pooling: "mean", "cls" or "last" instead of the file's.  max_tokens: cut texts after this many tokens.
        Raises ContextError, ModelError for a model that is not an embedding model, UsageError.
        """
        from localllm.generation.embedding.embedder import Embedder, EmbedOptions

        embedder = self._open_once(
            self._embedders, pooling, lambda options: Embedder(self.file, self.tokenizer, options, pooling)
        )
        options = EmbedOptions(dims, normalize, role, overflow, max_tokens)
        rows: np.ndarray = embedder.embed([texts] if isinstance(texts, str) else texts, options)
        return rows[0] if isinstance(texts, str) else rows

    def rerank(self, query: str, texts: Iterable[str], cut: bool = False) -> np.ndarray:
        """Score how well each text answers a query, with a reranker: float32 [texts], higher is better.

        cut: truncate texts that exceed the context. Raises ContextError, ModelError, UsageError.
        """
        from localllm.generation.embedding.reranker import Reranker

        reranker = self._open_once(self._rerankers, None, lambda options: Reranker(self.file, self.tokenizer, options))
        return reranker.rerank(query, require_iterable("texts", texts), cut)

    def _open_once(self, open_engines: dict[str | None, E], key: str | None, make: Callable[["EngineOptions"], E]) -> E:
        """Return an embedder or reranker of the model's file, opened on the first call and closed with the model."""
        from localllm.engine.options import EngineOptions

        with self._opening:
            if key not in open_engines:
                open_engines[key] = make(EngineOptions(self._threads, self.context))
            return open_engines[key]

    def resolve_drafter(
        self, speculate: "str | Model", progress: Callable[[int, int], None] | None = None
    ) -> "str | ModelDrafter":
        """Return GenerationOptions.speculate: a drafter for a draft model, or the name of a method unchanged.

        The first call with "draft:PATH" opens that model with this one's threads; it is closed with this one. (For
        other options,
        open it yourself and pass it.) If the file is a draft head for this model (EAGLE-3), it is attached, and the
        result is
        "mtp". progress: see open_model. Raises the errors of open_model, and UsageError if the vocabularies differ.
        """
        if isinstance(speculate, str):
            kind, _, path = speculate.partition(":")
            draft_model = self._open_draft_model(path, progress) if kind == "draft" else None
            if draft_model is None:
                return "mtp" if kind == "draft" else speculate
            speculate = draft_model
        if not isinstance(speculate, Model):
            choices = "'auto', 'mtp', 'ngram', 'off', 'draft:PATH' or a Model"
            raise UsageError(f"speculate must be {choices}, not {speculate!r}")
        drafter = ModelDrafter(speculate.session.cache, speculate.tokenizer)
        drafter.require_vocabulary(self.tokenizer)
        return drafter

    def _open_draft_model(self, path: str, progress: Callable[[int, int], None] | None) -> "Model | None":
        """Open the draft model at a path. If the file is a draft head, attach it to this model and return None."""
        with self._opening:
            if path not in self._draft_models and not attach_draft_head(path, self.session.cache, self.tokenizer):
                self._draft_models[path] = open_model(path, self._threads, progress=progress)
            return self._draft_models.get(path)

    def batch(
        self,
        requests: "Iterable[Request]",
        parallel: int | None = None,
        precise: bool = True,
        live: bool = False,
        memory: int | None = None,
    ) -> "Scheduler":
        """Create a scheduler that answers many requests (see Session.request) within the memory free now.

        live: requests may arrive at any time, as in `serve`, and prompts share their prefixes.  memory: maximum bytes
        of the KV
        cache; None: all free memory.
        """
        from localllm.generation.chunked_prefill import compute_max_prefill_tokens
        from localllm.generation.scheduler import PARALLEL, Scheduler
        from localllm.kernels.table import PAGE
        from localllm.system.memory import get_available_memory

        free = max(0, get_available_memory() - self.file.nbytes)
        room, size = free if memory is None else min(free, memory), self.engine.bytes_per_token
        places = max(self.context + PAGE, room // size) if size else sys.maxsize
        self.session.cache.collect()
        chunk = compute_max_prefill_tokens(self.file.parameters)
        cache = PrefixCache(self.engine, self.prefixes, self.ngrams, is_shared=True, is_live=True) if live else None
        return Scheduler(self.engine, self.tokenizer, requests, parallel or PARALLEL, chunk, places, precise, cache)

    def close(self) -> None:
        """Finish writing the prefix cache, free the memory and end the threads; do nothing in a forked process."""
        if was_forked(self.engine):
            return
        self.session.cache.collect()
        if self.prefixes:
            self.prefixes.close()
        if self.ngrams:
            self.ngrams.save()
        readers: list[Embedder | Reranker] = [*self._embedders.values(), *self._rerankers.values()]
        for resource in (*self._draft_models.values(), *readers, self.vision):
            resource.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and deepcopy, since a model is mapped memory and threads."""
        raise TypeError(f"a Model cannot be copied or pickled; call localllm.open({self.path!r})")

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.prefixes and kind:
            self.prefixes.close(wait=False)
        self.close()


def open_model(
    path: str | os.PathLike[str],
    threads: int | None = None,
    context: int | None = None,
    kv_type: str = "f16",
    backend: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    observer: "ImatrixCollector | None" = None,
    chat_template: str | None = None,
    cache: bool = True,
    gpu_layers: int | str = "auto",
    on_upload: Callable[[int, int], None] | None = None,
    mmproj: str | os.PathLike[str] | None = None,
    pan_and_scan: bool = False,
    rope: "RopeScaling | None" = None,
    lora: "str | os.PathLike[str] | Mapping[str, float]" = "",
    control_vector: "str | os.PathLike[str] | Mapping[str, float]" = "",
    control_layers: tuple[int, int] | None = None,
    memory: int | None = None,
) -> Model:
    """Open a GGUF file; `localllm.open` is this function.

    threads: None for all idle physical cores.  context: the maximum tokens of a prompt and its answer, 0 or None for
    the context that the model was trained with (memory is allocated on use).  kv_type: format of the KV cache: f16,
    f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, or separate ones as in "k=q8_0,v=q4_0".  backend: cpu, cuda or
    cuda:N, auto for a GPU if one works, or reference for plain NumPy.  gpu_layers: count of the last layers to run on
    the GPU, "all", or "auto" for as many as its memory holds.  progress(done, total): called while kernels are
    compiled, once per computer. on_upload(bytes, total): called while weights are copied to the GPU.  observer:
    collects statistics of activations. mmproj: path of the vision projector, None for the one next to the model.
    pan_and_scan: also encode crops of elongated images, with Gemma 3.  chat_template: the name of one in the file or in
    text.builtin_templates, or Jinja.  cache: keep prefixes of prompts and n-grams of answers in the user's cache
    folder, and use those of earlier processes.  rope: replaces the file's RoPE scaling, as in RopeScaling("yarn", 4.0,
    original_context=32768).  lora: path of an adapter's file or PEFT folder, or several with the scale that answers
    have by default, such as {"a.gguf": 1.0, "b/": 0.5}; each answer can change it (`lora` of GenerationOptions).
    control_vector: the same for control vectors, which all answers have.  control_layers: the first and the last layer
    that they change, None for all.  memory: bytes for the model on the CPU, None for what is available; of a larger
    model, the rest is read from the disk as it is needed.  Raises ModelError, MemoryLimitError, UsageError.
    """
    from localllm.engine.options import EngineOptions, parse_gpu_layers  # not needed to import this

    threads = None if threads is None else require_integer("threads", threads, 1)
    context = None if context is None else require_integer("context", context) or None
    kv_type, gpu_layers = require_string("kv_type", kv_type), parse_gpu_layers(gpu_layers)
    options = EngineOptions(
        threads, context, kv_type, backend, gpu_layers, progress, on_upload, observer, rope, parse_scales(lora),
        parse_scales(control_vector), control_layers, None if memory is None else require_integer("memory", memory, 1),
    )  # fmt: skip
    return open_with_options(path, options, chat_template, cache, mmproj, pan_and_scan)


def parse_scales(files: "str | os.PathLike[str] | Mapping[str, float]") -> tuple[tuple[str, float], ...]:
    """Pair each adapter's path with its scale: 1 for a single path; "" gives no pairs."""
    pairs = files.items() if isinstance(files, Mapping) else [(files, 1.0)] if files else []
    return tuple((os.fspath(path), float(scale)) for path, scale in pairs)


def open_with_options(
    path: str | os.PathLike[str],
    options: "EngineOptions",
    chat_template: str | None = None,
    cache: bool = True,
    mmproj: str | os.PathLike[str] | None = None,
    pan_and_scan: bool = False,
) -> Model:
    """Open a GGUF file with an EngineOptions; other parameters, and errors, as in open_model."""
    options.require_valid()
    file = GGUFFile.open(path)
    if options.rope:
        options.rope.apply(file.metadata, file.path)
    family, hyperparameters = load_architecture(file)  # rejects unsupported files before reading anything else
    if options.lora:
        from localllm.convert.adapters import open_adapters  # seldom needed

        options = replace(options, lora=open_adapters(options.lora, file.metadata, file.tensors))
    from localllm.engine.engine import Engine  # not needed to refuse a file
    from localllm.files.gguf.file import prefault

    prefault(file)
    tokenizer = load_tokenizer(file)
    if chat_template is not None and require_string("chat_template", chat_template) not in tokenizer.chat_templates:
        from localllm.text.builtin_templates import choose_template  # seldom needed

        choose_template(chat_template)
    if hyperparameters.bidirectional and not hyperparameters.is_diffusion:
        from localllm.engine.embedding_runner import EmbeddingOnlyEngine  # seldom needed

        if options.lora or options.control_vectors:
            raise UnsupportedError(f"{file.path}: adapters of embedding models are not supported")
        silent: Any = EmbeddingOnlyEngine(file.path, hyperparameters, options)
        return Model(file, tokenizer, silent, chat_template, options.threads)
    engine, prefixes, ngrams = Engine(file, options, (family, hyperparameters)), None, None
    if cache and options.backend != "reference" and not options.observer:
        from localllm.engine.prefix_store import PrefixStore

        prefixes = PrefixStore(engine, file) if not hyperparameters.encode and engine.device == "CPU" else None
        ngrams = NgramCache(engine.vocab_size, tokenizer.pieces)
    model = Model(file, tokenizer, engine, chat_template, options.threads, prefixes, ngrams)
    if mmproj is not None or pan_and_scan:
        model.vision.open_projector(mmproj, pan_and_scan)
    return model


def load_tokenizer(file: GGUFFile) -> Tokenizer:
    """Return the file's tokenizer. Raises ModelError, which names the file."""
    try:
        return Tokenizer.from_metadata(file.metadata, file.oddities, file.path)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open the tokenizer of a GGUF file, which may have no tensors. Raises ModelError."""
    from localllm.engine.trace.recorder import trace_model

    with GGUFFile.open(path) as file:
        with suppress(UnsupportedError):  # a damaged file is rejected even if only its tokenizer is needed
            module, hyperparameters = load_architecture(file)
            if file.tensors:
                trace_model(file, module.forward, Weights(file.tensors), hyperparameters, hyperparameters.context)
        return load_tokenizer(file)


def get_max_prompt_bytes(
    path: str | os.PathLike[str], context: int | None = None, rope: "RopeScaling | None" = None
) -> int:
    """Return the maximum bytes of UTF-8 of a prompt that fits a context; None or 0: the trained context.

    rope: see open_model. Reads only the file's header and vocabulary. Raises ModelError.
    """
    with GGUFFile.open(path) as file:
        if rope:
            rope.apply(file.metadata, file.path)
        _, hyperparameters = load_architecture(file)
        return load_tokenizer(file).compute_max_bytes(context or hyperparameters.context)
