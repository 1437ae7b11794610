"""Acquire sequences of a prefix cache, and restore prompts from its files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from localllm.engine.prefix_store import CachedPrefix, PrefixStore
from localllm.generation.prefix_cache import CachedSequence, PrefixCache, PrefixQuery


@contextmanager
def acquire(cache: PrefixCache, ids: Sequence[int], **how: Any) -> Iterator[CachedSequence]:
    """Yield a sequence of PrefixCache.begin; give it back and collect it at the end."""
    begun = cache.acquire_sequence(PrefixQuery(ids, **how))
    try:
        yield begun
    finally:
        cache.queue_release(begun.sequence)
    cache.collect()


def restored(store: PrefixStore, ids: list[int]) -> CachedPrefix | None:
    """Return a sequence with the longest stored prefix of a prompt."""
    stored = store.find_prefix(ids)
    while stored:
        if read := store.load(stored):
            return read
        stored = store.find_prefix(ids, len(stored.ids) - 1)
    return None
