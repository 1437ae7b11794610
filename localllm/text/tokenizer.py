"""Encode and decode text with the tokenizer of a GGUF file, including special tokens, BOS and streaming.

Token ids equal llama.cpp's: the tests use its vocabularies and test vectors.
"""

import codecs
import copy
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, NoReturn, Self

from localllm.errors import ModelError, UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.files.gguf.metadata import Irregularities, Metadata
from localllm.files.gguf.metadata_reader import MetadataReader
from localllm.renamed import RenamedAttribute
from localllm.text.pretokenize import GROWTH, to_nfc, uses_nfc
from localllm.text.special_tokens import BREAK, IMAGE, MarkerEscaper, SpecialTokenSplitter, replace_surrogates
from localllm.text.subwords import ByteLevelTokenizer, SentencePieceTokenizer, SubwordTokenizer
from localllm.text.vocabulary import (
    CONTROL,
    MARK_TEXTS,
    UNKNOWN,
    USER_DEFINED,
    InfillTokens,
    Vocabulary,
    list_tokens_of_types,
    read_end_texts,
    read_infill_tokens,
    read_vocabulary,
)
from localllm.values import require_string, to_token_ids

MAX_UTF8_BYTES = 4  # maximum bytes of a character, which an unknown token can stand for


class Tokenizer:
    """The tokenizer of a model, whose methods are thread-safe.

    Attributes:
        pieces: the text of every token as stored in the file.
        bos_id, eos_id: tokens for the beginning and end of a text, None if the vocabulary has none.
        end_ids: tokens that end an answer.  control_ids: tokens without text.
        mark_ids: control_ids, and the tokens that separate the segments of gpt-oss's answers.
        adds_bos, adds_eos: the file requests a BOS token before, and an EOS token after, each text.
        chat_template: the file's Jinja template, or None.  chat_templates: its named ones, such as "tool_use".
        marks_pairs: the model (BERT) reads two texts with one separator token, and token types 0 and 1.
        end_texts: strings that end an answer if the chat template contains them; no token has these texts.
        warnings: lines for the user, including those about the file.
        path: absolute path of the file, None for one built from metadata only.
    """

    def __init__(self, metadata: Mapping[str, object], oddities: Irregularities | None = None) -> None:
        """Build the tokenizer. Raises ModelError for a vocabulary that is missing, inconsistent or not supported.

        oddities: receives notes on harmless irregularities of the file.
        """
        oddities = Irregularities() if oddities is None else oddities
        vocabulary = read_vocabulary(metadata, oddities)
        self.pieces = vocabulary.pieces
        self.vocab_size = len(vocabulary.pieces)
        self.bos_id, self.eos_id, self.end_ids = vocabulary.bos_id, vocabulary.eos_id, vocabulary.end_ids
        self.adds_bos, self.adds_eos = vocabulary.adds_bos, vocabulary.adds_eos
        self._oddities, self._warning, self._metadata = oddities, vocabulary.warning, metadata
        self.path: str | None = None
        self.chat_template = _read_chat_template(MetadataReader(metadata, "tokenizer."))
        self.chat_templates = _read_named_templates(MetadataReader(metadata, "tokenizer."))
        self._subwords = _select_tokenizer_class(vocabulary)(vocabulary)
        # A unigram model adds the leading space itself, after normalizing the text.
        self._puts_space = vocabulary.adds_space and vocabulary.model != "t5"
        self._strips_space = vocabulary.adds_space or vocabulary.merges_spaces or vocabulary.model == "bert"
        self._strips_before, self._strips_after = vocabulary.strips_before, vocabulary.strips_after
        self.marks_pairs = vocabulary.model == "bert"
        self._composes = uses_nfc(metadata) and vocabulary.model == "gpt2"
        self.end_texts = read_end_texts(metadata)
        self._swallows = vocabulary.model in ("t5", "bert") or bool(self._strips_before or self._strips_after)
        types = vocabulary.types
        self._special_types = {
            token: types[token] for token in list_tokens_of_types(types, USER_DEFINED, CONTROL, UNKNOWN)
        }
        control = [token for token, kind in self._special_types.items() if kind != USER_DEFINED]
        self.control_ids = frozenset(control)
        marks = {token for token in self._special_types if self.pieces[token] in MARK_TEXTS}
        self.mark_ids = self.control_ids | marks
        self._control_pieces = {self.pieces[token] for token in control}

    @property
    def warnings(self) -> list[str]:
        return [*self._oddities.format_lines(), *filter(None, [self._warning])]

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> Self:
        """Load the tokenizer of a GGUF file, which need not have tensors. Raises ModelError."""
        with GGUFFile.open(path) as file:
            return cls.from_metadata(file.metadata, file.oddities, file.path)

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], oddities: Irregularities | None = None, path: str | None = None
    ) -> Self:
        """Build the tokenizer that a GGUF file's metadata describes. Raises ModelError.

        path: of the file, needed for pickling.
        """
        tokenizer = cls(metadata, oddities)
        tokenizer.path = None if path is None else os.path.abspath(path)
        return tokenizer

    def __reduce__(self) -> tuple[Callable[..., "Tokenizer"], tuple[str, str]]:
        """Pickle the path of the file and a hash of its vocabulary; unpickling opens the file again.

        Raises TypeError for a tokenizer without a file.
        """
        if self.path is None:
            raise TypeError("only a tokenizer from a file can be pickled: use Tokenizer.from_file")
        return reopen_tokenizer, (self.path, hash_vocabulary(self._metadata))

    if not TYPE_CHECKING:  # type checkers report every other name

        def __getattr__(self, name: str) -> NoReturn:
            from localllm.foreign_names import TOKENIZER_NAMES, refuse_attribute  # seldom needed

            refuse_attribute(self, name, TOKENIZER_NAMES)

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """Name the method to a caller who knows transformers."""
            raise TypeError("a Tokenizer cannot be called: use encode(text)")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, copied: object) -> Self:
        return self

    def encode(self, text: str, special: bool = False, bos: bool = False, eos: bool = False) -> list[int]:
        """Encode a text.

        special: convert the texts of control tokens, such as <|im_end|>, to these tokens; otherwise they are plain
        text. bos: begin with a BOS token if the file requests one and the text does not begin with it. eos: end with an
        EOS token if the file requests one; not for prompts that the model continues.
        """
        require_string("text", text)
        fragments = self._special if special else self._special_in_plain
        tokens = self._encode_fragments(fragments.split(replace_surrogates(text)))
        if eos and self.adds_eos and self.eos_id is not None:
            tokens.append(self.eos_id)
        return self._prepend_bos(tokens) if bos and not (special and tokens[:1] == [self.bos_id]) else tokens

    def encode_rendered(self, text: str, images: Sequence[Sequence[int]] = ()) -> list[int]:
        """Encode the output of MarkerEscaper.render, with a BOS token if the file requests one.

        A control token's text with a BREAK in it is plain text. images: the token ids of each image, which replace the
        IMAGE characters in order. Raises UsageError if their counts differ.
        """
        pieces = replace_surrogates(text).split(IMAGE) if images else [replace_surrogates(text)]
        if len(pieces) != len(images) + 1:
            raise UsageError(
                f"the chat template must render {len(images)} images (found {len(pieces) - 1}): use another --template"
            )
        fragments: list[str | int] = []
        for piece, image in zip(pieces, [*images, ()], strict=True):
            fragments += [*self._render(piece), *image]
        tokens = self._encode_fragments(fragments)
        return tokens if tokens[:1] == [self.bos_id] else self._prepend_bos(tokens)

    def _render(self, text: str) -> Iterator[str | int]:
        """Split a rendered text at its control tokens."""
        for fragment in self._breakable.split(text):
            if isinstance(fragment, str) and BREAK in fragment:
                yield from self._special_in_plain.split(fragment.replace(BREAK, ""))
            else:
                yield fragment

    def encode_inside(self, text: str) -> list[int]:
        """Encode text from within a longer text, without BOS token and leading space."""
        return self._subwords.encode(text)

    def split_special(self, text: str) -> list[str | int]:
        """Split a text at all special tokens, into strings and ids in order."""
        return self._special.split(text)

    def get_special_id(self, text: str) -> int | None:
        """Return the special token with exactly this text, or None."""
        return self._special_ids.get(text)

    @cached_property
    def infill_tokens(self) -> InfillTokens | None:
        """The fill-in-the-middle tokens, or None if the vocabulary has none."""
        return read_infill_tokens(self._metadata, self.get_special_id, self.vocab_size)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return dict(self._deduplicate_by_text(self._special_types))

    @cached_property
    def _special(self) -> SpecialTokenSplitter:
        return self._make_splitter(self._special_types)

    @cached_property
    def _special_in_plain(self) -> SpecialTokenSplitter:
        """A splitter at user-defined tokens, which are recognized in plain text, too."""
        return self._make_splitter(token for token, kind in self._special_types.items() if kind == USER_DEFINED)

    @cached_property
    def _breakable(self) -> SpecialTokenSplitter:
        """A splitter at special tokens, except single characters, which have no room for a BREAK."""
        single = {piece for piece in self._control_pieces if len(piece) == 1}
        return self._make_splitter(token for token in self._special_types if self.pieces[token] not in single)

    def _make_splitter(self, tokens: Iterable[int]) -> SpecialTokenSplitter:
        return SpecialTokenSplitter(self._deduplicate_by_text(tokens), self._strips_before, self._strips_after)

    def _deduplicate_by_text(self, tokens: Iterable[int]) -> Iterable[tuple[str, int]]:
        """Yield text and id of each token, of several with the same text only the first."""
        first: dict[str, int] = {}
        for token in tokens:
            first.setdefault(self.pieces[token], token)
        return first.items()

    @cached_property
    def markers(self) -> MarkerEscaper:
        """Escapes the texts of control tokens in messages."""
        return MarkerEscaper(self._control_pieces)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Decode token ids, control tokens only if `special`. Raises UsageError for an unknown id."""
        stream = self.stream(special)
        return "".join([stream.push(token) for token in to_token_ids(ids)]) + stream.flush()

    def stream(self, special: bool = False, continued: bool = False) -> "StreamDecoder":
        """Return a decoder for streamed tokens.

        continued: the tokens continue an earlier text, so their leading space is kept.
        """
        return StreamDecoder(self, special, strips_space=self._strips_space and not continued)

    def token_bytes(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of a token, which may be an incomplete character. Raises UsageError for an unknown id."""
        if not 0 <= token < self.vocab_size:
            raise UsageError(f"token {token} does not exist: the vocabulary has {self.vocab_size} tokens")
        return self._subwords.token_bytes(token, special)

    def compute_max_bytes(self, tokens: int) -> int:
        """Return the maximum number of bytes that `tokens` tokens can decode to.

        Returns sys.maxsize if encoding removes white space (by normalization or special tokens), because then there is
        no bound.
        """
        longest = max(self._longest_piece, MAX_UTF8_BYTES)
        return sys.maxsize if self._swallows else tokens * longest * (GROWTH if self._composes else 1)

    @cached_property
    def _longest_piece(self) -> int:
        """The size in bytes of the longest token, cached, because scanning 150,000 tokens takes long."""
        return max(len(piece.encode(errors="replace")) for piece in self.pieces)  # "▁" has more bytes than its space

    def _encode_fragments(self, fragments: Iterable[str | int]) -> list[int]:
        tokens: list[int] = []
        after_special = True
        for fragment in fragments:
            if isinstance(fragment, int):
                tokens.append(fragment)
            else:
                text = to_nfc(fragment) if self._composes else fragment
                tokens += self._subwords.encode(" " + text if self._puts_space and after_special else text)
            after_special = isinstance(fragment, int)
        return tokens

    if not TYPE_CHECKING:  # names of 0.3
        fragments, special_id = map(RenamedAttribute, ("split_special", "get_special_id"))
        most_bytes = RenamedAttribute("compute_max_bytes")

    def _prepend_bos(self, tokens: list[int]) -> list[int]:
        return [self.bos_id, *tokens] if self.adds_bos and self.bos_id is not None else tokens


def _read_chat_template(keys: MetadataReader) -> str | None:
    """Return the file's default template, or None. Raises ModelError."""
    if keys.has("chat_templates"):
        keys.read_strings("chat_templates")
    return keys.read_text("chat_template", "") or _read_named_templates(keys).get("default")


def _read_named_templates(keys: MetadataReader) -> dict[str, str]:
    """Return the file's named templates. Raises ModelError if one is not a string."""
    prefix = "tokenizer.chat_template."
    names = [key.removeprefix(prefix) for key in keys.metadata if key.startswith(prefix)]
    return {name: text for name in names if (text := keys.read_text(f"chat_template.{name}"))}


def _select_tokenizer_class(vocabulary: Vocabulary) -> type[SubwordTokenizer]:
    if vocabulary.model in ("t5", "plamo2"):
        from localllm.text.unigram import PlamoTokenizer, UnigramTokenizer  # seldom needed

        return UnigramTokenizer if vocabulary.model == "t5" else PlamoTokenizer
    if vocabulary.model in ("bert", "rwkv"):
        from localllm.text.longest_match import RwkvTokenizer, WordPieceTokenizer

        return WordPieceTokenizer if vocabulary.model == "bert" else RwkvTokenizer
    pretokenizer = vocabulary.pretokenizer
    return SentencePieceTokenizer if pretokenizer is None or pretokenizer.marks_spaces else ByteLevelTokenizer


class StreamDecoder:
    """A decoder for streamed tokens: the joined results of `push` and `flush` equal Tokenizer.decode's.

    The bytes of an incomplete character are held back until it is complete; invalid bytes become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, strips_space: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strips_space = strips_space  # the first token contains the space that SentencePiece adds
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes, often "". Raises UsageError for an unknown id."""
        data = self._tokenizer.token_bytes(token, self._special)
        if data and self._strips_space:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._characters.decode(data)

    def copy(self) -> "StreamDecoder":
        """Return a copy with the same pending bytes."""
        twin = copy.copy(self)
        twin._characters = copy.copy(self._characters)
        return twin

    def flush(self) -> str:
        """Return the remaining text: U+FFFD if the last character is incomplete, otherwise ""."""
        return self._characters.decode(b"", final=True)


def hash_vocabulary(metadata: Mapping[str, object]) -> str:
    """Hash the metadata that define a tokenizer."""
    import hashlib  # seldom needed

    keys = sorted(key for key in metadata if key.startswith("tokenizer."))
    as_stored = metadata.compute_fingerprint(*keys) if isinstance(metadata, Metadata) else None
    return as_stored or hashlib.sha256(repr([(key, metadata[key]) for key in keys]).encode()).hexdigest()


def reopen_tokenizer(path: str, vocabulary: str) -> Tokenizer:
    """Open the file of a pickled tokenizer.

    Raises ModelError if the file is gone or its vocabulary has changed.
    """
    if not os.path.exists(path):
        raise ModelError(f"{path}: the file of a pickled tokenizer no longer exists")
    tokenizer = Tokenizer.from_file(path)
    if hash_vocabulary(tokenizer._metadata) != vocabulary:
        raise ModelError(f"{path}: the vocabulary has changed since the tokenizer was pickled; pickle it again")
    return tokenizer


open_again = reopen_tokenizer  # the name in pickles of 0.3
