"""Test WordPiece vocabularies against the tokenizers package."""

import random
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer as Oracle
from tokenizers import models, normalizers, pre_tokenizers
from vocabularies import PROSE

from localllm.text.tokenizer import Tokenizer

CONTROL, NORMAL = 3, 1
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = sorted({word for word in PROSE.lower().split() if word.isalpha()})[:400]
ENDS = sorted({word[at:] for word in WORDS for at in range(1, len(word))})[:600]
LATIN, OTHERS = (*range(0x21, 0x7F), *range(0xE0, 0x100)), (0x3B1, 0x3C3, 0x43F, 0x440, 0x438, 0x4E00, 0x597D)
LETTERS = [*map(chr, LATIN + OTHERS)]
PIECES = [*SPECIAL, *dict.fromkeys([f"▁{piece}" for piece in (*WORDS, *LETTERS)] + [*ENDS, *LETTERS])]
ODD = [
    "", " ", "\n\t", "Hello, world!", "naïve CAFÉ Ångström", "e\u0301a\u0308", "The KING's men--'tis",
    "你好world世界", "a\u200bb\u00adc", "x\x00y\x85z\x0bw", "\ufffd\ufeff", "a\u00a0b\u2028c\u3000d", "ΣΑΣ σας",
    "Straße İstanbul", "[MASK] [CLS]x", "x" * 100, "x" * 101, "привет", "🙂 ok", "1,000.50$ `^~|",
    "\uf900\U0002b8ff\U0002b920", "ﬁ ½ Ⅳ", "अनुच्छेद", "ภาษาไทย",
]  # fmt: skip


def metadata(**more) -> dict:
    types = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(PIECES) - len(SPECIAL))
    fields = {"model": "bert", "tokens": PIECES, "token_type": np.array(types, np.int32), "unknown_token_id": 1}
    fields |= {"cls_token_id": 2, "seperator_token_id": 3, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def oracle(lowers: bool = True, strips: bool | None = None) -> Oracle:
    known = {
        piece[1:] if piece[0] == "▁" else piece if piece in SPECIAL else f"##{piece}": n
        for n, piece in enumerate(PIECES)
    }
    tokenizer = Oracle(models.WordPiece(known, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def random_texts(count: int) -> list[str]:
    """Return texts of the prose's words, of letters of many scripts, and of any characters."""
    chance, alphabet = (
        random.Random(1),
        [chr(code) for code in (*range(32, 0x250), *range(0x370, 0x500), *range(0x4E00, 0x4E80))],
    )
    words = [*WORDS, *ENDS, "É", "\u0301", "。", "-", "…", "\t", "\u200d", "\x07"]
    some = [" ".join(chance.choices(words, k=chance.randint(1, 12))) for _ in range(count // 2)]
    return some + ["".join(chance.choices(alphabet + words, k=chance.randint(1, 30))) for _ in range(count - len(some))]


@pytest.mark.parametrize("flags", [{}, {"normalizer.lowercase": False}, {"normalizer.strip_accents": False}])
def test_ids_equal_those_of_the_tokenizers_package(flags):
    tokenizer = Tokenizer.from_metadata(metadata(**flags))
    expected = oracle(flags.get("normalizer.lowercase", True), flags.get("normalizer.strip_accents"))
    for text in ODD + random_texts(2000):
        assert tokenizer.encode(text) == expected.encode(text, add_special_tokens=False).ids, repr(text)


def test_cls_and_sep_surround_a_text_on_request():
    tokenizer = Tokenizer.from_metadata(metadata())
    assert tokenizer.encode("[CLS]", bos=True, eos=True, special=True) == [2, 3]
    assert tokenizer.encode("", bos=True, eos=True) == [2, 3]
    assert 2 not in tokenizer.encode("[CLS]")
    assert tokenizer.compute_max_bytes(4) == sys.maxsize


def test_ids_decode_to_words():
    tokenizer = Tokenizer.from_metadata(metadata())
    assert tokenizer.decode(tokenizer.encode(f"{WORDS[3]} {WORDS[7]}")) == f"{WORDS[3]} {WORDS[7]}"
