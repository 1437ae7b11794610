"""Tokenize text for CLIP: lower case, byte-level BPE; the last subword of each word ends with "</w>".

Merges are the file's `tokenizer.ggml.merges`. Files of clip.cpp have none: their tokens are in the order of merges. The
two subwords that form a token are found by applying the earlier merges to its characters.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.errors import ModelError
from localllm.files.gguf.metadata_reader import MetadataReader
from localllm.text.subwords import merge_symbols

if TYPE_CHECKING:
    from tokenizers import Tokenizer

START, END, END_OF_WORD = "<|startoftext|>", "<|endoftext|>", "</w>"
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class ClipTokenizer:
    """The tokenizer of CLIP's text encoder.

    Attributes:
        pieces: the text of every token.
    """

    def __init__(self, metadata: Mapping[str, object], path: str = ""):
        """Read the vocabulary. Raises ModelError unless it is CLIP's."""
        keys = MetadataReader(metadata, "tokenizer.ggml.", path)
        self.pieces = keys.read_strings("tokens")
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        if len(ids) < len(self.pieces) or START not in ids or END not in ids:
            raise keys.make_error(f"tokenizer.ggml.tokens must be distinct and contain {START} and {END}")
        merges = keys.read_strings("merges") if keys.has("merges") else None
        pairs = derive_merges(self.pieces) if merges is None else [split_merge(keys, each) for each in merges]
        if any(part not in ids for pair in pairs for part in (*pair, "".join(pair))):
            raise keys.make_error("tokenizer.ggml.merges: every merge must join two tokens into a token")
        self._start, self._end, self._tokenizer = ids[START], ids[END], build_bpe(ids, pairs)

    def encode(self, text: str) -> list[int]:
        """Encode a text between the start and end tokens. Unknown characters become the end token."""
        return [self._start, *self._tokenizer.encode(text).ids, self._end]


def split_merge(keys: MetadataReader, merge: str) -> tuple[str, str]:
    """Split a merge into its two subwords. Raises ModelError unless there are two."""
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise keys.make_error(
            f"tokenizer.ggml.merges: a merge must be two tokens separated by a space, not {merge[:40]!r}"
        )
    return left, right


def derive_merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Derive merges from tokens in merge order. Raises ModelError if they are in another order."""
    ranks, merges = dict[str, float](), list[tuple[str, str]]()
    for piece in pieces:
        symbols = split_symbols(piece)
        if piece in (START, END) or len(symbols) < 2:
            continue
        left, *rest = merge_symbols(symbols, ranks, " ")
        if len(rest) != 1:
            raise ModelError(f"tokenizer.ggml.tokens: no merge of earlier tokens yields {piece[:40]!r}")
        ranks[f"{left} {rest[0]}"] = len(ranks)
        merges.append((left, rest[0]))
    return merges


def split_symbols(piece: str) -> list[str]:
    """Split a token into characters, the last one together with "</w>"."""
    stem = piece.removesuffix(END_OF_WORD)
    return [*stem[:-1], stem[-1:] + piece[len(stem) :]]


def build_bpe(ids: dict[str, int], merges: list[tuple[str, str]]) -> "Tokenizer":
    """Build a BPE tokenizer of the tokenizers library."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    model = models.BPE(ids, merges, unk_token=END, continuing_subword_prefix="", end_of_word_suffix=END_OF_WORD)
    bpe = Tokenizer(model)
    bpe.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe
