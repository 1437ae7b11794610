"""Copy tokens from the middle of one sequence to the end of another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.engine.engine import Engine
    from localllm.engine.sequence import Sequence


def append_from(engine: "Engine", sequence: "Sequence", source: "Sequence", first: int, count: int) -> bool:
    """Append `count` tokens from position `first` of another sequence: copy their keys and values, and rotate the keys.

    The copies still depend on the text that precedes them in the source: keys and values of deeper layers were computed
    with it. Return False and change nothing if either sequence's state is incomplete or has images. Raises UsageError
    if the model's keys cannot be moved; MemoryLimitError.
    """
    with engine.lock:
        engine.prepare_shift()
        place = len(sequence.tokens)
        is_whole = all(each.store.truncate(len(each.tokens)) == len(each.tokens) for each in (sequence, source))
        if not is_whole or sequence.images or source.images or place + count > engine.context:
            return False
        try:
            if not sequence.store.append_from(source.store, first, place, count):
                return False
            if first != place:
                engine.backend.rotate_keys(sequence.store, place, place + count, first - place)
        except BaseException:
            sequence.store.truncate(place)
            raise
        sequence.commit_copies(source.tokens[first : first + count])
        return True
