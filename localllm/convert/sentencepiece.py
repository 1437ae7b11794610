"""Read the vocabulary of a SentencePiece model file (tokenizer.model).

The file is a protobuf message; seven of its fields are read. The sentencepiece package is not used, because it does not
expose the model's type and normalizer, which decide whether GGUF can express the vocabulary. Fields:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
BPE = 2  # TrainerSpec.model_type; 1, the default, is Unigram


@dataclass
class SentencePieceModel:
    """A SentencePiece vocabulary and its normalizer settings.

    types: as in GGUF, 1 normal, 2 unknown, 3 control, ...
    """

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = 1
    normalizes: bool = False  # normalizes characters before it splits
    adds_space: bool = True  # adds a space before a text


def read_sentencepiece(data: bytes) -> SentencePieceModel:
    """Parse the content of a tokenizer.model. Raises ValueError if it has no SentencePiece vocabulary."""
    model = SentencePieceModel()
    for number, value in parse_message(data):
        if number == 1:
            piece = dict(parse_message(require_bytes(value)))
            model.pieces.append(require_bytes(piece.get(1, b"")).decode("utf-8"))
            model.scores.append(struct.unpack("<f", struct.pack("<I", piece.get(2, 0)))[0])
            model.types.append(int(piece.get(3, 1)))
        elif number == 2:
            model.kind = int(dict(parse_message(require_bytes(value))).get(3, 1))
        elif number == 3:
            normalizer = dict(parse_message(require_bytes(value)))
            model.normalizes, model.adds_space = bool(normalizer.get(2)), bool(normalizer.get(3, 1))
    if not model.pieces or not set(model.types) <= set(range(1, 7)):
        raise ValueError("it has no SentencePiece vocabulary")
    return model


def parse_message(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) for each field of a protobuf message. Raises ValueError."""
    position = 0
    while position < len(data):
        key, position = parse_varint(data, position)
        kind = key & 7
        if kind == VARINT:
            value, position = parse_varint(data, position)
            yield key >> 3, value
            continue
        length, position = (
            parse_varint(data, position) if kind == BYTES else ({FIXED64: 8, FIXED32: 4}.get(kind, 0), position)
        )
        if position + length > len(data) or (length == 0 and kind != BYTES):
            raise ValueError("not a SentencePiece model")
        chunk = data[position : position + length]
        yield key >> 3, chunk if kind == BYTES else int.from_bytes(chunk, "little")
        position += length


def parse_varint(data: bytes, position: int) -> tuple[int, int]:
    """Decode a varint of at most ten bytes; return its value and the position after it. Raises ValueError."""
    value = 0
    for n in range(10):
        if position + n >= len(data):
            break
        value |= (data[position + n] & 0x7F) << 7 * n
        if data[position + n] < 0x80:
            return value, position + n + 1
    raise ValueError("not a SentencePiece model")


def require_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("not a SentencePiece model")
    return value
