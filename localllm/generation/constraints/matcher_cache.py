"""The compiled constraints of a tokenizer, and its vocabulary in the forms that they need."""

import threading
from collections.abc import Hashable
from typing import TYPE_CHECKING

from localllm.generation.constraints.spelling_vocabulary import SpellingVocabulary, convert_vocabulary
from localllm.generation.constraints.token_trie import TokenTrie, build_trie

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from localllm.generation.constraints.grammar_matcher import GrammarMatcher
    from localllm.generation.constraints.json_matcher import JsonMatcher
    from localllm.text.tokenizer import Tokenizer

_KEPT = 64  # cached matchers
_WHOLE = ""  # the vocabulary without slices


class MatcherCache:
    """The vocabularies and matchers of one tokenizer, to which they have no reference, so that both can be freed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.vocabularies: dict[str, SpellingVocabulary] = {}
        self.beginnings: dict[Hashable, LLMatcher | GrammarMatcher | JsonMatcher] = {}
        self.trie: TokenTrie | None = None
        self.gates: dict[Hashable, threading.Lock] = {}  # of constraints that are being compiled

    def gate(self, constraint: Hashable) -> threading.Lock:
        """Return the lock of the thread that compiles a constraint, for which others wait."""
        with self.lock:
            return self.gates.setdefault(constraint, threading.Lock())

    def vocabulary(self, kind: str, tokenizer: "Tokenizer", size: int) -> SpellingVocabulary:
        """Return the vocabulary for llguidance, sliced for constraints of a kind."""
        with self.lock:
            if kind not in self.vocabularies:
                whole = self.vocabularies.get(_WHOLE) or convert_vocabulary(tokenizer, size)
                self.vocabularies |= {_WHOLE: whole, kind: whole.sliced(is_json=kind == "schema")}
            return self.vocabularies[kind]

    def find_trie(self, tokenizer: "Tokenizer", size: int) -> TokenTrie:
        """Return the trie of the vocabulary."""
        with self.lock:
            self.trie = self.trie or build_trie(tokenizer, size)
            return self.trie

    def keep(self, constraint: Hashable, beginning: "LLMatcher | GrammarMatcher | JsonMatcher") -> None:
        """Cache the matcher at the start of an answer; the oldest is dropped."""
        with self.lock:
            if len(self.beginnings) >= _KEPT:
                del self.beginnings[next(iter(self.beginnings))]
            self.beginnings[constraint] = beginning
            self.gates.pop(constraint, None)
