#!/usr/bin/env python3
"""Learn the tiny vocabularies of tests/support/vocabularies.py, and record llama.cpp's tokens of odd texts for them.

    python scripts/record/record_tokens.py --peer-python PEER/bin/python

Writes tests/goldens/tokens.json: what was learned, the texts, and by vocabulary three lists of tokens for each text:
as it is, with special tokens read in it, and with those added to it, too. Of pre-tokenizers, all names with the same
tokens are together.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts" / "tools")]
import vocabularies  # noqa: E402
from models.numbers import Numbers  # noqa: E402
from peer import ask_for_json  # noqa: E402
from tiny_model import byte_pieces  # noqa: E402

from localllm.text.pretokenize import PRETOKENIZERS  # noqa: E402

ALPHABET = byte_pieces()
OTHER_VOCABULARIES = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}  # which are not written byte by byte
OF_WORDS = [
    "", " ", "  ", "\t", "\n", "\n\n\n", " \n \n", "\t\n \r\n", "Hello world", " Hello world", "Hello World!",
    "hello\n",
    "The king's men's 'tis I'll we've THEY'RE don't", "brillig, and the slithy toves", " 1234 12345678 3.14159 1,000",
    "0 00 000 0000 00000", "x = y**2 + f(z)[0] != None;", "    return {\n\t'a': 1,\n\n  }",
    "CamelCase snake_case kebab-case",
    "naïve café Ångström ﬁne", "Привет, мир! Ещё 5 раз.", "你好，世界。今天", "こんにちは カタカナ ﾊﾝｶｸ",
    "안녕하세요 세계",
    "שלום עולם", "مرحبا ١٢٣", "ภาษาไทย", "नमस्ते दुनिया", "🙂👩‍👩‍👧🏽 🇩🇪", "a\u0301 e\u0308\u0323",
    "\u00a0x\u2003y\u200bz",
    "½ ² ① Ⅳ ㎏", "<|im_start|>user\nHi<|im_end|>\n", "<think>why</think> so",
    "<s> a</s>\n b",
    "<|user|> \n Hi <|end|>  \n<|x|>",
    "<|begin|><|end|>", "<extra>  <extra>x", "▁a ▁▁ b", "\u0000\u0001\x7f", "\ufeffBOM", "''''\"\"\"```", "$€£¥ @#%^&*",
    "https://a.example/b?c=d&e=%20#f", "aaaaaaaaaaaaaaaaaaaaaaaa", "          x", "what? What?! WHAT",
]  # fmt: skip


def learned_merges(text: str, count: int) -> list[str]:
    """Learn byte-level merges: the most frequent pairs within words; of equally frequent ones the first by name."""
    words = Counter(re.findall(r" ?[A-Za-z]+|\s+|[^\sA-Za-z]+", text))
    spelled = {tuple(ALPHABET[byte] for byte in word.encode()): times for word, times in words.items()}
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in spelled.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(" ".join(best))
        spelled = {joined(word, best): times for word, times in spelled.items()}
    return merges


def joined(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made: list[str] = []
    for piece in word:
        if made and (made[-1], piece) == pair:
            made[-1] += piece
        else:
            made.append(piece)
    return tuple(made)


def learned_pieces(text: str, count: int) -> list[str]:
    """Learn SentencePiece's pieces: frequent parts of words, and all characters."""
    parts: Counter[str] = Counter()
    for word, times in Counter(text.split()).items():
        marked = f"▁{word}"
        for start in range(len(marked)):
            for end in range(start + 2, min(start + 9, len(marked) + 1)):
                parts[marked[start:end]] += times
    best = sorted(parts, key=lambda part: (-parts[part] * (len(part) - 1), part))[:count]
    return [*best, "▁▁", "▁▁▁▁", *sorted({*text.replace(" ", "▁"), "▁", "é", "中", "ц"} - {"\n"})]


def bigrams(texts: list[str]) -> list[str]:
    """Return merges that make every character, then every two neighbours, in no order."""
    spelled = [[[ALPHABET[byte] for byte in letter.encode()] for letter in text] for text in texts]
    merges: dict[str, None] = {}
    for letters in spelled:
        for letter in letters:
            for end in range(1, len(letter)):
                merges.setdefault(" ".join(["".join(letter[:end]), letter[end]]))
    pairs = sorted({" ".join(["".join(a), "".join(b)]) for letters in spelled for a, b in pairwise(letters)})
    order = Numbers(0, "bigrams").raw(4 * len(pairs)).reshape(-1, 4).tolist()
    return [*merges, *(pair for _, pair in sorted(zip(order, pairs, strict=True)) if pair not in merges)]


def tokens(metadata: dict[str, Any], texts: list[str], peer: str) -> list | None:
    """Return llama.cpp's tokens; None if it does not support the vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        path = vocabularies.write_vocabulary(metadata, Path(folder) / "vocabulary.gguf")
        return ask_for_json(peer, Path(folder), job="tokenize", model=str(path), texts=texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    peer = parser.parse_args().peer_python
    given = vocabularies.GIVEN
    given |= {"merges": learned_merges(vocabularies.PROSE, 500), "pieces": learned_pieces(vocabularies.PROSE, 500)}
    given |= {"bigrams": bigrams(given["cut_texts"]), "texts": OF_WORDS}
    given["tokens"] = {name: tokens(vocabularies.metadata(name), OF_WORDS, peer) for name in vocabularies.NAMES}
    rows: dict[str, dict] = {}
    for name in (name for name in PRETOKENIZERS if name not in OTHER_VOCABULARIES):
        if found := tokens(vocabularies.cuts(name), given["cut_texts"], peer):
            plain = [lists[0] for lists in found]
            row = {"names": [], "adds_bos": len(found[0][2]) > len(found[0][1]), "ids": plain}
            rows.setdefault(json.dumps([row["adds_bos"], plain]), row)["names"].append(name)
        else:
            print(f"llama.cpp does not know {name}")
    given["cuts"] = list(rows.values())
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
    vocabularies.RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(vocabularies.NAMES)} vocabularies, {len(rows)} ways to cut")


if __name__ == "__main__":
    main()
