"""Convert the vocabulary of a model to the forms that constraints need."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from localllm.frozen import frozen

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from localllm.text.tokenizer import Tokenizer


BYTES = 256  # tokens of one byte each, which extend a vocabulary
JSON_MARK = "<[JSON]>"  # in a grammar: the token before JSON, which no answer contains
_SPELLED = re.compile(rb"\\[u/]|\x7f|[0-9][eE]|(?<!\\)(?:\\\\)*\\$")  # what llguidance may not accept
_EXPONENT = re.compile(rb"[eE][+-]?[0-9]*(?![+\-.0-9A-Za-z_])")


@frozen
class SpellingVocabulary:
    """A vocabulary for llguidance, with an additional token for each byte and one that marks JSON.

    Attributes:
        size: number of tokens that an answer may contain.
        texts: bytes of each token; b"" for special tokens.
        spelled: tokens with a spelling that llguidance may not accept, outside of strings and if they begin in one.
        by_first: tokens by their first byte.  exponents: tokens that may continue a number with its exponent.
    """

    tokens: "LLTokenizer"
    size: int
    texts: list[bytes]
    spelled: tuple[list[int], list[int]]
    by_first: dict[int, list[int]]
    exponents: list[int]

    @property
    def mark(self) -> int:
        """The token that marks JSON."""
        return self.size + BYTES

    def with_slices(self, is_json: bool) -> "SpellingVocabulary":
        """Return the vocabulary with slices of tokens that are often allowed, in JSON or in any text."""
        from llguidance import LLTokenizer

        slices = LLTokenizer.json_slices() if is_json else LLTokenizer.general_slices()
        return replace(self, tokens=self.tokens.with_slices(slices))

    def get_ids(self, data: bytes) -> list[int]:
        """Return a byte string as single-byte tokens."""
        return [self.size + byte for byte in data]


def convert_vocabulary(tokenizer: "Tokenizer", size: int) -> SpellingVocabulary:
    """Convert a vocabulary for llguidance, without a reference to the tokenizer.

    size: number of tokens, with padding.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped, ends = _WrappedTokenizer(tokenizer, size), sorted(tokenizer.end_ids)
    wrapper, count, texts = TokenizerWrapper(wrapped), len(wrapped.tokens), wrapped.texts
    tokens = LLTokenizer(wrapper, n_vocab=count, eos_token=ends, slices=[])
    by_first: dict[int, list[int]] = {}
    for token, text in enumerate(texts):
        if text:
            by_first.setdefault(text[0], []).append(token)
    spelled: tuple[list[int], list[int]] = [], []
    for token, text in enumerate(texts):
        quotes_before = ((match, text.count(b'"', 0, match.start())) for match in _SPELLED.finditer(text))
        for begins_inside in {(match[0][:1] in b"\\\x7f") ^ quotes % 2 for match, quotes in quotes_before}:
            spelled[begins_inside].append(token)
    exponents = [token for byte in b"eE" for token in by_first.get(byte, ()) if _EXPONENT.match(texts[token])]
    return SpellingVocabulary(tokens, len(texts), texts, spelled, by_first, exponents)


class _WrappedTokenizer:
    """A tokenizer with the methods that llguidance's TokenizerWrapper needs, and the tokens of SpellingVocabulary.

    Special tokens have a prefix, so that plain text never equals one.
    """

    def __init__(self, tokenizer: "Tokenizer", size: int):
        self.eos_token_id, self.bos_token_id = min(tokenizer.end_ids), tokenizer.bos_id
        special = tokenizer.mark_ids
        self.special_token_ids = [*sorted(special), size + BYTES]
        padding = [b""] * (size - tokenizer.vocab_size)
        self.texts = [
            b"" if token in special else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
        ] + padding
        self.tokens = [*self.texts, *(bytes([byte]) for byte in range(BYTES)), b"\xffJSON"]
        for token in special:
            self.tokens[token] = b"\xff" + tokenizer.pieces[token].encode(errors="replace")
        self._tokenizer = ref(tokenizer)  # llguidance's references are invisible to the garbage collector

    def __call__(self, text: bytes | str) -> list[int]:
        tokenizer = self._tokenizer()
        assert tokenizer
        return tokenizer.encode_inside(text.decode(errors="replace") if isinstance(text, bytes) else text)


class TokenTrie:
    """A trie of the bytes of all tokens; nodes are numbered by depth, and 0 is the empty string.

    Attributes:
        texts: bytes of each token; b"" for tokens without text.
        is_token: which tokens can occur in an answer, with or without text, bool [tokens].  ends: end tokens.
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
        """Return the trie with nodes merged if their bytes have the same class, int32 [256].

        Takes 15 ms; the result is several times smaller.
        """
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
    """A trie whose nodes are numbered so that the children of each are consecutive.

    Attributes:
        column: class of the last byte of each node, int32 [nodes].
        first, counts: first child and number of children of each node, int32 [nodes].
        node_of: node of each token, int32 [tokens].
    """

    column: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    node_of: np.ndarray


def build_trie(tokenizer: "Tokenizer", size: int) -> TokenTrie:
    """Build the trie of a tokenizer's tokens.

    size: number of tokens, with padding. Special tokens and padding have no text.
    """
    marks = tokenizer.mark_ids | set(tokenizer.end_ids)
    texts = [b"" if token in marks else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    is_token = np.arange(size) < tokenizer.vocab_size
    is_token[list(tokenizer.end_ids)] = False
    return TokenTrie(texts + [b""] * (size - len(texts)), is_token, sorted(tokenizer.end_ids))


class TokenConsumer:
    """Base class of matchers, with methods of llguidance's LLMatcher."""

    _error = ""

    def _accept(self, token: int) -> bool:
        """Advance by a token if it is allowed, and return whether it is; otherwise change nothing."""
        raise NotImplementedError

    def consume_token(self, token: int) -> bool:
        """Advance by a token and return whether it is allowed; otherwise put the matcher into an error state."""
        if self._accept(token):
            return True
        self._error = f"the grammar does not allow token {token}"
        return False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Advance up to the first token that is not allowed; return the number of tokens consumed."""
        return next((number for number, token in enumerate(tokens) if not self._accept(token)), len(tokens))

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error
