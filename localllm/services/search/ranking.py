"""Rank passages for a question: BM25 and embeddings, fused by reciprocal rank, then an optional reranker."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.services.search.files import FileFilter, iter_text_files
from localllm.services.search.index import PassageIndex, get_index_path
from localllm.services.search.passages import SIZE, Passage, compute_passage_size
from localllm.system.files import get_cache_folder

if TYPE_CHECKING:
    from localllm.engine.options import EngineOptions
    from localllm.generation.embedding.embedder import EmbedOptions
    from localllm.services.search.embed import AnyEmbedder

RANK = 20  # k of reciprocal rank fusion (Cormack et al. 2009 take 60, for longer lists)
WORDS = 0.5  # weight of BM25 ranks relative to embedding ranks (51 of 60 questions right; with 1.0, 47)
DEPTH = 100  # passages to fuse from each of the two rankings
RERANKED = 30  # of these, the best are scored by the reranker
COMMON_WORDS = (
    "a an and are as at be by can do does for from have how i if in is it me my not of on or so that the there this to "
    "was we what when where which who why will with you your"
)
COMMON = frozenset(COMMON_WORDS.split())
Progress = Callable[[str], object]


@frozen
class SearchHit:
    """A passage that matches a question.

    Attributes:
        score: higher is better; comparable only within one search.
        cosine: similarity of its vector to the question's, None without an embedding model.
    """

    passage: Passage
    score: float
    cosine: float | None = None


@frozen
class SearchModels:
    """The models of a search.

    Attributes:
        embedder, reranker: their paths; None: rank by words only, or do not rerank.
    """

    engine: "EngineOptions"
    embedder: str | None = None
    reranker: str | None = None


class PassageSearch:
    """A search of files' passages, or lines, for any number of questions. A context manager.

    Attributes:
        index: the index of the passages.
    """

    def __init__(
        self,
        names: Sequence[str],
        filter_: FileFilter,
        models: SearchModels,
        show: Progress = lambda text: None,
        lines: Sequence[str] | None = None,
    ):
        """Open the models and update the index.

        lines: strings to rank instead of files.  show: called with the progress. Raises ModelError, UsageError.
        """
        self._models, self._show, self._stack = models, show, ExitStack()
        self._names, self._wanted, self._has_files = names, filter_, lines is None
        self._embedder: AnyEmbedder | None = None
        if self._has_files:
            self._list_files()  # report missing ones before opening a model
        with ExitStack() as opening:
            size, place = SIZE, ""
            if models.embedder is not None:
                size, place = self._open(models.embedder, opening)
            path = (
                None
                if lines is not None
                else get_index_path(get_cache_folder() / "search", names, [size, place, filter_])
            )
            self.index = opening.enter_context(PassageIndex(path, size))
            if lines is not None:
                passages = (Passage("", number, number, line) for number, line in enumerate(lines, 1) if line.strip())
                self.index.add(passages)
            self.update()
            self._stack = opening.pop_all()

    def _list_files(self) -> list[str]:
        return [*iter_text_files(self._names, self._wanted)]

    def update(self) -> None:
        """Index changed files and compute missing vectors. Raises UsageError."""
        if self._has_files:
            self.index.update(self._list_files(), lambda done, count: self._show(f"{done} of {count} files read"))
        if self._embedder is not None:
            embed, options = self._embedder.embed, self._build_options("document")
            self.index.embed(
                lambda texts: embed(texts, options),
                lambda done, count: self._show(f"{done} of {count} passages embedded"),
            )

    def _open(self, path: str, stack: ExitStack) -> tuple[int, str]:
        """Open the embedding model; return the passage size in characters and the model's fingerprint."""
        from localllm.generation.embedding.embedder import EmbedOptions
        from localllm.services.search.embed import EmbedJob, compute_fingerprint, open_embedder

        job = EmbedJob(path, EmbedOptions(role="document", overflow="cut"), self._models.engine)
        self._embedder = stack.enter_context(open_embedder(job))
        return compute_passage_size(self._embedder.context), compute_fingerprint(job)

    def _build_options(self, role: str) -> "EmbedOptions":
        """Return options to embed a "query" or "document", with the model's own prompt if it has one."""
        from localllm.generation.embedding.embedder import EmbedOptions

        usual = None if self._embedder is None else self._embedder.get_usual_role(role)
        return EmbedOptions(role=usual, overflow="cut")

    @property
    def warnings(self) -> Sequence[str]:
        """Lines about the embedding model, and about documents that the latest update could not read."""
        of_model = () if self._embedder is None else self._embedder.warnings
        return [*of_model, *summarize_unreadable(self.index.unreadable)]

    def __enter__(self) -> "PassageSearch":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def find(self, question: str, top: int, threshold: float | None = None) -> list[SearchHit]:
        """Return the best `top` passages for a question.

        threshold: minimum cosine, which needs an embedding model. Raises UsageError.
        """
        if threshold is not None and self._embedder is None:
            raise UsageError("threshold is a cosine similarity, which needs an embedding model: name one")
        scores, cosines = defaultdict[int, float](float), dict[int, float]()
        for rank, id in enumerate(self.index.search_words(extract_words(question), DEPTH), 1):
            scores[id] += (1.0 if self._embedder is None else WORDS) / (RANK + rank)
        if self._embedder is not None:
            nearest = self.index.search_vectors(self._embedder.embed([question], self._build_options("query"))[0])
            cosines = dict(nearest)
            for rank, (id, _) in enumerate(nearest[:DEPTH], 1):
                scores[id] += 1 / (RANK + rank)
        ids = sorted(scores, key=lambda id: (-scores[id], id))
        if threshold is not None:
            ids = [id for id in ids if cosines.get(id, -1) >= threshold]
        if self._models.reranker is not None:
            scores |= self._rerank(question, ids[:RERANKED])
            ids = sorted(ids[:RERANKED], key=lambda id: -scores[id])
        passages = drop_repetitions([(id, self.index.read_passage(id)) for id in ids], top)
        return [SearchHit(passage, scores[id], cosines.get(id)) for id, passage in passages]

    def _rerank(self, question: str, ids: Sequence[int]) -> dict[int, float]:
        """Return the reranker's scores by passage id."""
        from localllm.services.search.embed import open_reranker

        assert self._models.reranker is not None
        with open_reranker(self._models.reranker, self._models.engine) as model:
            values = model.rerank(question, [self.index.read_passage(id).embedded for id in ids], True)
        return {id: float(score) for id, score in zip(ids, values, strict=True)}


def extract_words(question: str) -> list[str]:
    """Return the words of a question without common ones, unless it has no others."""
    words = [*dict.fromkeys(re.findall(r"\w+", question.lower()))]
    return [word for word in words if word not in COMMON] or words


def drop_repetitions(ranked: Sequence[tuple[int, Passage]], top: int) -> list[tuple[int, Passage]]:
    """Return the first `top` passages, without those that mostly repeat a better passage of the same file."""
    passages = list[tuple[int, Passage]]()
    for id, passage in ranked:
        if len(passages) == top:
            break
        if not any(earlier.path == passage.path and is_repetition(passage, earlier) for _, earlier in passages):
            passages.append((id, passage))
    return passages


def is_repetition(passage: Passage, earlier: Passage) -> bool:
    """Return whether most lines of a passage overlap with another one of its file, or have the same text."""
    size = passage.last - passage.first + 1
    lines, earlier_lines = ({*map(str.strip, each.text.splitlines())} - {""} for each in (passage, earlier))
    shared = min(earlier.last, passage.last) - max(earlier.first, passage.first) + 1
    return shared > size / 2 or len(lines & earlier_lines) > len(lines) / 2


SHOWN_FILES = 5  # unreadable documents that are named


def summarize_unreadable(lines: Sequence[str]) -> list[str]:
    """Return warnings about documents that could not be read: at most SHOWN_FILES, then how many more there are."""
    more = len(lines) - SHOWN_FILES
    return [f"left out: {line}" for line in lines[:SHOWN_FILES]] + (
        [f"left out: {more} more files"] if more > 0 else []
    )
