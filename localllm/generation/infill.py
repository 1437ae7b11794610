"""Build fill-in-the-middle prompts.

    [repository]name [file]name text [file]name text ... [file]name [prefix]text[suffix]text[middle]

Or with the suffix before the prefix. Bavarian et al. 2022 (arXiv 2207.14255); other files of a repository as in
Qwen2.5-Coder's training (arXiv 2409.12186).
"""

from collections.abc import Sequence

from localllm.errors import UsageError
from localllm.frozen import frozen
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import InfillTokens
from localllm.values import require_string

# llama-server's names for the repository and the file with the gap: its clients send none.
REPOSITORY, FILE = "myproject", "filename"
MAX_TOKENS = 2048  # maximum tokens of prefix and suffix if is_cut: llama-server's batch size
RESERVED_TOKENS = 8  # positions for the special tokens of a prompt, and one free position


@frozen
class Infill:
    """A document with a gap to fill.

    Attributes:
        prefix, suffix: the text before and after the gap.
        files: (name, content) of other files of the repository; None: no special tokens of repositories.
        typed: the end of the prefix, which editors send in a field of its own; it is tokenized separately.
        suffix_first: whether the suffix precedes the prefix in the prompt (SPM), so that typing appends to the prompt.
        is_cut: whether long prefixes and suffixes are cut to the tokens near the gap, as in llama-server.
    """

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] | None = None
    typed: str = ""
    is_cut: bool = False
    suffix_first: bool = False

    def encode_to_fit(self, tokenizer: Tokenizer, context: int, max_tokens: int | None) -> list[int]:
        """Return the token ids of a prompt that leaves room for the answer in the context.

        max_tokens: maximum number of tokens of the answer, or None. Raises UsageError for a model without
        fill-in-the-middle tokens.
        """
        if not self.is_cut:
            return self.encode(tokenizer)
        limit = min(MAX_TOKENS, context // 2)
        room = min(context // 4, context // 8 if max_tokens is None else max_tokens)
        return self.encode(tokenizer, limit, context - limit - room - RESERVED_TOKENS)

    def encode(self, tokenizer: Tokenizer, limit: int | None = None, most_files: int = 0) -> list[int]:
        """Return the token ids of the prompt.

        limit: maximum number of tokens of the prefix (three quarters, its end) and the suffix together; None: no limit.
        most_files: maximum number of tokens of the other files, of which the last are kept; only used with `limit`.

        Raises UsageError for a model without fill-in-the-middle tokens.
        """
        marks, encode = require_infill_tokens(tokenizer), tokenizer.encode
        text, suffix_text = require_string("prefix", self.prefix), require_string("suffix", self.suffix)
        if limit is not None:  # longer texts need not be tokenized
            size = tokenizer.compute_max_bytes(limit)
            text, suffix_text = text[max(0, len(text) - size) :], suffix_text[:size]
        prefix, suffix, typed = encode(text), encode(suffix_text), encode(self.typed)
        if limit is not None:
            prefix, typed = prefix[max(0, len(prefix) - limit // 4 * 3) :], typed[max(0, len(typed) - limit // 4) :]
            suffix = suffix[: max(0, limit // 4 - 2 - len(typed))]
        first = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        files = self._encode_files(tokenizer, marks, None if limit is None else most_files)
        parts = [[marks.prefix, *prefix, *typed], [marks.suffix, *suffix]]
        part_before, part_after = reversed(parts) if self.suffix_first else parts
        return [*first, *files, *part_before, *part_after, marks.middle]

    def _encode_files(self, tokenizer: Tokenizer, marks: InfillTokens, limit: int | None) -> list[int]:
        """Encode the other files; leave out the first ones if all together exceed `limit` tokens."""
        if self.files is None:
            return []
        encode = tokenizer.encode
        head = [] if marks.repository is None else [marks.repository, *encode(f"{REPOSITORY}\n")]
        last = [] if marks.file is None else [marks.file, *encode(f"{FILE}\n")]
        chunks, room = list[list[int]](), None if limit is None else limit - len(head) - len(last)
        for name, text in reversed(self.files):
            if room is not None and len(text) > tokenizer.compute_max_bytes(max(room, 0)):
                break
            start = encode(f"\n\n--- {name} ---\n\n") if marks.file is None else [marks.file, *encode(f"{name}\n")]
            chunk = [*start, *encode(text)]
            if room is not None and (room := room - len(chunk)) < 0:
                break
            chunks.append(chunk)
        return [*head, *(token for chunk in reversed(chunks) for token in chunk), *last]


def require_infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Return the fill-in-the-middle tokens of a model. Raises UsageError if it has none."""
    if tokenizer.infill_tokens is None:
        raise UsageError(
            "this model cannot fill in the middle of a text: its vocabulary has no tokens for prefix, suffix and "
            "middle; use a model for code that was trained for it, such as Qwen2.5-Coder"
        )
    return tokenizer.infill_tokens
