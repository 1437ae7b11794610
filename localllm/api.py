"""A model, opened: what the Python API and the command line work with."""

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from localllm.arch import architecture
from localllm.arch.weights import Weights
from localllm.engine.forks import was_forked
from localllm.errors import ModelError, UnsupportedError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.mixin import GenerationMixin
from localllm.generation.prefix_cache import PrefixCache
from localllm.generation.sampling.options import read_recommended
from localllm.generation.session import Session
from localllm.generation.speculation.draft_model import ModelDrafter
from localllm.generation.speculation.eagle import attach_draft_head
from localllm.generation.speculation.ngram_cache import NgramCache, vocabulary_name
from localllm.generation.vision.adapter import VisionAdapter
from localllm.text.tokenizer import Tokenizer
from localllm.values import require_several, require_text, token_ids, whole_number

if TYPE_CHECKING:
    from localllm.arch.rope_scaling import RopeScaling
    from localllm.engine.engine import Engine
    from localllm.engine.memory.prefix_store import PrefixStore
    from localllm.engine.options import EngineOptions
    from localllm.engine.sequence import Sequence
    from localllm.engine.trace.imatrix_collector import ImatrixCollector
    from localllm.generation.request import Request
    from localllm.generation.scheduler import Scheduler


RENAMED = {"sight": "vision", "fills": "is_diffusion"}  # attributes of a Model before 0.3


class Model(GenerationMixin):
    """A model that is open. Use it in a `with` statement, or close it.

    Several generations may run at the same time, also in several threads: they share runs of the model.

    Attributes:
        path: of its (first) file.  arch: its architecture, as "llama".  format: of most of its weights, as "Q4_K".
        file_type: what the file calls its formats, as "Q4_K_M".  name: what it calls itself, or "".
        file: the file itself, mapped.  tokenizer: its Tokenizer.  engine: what computes.  session: its conversation.
        context: how many tokens a prompt and its answer may have together.  trained_context: what it was made for.
        prefixes: what is kept of long prompts from process to process, or None.  vision: encodes images.
        written: what was written before, which guesses come from, or None.
        warnings: lines that the user should see.
    """

    def __init__(
        self,
        file: GGUFFile,
        tokenizer: Tokenizer,
        engine: "Engine",
        chat_template: str | None = None,
        threads: int | None = None,
        prefixes: "PrefixStore | None" = None,
        written: "NgramCache | None" = None,
    ):
        """Wrap an opened file; threads: for other models that this one opens."""
        self.file, self.path, self.arch, self.format = file, file.path, engine.hyperparameters.arch, file.main_format
        self.file_type, name = file.type_name, file.metadata.get("general.name")
        self.name = name if isinstance(name, str) else ""
        self.context, self.trained_context = engine.context, engine.hyperparameters.context
        self.tokenizer, self.engine = tokenizer, engine
        advice, ignored = read_recommended(file.metadata, str(file.path))
        self.warnings = [warning for warning in (*tokenizer.warnings, engine.warning, *ignored) if warning]
        if self.context > self.trained_context:
            trained = f"{self.trained_context} tokens that the model was trained for"
            self.warnings.append(f"the context of {self.context} tokens exceeds the {trained}; answers may get worse")
        self.prefixes, self.written = prefixes, written
        self.session = Session(PrefixCache(engine, prefixes, written), tokenizer, chat_template, advice)
        self._threads, self._opening = threads, threading.Lock()
        self.vision = VisionAdapter(file.path, engine, tokenizer, threads, prefixes is not None)
        self.session.encode_image = self.vision.encode
        self._draft_models: dict[str, Model] = {}
        self._readers: dict[tuple[str, str | None], Any] = {}

    @property
    def is_diffusion(self) -> bool:
        """Return whether it is a diffusion model, which denoises positions in any order."""
        return self.engine.hyperparameters.fills

    if not TYPE_CHECKING:  # type checkers report them

        def __getattr__(self, name: str) -> Any:
            """Return a method by its name before 0.3."""
            if name not in RENAMED or "session" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            warnings.warn(f"Model.{name} is Model.{RENAMED[name]} now", DeprecationWarning, stacklevel=2)
            return getattr(self, RENAMED[name])

    @property
    def device(self) -> str:
        """The device that computes: "CPU", or a GPU's name."""
        return self.engine.device

    @property
    def files(self) -> list[str]:
        """Return the paths of all files that were read, those of draft models included."""
        drafts = [path for model in self._draft_models.values() for path in model.files]
        return [*self.file.parts, *drafts, *filter(None, [self.engine.head_path])]

    def tokenize(self, text: str, special: bool = False, bos: bool = False) -> list[int]:
        """Return the token ids of a text; see Tokenizer.encode."""
        return self.tokenizer.encode(text, special, bos)

    def detokenize(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode token ids to text; see Tokenizer.decode."""
        return self.tokenizer.decode(ids, special)

    def sequence(self) -> "Sequence":
        """Make a new sequence of tokens: append, fork, truncate, close."""
        return self.engine.sequence()

    def step(self, requests: Ids[tuple["Sequence", Ids[int]]], precise: bool = True) -> list[np.ndarray]:
        """Append tokens to several sequences in one run of the model; of each the last logits, float32 [1, vocab].

        precise: keep activations in 16 bits; without, 8 sequences cost little more than twice what one costs. Raises
        as Sequence.append.
        """
        return self.engine.step(requests, precise)

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Compute the logits after each token in one prefill: float32 [len(ids), vocab], unnormalized.

        Raises as Sequence.append.
        """
        if self.engine.hyperparameters.fills:
            return self.engine.forward_full(token_ids(ids))
        sequence = self.sequence()
        try:
            return sequence.append(token_ids(ids), "all")
        finally:
            sequence.close()

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
        """Embed texts or their token ids: float32 [texts, width], or [width] of a single str; similar ones are close.

        dims: only the first numbers, of a Matryoshka model; normalize: to the length 1; role: "query" or "document", to
        put the model's own prompt in front; overflow: what is done with texts that are too long, "refuse", "cut" or
        "split" and averaged; pooling: "mean", "cls" or "last" instead of what the file says; max_tokens: cut texts
        after this many. Raises ContextError, ModelError for a model that was not made for that, UsageError.
        """
        from localllm.generation.embedding.embedder import Embedder, EmbedOptions

        made = self._open_engine(
            "embedder", pooling, lambda options: Embedder(self.file, self.tokenizer, options, pooling)
        )
        options = EmbedOptions(dims, normalize, role, overflow, max_tokens)
        result: np.ndarray = made.embed([texts], options)[0] if isinstance(texts, str) else made.embed(texts, options)
        return result

    def rerank(self, query: str, texts: Iterable[str], cut: bool = False) -> np.ndarray:
        """Return how well each text answers a query, by a reranker: float32 [texts], larger is better.

        cut: texts that are too long. Raises ContextError, ModelError, UsageError.
        """
        from localllm.generation.embedding.reranker import Reranker

        made = self._open_engine("reranker", None, lambda options: Reranker(self.file, self.tokenizer, options))
        result: np.ndarray = made.rerank(query, require_several("texts", texts), cut)
        return result

    def _open_engine(self, kind: str, pooling: str | None, make: Callable[["EngineOptions"], Any]) -> Any:
        """Return an encoder of whole texts; it is made at the first call and closed with the model."""
        from localllm.engine.options import EngineOptions

        with self._opening:
            if (kind, pooling) not in self._readers:
                self._readers[kind, pooling] = make(EngineOptions(self._threads, self.context))
            return self._readers[kind, pooling]

    def drafter(
        self, speculate: "str | Model", progress: Callable[[int, int], None] | None = None
    ) -> "str | ModelDrafter":
        """Return a value for GenerationOptions.speculate: an opened draft model, or "ngram" and the like unchanged.

        The model of "draft:PATH" is opened with as many threads as this one, the first time, and closed with it (to
        choose how, open it yourself); a draft head for this model (EAGLE-3) is "mtp" from then on. progress: as in
        open_model, which documents the errors; also UsageError if its vocabulary is a different one.
        """
        if isinstance(speculate, str):
            kind, _, path = speculate.partition(":")
            made = self._draft_model(path, progress) if kind == "draft" else None
            if made is None:
                return "mtp" if kind == "draft" else speculate
            speculate = made
        if not isinstance(speculate, Model):
            known = "'auto', 'mtp', 'ngram', 'off', 'draft:PATH' or a Model"
            raise UsageError(f"speculate should be {known}, not {speculate!r}")
        drafter = ModelDrafter(speculate.session.cache, speculate.tokenizer)
        drafter.require_vocabulary(self.tokenizer)
        return drafter

    def _draft_model(self, path: str, progress: Callable[[int, int], None] | None) -> "Model | None":
        """Return the draft model of a path; None for a file that is only a draft head, which is attached instead."""
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
        """Make a scheduler that answers many requests (see Session.request) within the memory that is free now.

        live: as in Batch.  memory: the most bytes for the KV cache, None for all that is free.
        """
        from localllm.generation.chunked_prefill import most_between_steps
        from localllm.generation.scheduler import PARALLEL, Scheduler
        from localllm.kernels.arguments import PAGE
        from localllm.system.memory import available_memory

        room = max(0, available_memory() - self.file.nbytes)
        room = room if memory is None else min(room, memory)
        places = max(self.context + PAGE, room // self.engine.place_bytes) if self.engine.place_bytes else sys.maxsize
        self.session.cache.collect()
        chunk = most_between_steps(self.file.parameters)
        cache = PrefixCache(self.engine, self.prefixes, self.written, is_shared=True, is_live=True) if live else None
        return Scheduler(self.engine, self.tokenizer, requests, parallel or PARALLEL, chunk, places, precise, cache)

    def close(self) -> None:
        """Free the memory and end the threads, once the prefix cache has been written.

        In a process that was forked from the model's there is nothing to do.
        """
        if was_forked(self.engine):
            return
        self.session.cache.collect()
        if self.prefixes:
            self.prefixes.close()
        if self.written:
            self.written.save()
        for other in (*self._draft_models.values(), *self._readers.values(), self.vision):
            other.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and deepcopy: a model is mapped memory and threads."""
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
) -> Model:
    """Open a GGUF file; `localllm.open` is this function.

    threads: None for as many as the computer has physical cores to spare; context: the most tokens that a prompt and
    its answer may have together, 0 or None for what the model was trained for (memory is taken as it is used); kv_type:
    how keys and values are kept: f16, f32, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl, or each its own way as in
    "k=q8_0,v=q4_0"; backend: cpu, cuda or cuda:N for a graphics card, auto for a card if there is one that works, or
    reference for plain NumPy; gpu_layers: how many of the last layers the card gets, a number, "all", or "auto" for as
    many as it has room for;
    progress(done, total): called while kernels are compiled, once per computer; on_upload(bytes, total): while weights
    go to the card; observer: sums up what the matrices meet; mmproj: the vision projector, None for
    the one next to the model; pan_and_scan: crops of long images, too, with Gemma 3; chat_template: the name of one in
    the file or text.builtin_templates, or Jinja; cache: find what earlier processes have read and written in the user's
    cache folder, and keep there what this one does; rope: scale positions otherwise than the file says, as in
    RopeScaling("yarn", 4.0, original_context=32768). Raises ModelError, MemoryLimitError, UsageError.
    """
    from localllm.engine.options import EngineOptions, layers_of  # not needed to import this

    threads = None if threads is None else whole_number("threads", threads, 1)
    context = None if context is None else whole_number("context", context) or None
    kv_type, gpu_layers = require_text("kv_type", kv_type), layers_of(gpu_layers)
    options = EngineOptions(threads, context, kv_type, backend, gpu_layers, progress, on_upload, observer, rope)
    return open_with_options(path, options, chat_template, cache, mmproj, pan_and_scan)


def open_with_options(
    path: str | os.PathLike[str],
    options: "EngineOptions",
    chat_template: str | None = None,
    cache: bool = True,
    mmproj: str | os.PathLike[str] | None = None,
    pan_and_scan: bool = False,
) -> Model:
    """Open a GGUF file with the engine's options as they are; others, and errors, as of open_model."""
    options.require_valid()
    file = GGUFFile.open(path)
    if options.rope:
        options.rope.apply(file.metadata, file.path)
    family, hyperparameters = architecture(file)  # refuses what is not supported, before anything else is read
    from localllm.engine.engine import Engine  # not needed to refuse a file
    from localllm.files.gguf.prefault import prefault

    prefault(file)
    tokenizer = tokenizer_of(file)
    if chat_template is not None and require_text("chat_template", chat_template) not in tokenizer.chat_templates:
        from localllm.text.builtin_templates import choose_template  # seldom needed

        choose_template(chat_template)
    if hyperparameters.bidirectional and not hyperparameters.fills:
        from localllm.engine.embedding_only import EmbeddingOnlyEngine  # seldom needed

        silent: Any = EmbeddingOnlyEngine(file.path, hyperparameters, options)
        return Model(file, tokenizer, silent, chat_template, options.threads)
    engine, prefixes, written = Engine(file, options, (family, hyperparameters)), None, None
    if cache and options.backend != "reference" and not options.observer:
        from localllm.engine.memory.prefix_store import PrefixStore

        prefixes = PrefixStore(engine, file) if not hyperparameters.encode and engine.device == "CPU" else None
        written = NgramCache(engine.vocab_size, vocabulary_name(tokenizer.pieces))
    model = Model(file, tokenizer, engine, chat_template, options.threads, prefixes, written)
    if mmproj is not None or pan_and_scan:
        model.vision.use(mmproj, pan_and_scan)
    return model


def tokenizer_of(file: GGUFFile) -> Tokenizer:
    """Return the file's tokenizer. Raises ModelError, which names the file."""
    try:
        return Tokenizer.from_metadata(file.metadata, file.oddities)
    except ModelError as error:
        raise type(error)(f"{file.path}: {error}") from None


def open_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open the tokenizer of a GGUF file, which may hold a vocabulary only. Raises ModelError."""
    from localllm.engine.trace.recorder import trace_model

    with GGUFFile.open(path) as file:
        with suppress(UnsupportedError):  # a damaged file is refused, whatever is wanted of it
            module, hyperparameters = architecture(file)
            if file.tensors:
                trace_model(file, module.forward, Weights(file.tensors), hyperparameters, hyperparameters.context)
        return tokenizer_of(file)


def most_prompt_bytes(
    path: str | os.PathLike[str], context: int | None = None, rope: "RopeScaling | None" = None
) -> int:
    """Return the most bytes of UTF-8 that a prompt for a context can have; None or 0: the trained context.

    Raises ModelError.

    rope: as of open_model. Reads the file's header and vocabulary.
    """
    with GGUFFile.open(path) as file:
        if rope:
            rope.apply(file.metadata, file.path)
        _, hyperparameters = architecture(file)
        return tokenizer_of(file).most_bytes(context or hyperparameters.context)


def warmup(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> None:
    """Compile the kernels that a model needs, so that its first start is as fast as later ones."""
    with open_model(path, progress=progress) as model:
        model.engine.prepare_all()
        if (h := model.engine.hyperparameters).bidirectional and not h.fills:
            from localllm.engine.embedding_runner import EmbeddingRunner
            from localllm.engine.options import EngineOptions

            with closing(EmbeddingRunner(model.file, str(h.pooling), EngineOptions(progress=progress))) as reader:
                reader.prepare_all()
