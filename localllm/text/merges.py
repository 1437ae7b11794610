"""The merges of a byte-pair vocabulary, checked to be of two pieces each."""

from collections.abc import Iterable, Mapping

from localllm.errors import ModelError
from localllm.files.cache.validated_cache import is_known, remember
from localllm.files.gguf.header import Metadata
from localllm.files.gguf.metadata_reader import Checked, show
from localllm.text.token_types import PREFIX


def merge_ranks(keys: Checked, ids: Mapping[str, int], needed: bool) -> tuple[dict[str, float], bool]:
    """Rank each "left right" pair by its first position in the file; also whether all merges make tokens."""
    merges = keys.strings("merges") if needed or keys.has("merges") else []
    is_usual = check_merges(keys, merges, ids)
    return dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True)), is_usual


def check_merges(keys: Checked, merges: list[str], ids: Mapping[str, int]) -> bool:
    """Return whether all merges are of two tokens and make one.

    Checking 280k takes 0.1 s, so the result is cached. Raises ModelError for what is no merge. One of pieces that are
    no tokens is odd: what it makes is written by the tokens of its characters, as llama.cpp does.
    """
    data, is_cached = keys.metadata, ids.keys()
    mark = data.fingerprint(PREFIX + "tokens", PREFIX + "merges") if isinstance(data, Metadata) else None
    if mark and is_known("merges", mark):
        return True
    # Sets and joined strings, because to look at one merge after the other takes four times as long.
    if merges and (
        not all([" " in merge for merge in merges])
        or " ".join(merges).count(" ") != 2 * len(merges) - 1
        or set(" ".join(merges).split(" ")) - is_cached
        or set("\0".join(merges).replace(" ", "").split("\0")) - is_cached
    ):
        note_odd_merges(keys, merges, ids)
        return False
    if mark:
        remember("merges", mark)
    return True


def note_odd_merges(keys: Checked, merges: Iterable[str], ids: Mapping[str, int]) -> None:
    """Note how many merges have, or make, pieces that are no tokens.

    Raises ModelError for one that is not of two pieces.
    """
    odd: list[str] = []
    for position, merge in enumerate(merges):
        parts = merge.split(" ")
        if len(parts) != 2 or "" in parts:
            problem = f"expected two pieces with a space, found {merge[:40]!r}"
            raise ModelError(f"{PREFIX}merges: entry {position}: {problem}")
        odd += [piece for piece in (*parts, "".join(parts)) if piece not in ids][:1]
    if odd:
        count = "a merge has" if len(odd) == 1 else f"{len(odd)} merges have"
        keys.oddities.note(f"{count} a piece that is no token ({show(odd[0])})")
