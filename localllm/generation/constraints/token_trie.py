"""A trie of the texts of a vocabulary's tokens, in arrays, so that NumPy can process all tokens at once."""

from typing import TYPE_CHECKING

import numpy as np

from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


class TokenTrie:
    """A trie of tokens' texts. Nodes are numbered by depth; 0 is the empty text.

    Attributes:
        texts: texts of each token, b"" for tokens without text.
        is_token: bool [tokens], tokens that can be part of an answer, with or without text.  ends: end tokens.
    """

    def __init__(self, texts: list[bytes], is_token: np.ndarray, ends: list[int]):
        """Build the trie, which takes 0.15 s for 151 thousand tokens."""
        self.texts, self.is_token, self.ends = texts, is_token, ends
        order = sorted(range(len(texts)), key=texts.__getitem__)
        lengths = np.array([len(texts[token]) for token in order])
        starts = np.cumsum(lengths) - lengths
        text = np.frombuffer(b"".join(texts[token] for token in order), np.uint8)
        self._node_of = np.zeros(len(texts), np.int32)  # of tokens
        self._levels: list[tuple[np.ndarray, np.ndarray]] = []  # of depths from 1: the nodes' parents, and last bytes
        tokens, node, nodes, depth = np.array(order), np.zeros(len(texts), np.int32), 1, 0
        while (longer := lengths > depth).any():
            tokens, lengths, starts, node = tokens[longer], lengths[longer], starts[longer], node[longer]
            byte = text[starts + depth]
            is_new = np.ones(len(tokens), bool)
            is_new[1:] = (node[1:] != node[:-1]) | (byte[1:] != byte[:-1])
            self._levels.append((node[is_new], byte[is_new]))
            node = (nodes - 1 + np.cumsum(is_new)).astype(np.int32)
            nodes, depth = nodes + len(self._levels[-1][0]), depth + 1
            ended = lengths == depth
            self._node_of[tokens[ended]] = node[ended]
        self._nodes = nodes

    def merge(self, class_of: np.ndarray) -> "MergedTrie":
        """Merge nodes whose bytes have the same class, int32 [256], in 15 ms; the result is several times smaller."""
        classes = int(class_of.max()) + 1
        merged = np.zeros(self._nodes, np.int32)
        parents, columns = [_NONE], [np.zeros(1, np.int32)]
        merged_above, node, nodes = 0, 1, 1  # merged nodes above the last level, nodes, and merged ones
        for parent, byte in self._levels:
            key = (merged[parent] - merged_above) * classes + class_of[byte]
            is_used = np.zeros((nodes - merged_above) * classes, bool)
            is_used[key] = True
            used_classes = np.flatnonzero(is_used).astype(np.int32)
            number = np.empty(len(is_used), np.int32)
            number[used_classes] = np.arange(nodes, nodes + len(used_classes))
            merged[node : node + len(parent)] = number[key]
            parents.append(used_classes // classes + merged_above)
            columns.append(used_classes % classes)
            merged_above, node, nodes = nodes, node + len(parent), nodes + len(used_classes)
        counts = np.bincount(np.concatenate(parents), minlength=nodes).astype(np.int32)
        first = (1 + np.cumsum(counts) - counts).astype(np.int32)
        return MergedTrie(np.concatenate(columns), first, counts, merged[self._node_of])


_NONE = np.zeros(0, np.int32)


@frozen
class MergedTrie:
    """A trie that stores a node's children consecutively.

    Attributes:
        column: int32 [nodes], class of the last byte.  first, counts: int32 [nodes], first child and number of
        children.  node_of: int32 [tokens], node of each token.
    """

    column: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    node_of: np.ndarray


def build_trie(tokenizer: "Tokenizer", size: int) -> TokenTrie:
    """Build the trie of a tokenizer; special tokens, and padding up to `size` tokens, have no text."""
    marks = tokenizer.mark_ids | set(tokenizer.end_ids)
    texts = [b"" if token in marks else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    is_token = np.arange(size) < tokenizer.vocab_size
    is_token[list(tokenizer.end_ids)] = False
    return TokenTrie(texts + [b""] * (size - len(texts)), is_token, sorted(tokenizer.end_ids))
