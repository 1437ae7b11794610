"""Token types of GGUF files (tokenizer.ggml.token_type), and the ids of named tokens."""

import numpy as np

from localllm.files.gguf.metadata_reader import Checked, is_whole

UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
PREFIX, ID = "tokenizer.ggml.", "_token_id"
NO_ID = -1, 0xFFFFFFFF  # as some files write that there is none


def tokens_of_types(types: bytearray, *kinds: int) -> list[int]:
    """List the tokens of these types.

    Of 128256 it takes 0.1 ms to find them so, and 10 to look at one after the other.
    """
    return np.flatnonzero(np.isin(np.frombuffer(types, np.uint8), kinds)).tolist()


def special_id(keys: Checked, name: str, count: int) -> int | None:
    """Read the id of a special token; None without one, or for an invalid one, which is noted."""
    token = keys.raw(name + ID)
    if token is None or (is_whole(token) and token in NO_ID):
        return None
    if has_invalid_id(keys, name, count):
        keys.oddities.note(f"{keys.key(name + ID)} is {token}, of {count} tokens: ignored", keys.key(name + ID))
        return None
    return keys.whole(name + ID, None, 0, count - 1)


def has_invalid_id(keys: Checked, name: str, count: int) -> bool:
    """Return whether the file gives an id that no token has, which is ignored."""
    token = keys.raw(name + ID)
    return is_whole(token) and token >= count and token not in NO_ID
