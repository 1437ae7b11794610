"""Match an answer against a grammar in GBNF, with methods of llguidance's LLMatcher."""

from collections.abc import Container
from copy import copy
from typing import TYPE_CHECKING

from localllm.generation.constraints.gbnf import VocabularyToken, grammar_error
from localllm.generation.constraints.grammar_automaton import Automaton
from localllm.generation.constraints.grammar_network import build_network
from localllm.generation.constraints.token_trie import TokenTrie

if TYPE_CHECKING:
    from localllm.text.tokenizer import Tokenizer


class GrammarMatcher:
    """A matcher of one answer against a grammar, token by token."""

    def __init__(self, grammar: str, tokenizer: "Tokenizer", trie: TokenTrie):
        """Start at the beginning of an answer.

        Raises UsageError for an invalid grammar, or one with tokens that this vocabulary lacks.
        """
        network = build_network(grammar)
        self._named = [_find_token(token, tokenizer) for token in network.vocabulary_tokens]
        self._automaton = Automaton(network, trie, self._named)
        self._ends = sorted(tokenizer.end_ids)
        self._configuration = self._automaton.beginning
        self._automaton.compute_mask(self._configuration)  # which takes longest the first time
        self._has_ended, self._error = False, ""

    def deep_copy(self) -> "GrammarMatcher":
        """Return an independent copy, which shares the cached automaton."""
        return copy(self)

    def compute_bitmask(self) -> bytes:
        """Compute the mask of the next token, including end tokens: a bit for each, the lowest first."""
        return self._automaton.compute_mask(self._configuration)

    def consume_token(self, token: int) -> bool:
        """Accept a token; a token that is not allowed puts the matcher into an error state."""
        if self.try_consume_tokens([token]):
            return True
        self._error = f"token {token} is not allowed here"
        return False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Accept tokens up to the first that is not allowed; return their number."""
        for number, token in enumerate(tokens):
            if token in self._ends and self._automaton.can_end(self._configuration) and not self._has_ended:
                self._has_ended = True
                continue
            configuration = self._automaton.read(self._configuration, token)
            if self._has_ended or not configuration:
                return number
            self._configuration = configuration
        return len(tokens)

    def is_stopped(self) -> bool:
        """Return whether the answer can only end here."""
        return self._has_ended or self._automaton.must_end(self._configuration)

    def find_forced(self) -> tuple[bytes, bool]:
        """Return the text that must follow, about 200 bytes at most, and whether the answer must end after it."""
        return self._automaton.find_forced(self._configuration)

    def names_any(self, tokens: Container[int]) -> bool:
        """Return whether the grammar names one of these tokens."""
        return any(token in tokens for token in self._named)

    def is_error(self) -> bool:
        """Return whether `consume_token` got a token that is not allowed."""
        return bool(self._error)

    def get_error(self) -> str:
        """Return the message of the error state."""
        return self._error


def _find_token(token: VocabularyToken, tokenizer: "Tokenizer") -> int:
    """Return the id of a token that a grammar names. Raises UsageError."""
    if token.text.startswith("<["):
        number = int(token.text[2:-2])
        if number >= tokenizer.vocab_size:
            raise grammar_error(
                token.line, f"there is no token {number}: the model's last is {tokenizer.vocab_size - 1}"
            )
        return number
    special = tokenizer.special_id(token.text)
    ids = tokenizer.encode_inside(token.text) if special is None else [special]
    if len(ids) != 1:
        raise grammar_error(token.line, f"{token.text} is not one token of the model's vocabulary but {len(ids)}")
    return ids[0]
