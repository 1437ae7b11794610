"""The kinds of tokens that a GGUF file tells apart (tokenizer.ggml.token_type), and the ids of those that it names."""

import numpy as np

from localllm.files.gguf.metadata_reader import Checked, is_whole

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
PREFIX, ID = "tokenizer.ggml.", "_token_id"
NO_ID = -1, 0xFFFFFFFF  # as some files write that there is none


def of_kinds(types: bytearray, *kinds: int) -> list[int]:
    """The tokens of these types. Of 128256 it takes 0.1 ms to find them so, and 10 to look at one after the other."""
    return np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()


def special_id(keys: Checked, name: str, count: int) -> int | None:
    """Read the id of a special token; None where the file gives none, or one beyond its tokens, which is noted."""
    token = keys.raw(name + ID)
    if token is None or (is_whole(token) and token in NO_ID):
        return None
    if is_beyond(keys, name, count):
        keys.oddities.note(f"{keys.key(name + ID)} is {token}, of {count} tokens: ignored", keys.key(name + ID))
        return None
    return keys.whole(name + ID, None, 0, count - 1)


def is_beyond(keys: Checked, name: str, count: int) -> bool:
    """Whether the file gives an id that no token has; then it is as silent as without."""
    token = keys.raw(name + ID)
    return is_whole(token) and token >= count and token not in NO_ID
