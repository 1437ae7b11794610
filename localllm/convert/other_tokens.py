"""Read vocabularies of encoders from tokenizer.json: WordPiece and SentencePiece's unigram model."""

from base64 import b64decode
from pathlib import Path
from typing import cast

import numpy as np

from localllm.convert.pretokenizer_name import parts
from localllm.convert.token_table import Step, TokenizerJson, Tokens, steps
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.text.token_types import CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from localllm.text.wordpiece import LONGEST


def from_wordpiece(path: Path, content: TokenizerJson, size: int) -> Tokens:
    """Read WordPiece: pieces that begin words get "▁" in front, other pieces lose their "##". Raises ModelError."""
    model, (normalizer,) = content["model"], steps(content.get("normalizer")) or [Step()]
    if normalizer.get("type") != "BertNormalizer" or [part["type"] for part in parts(content.get("pre_tokenizer"))] != [
        "BertPreTokenizer"
    ]:
        raise ModelError(f"{path}: WordPiece with another normalizer or pre-tokenizer than BERT's is not supported")
    prefix, longest = model.get("continuing_subword_prefix", "##"), model.get("max_input_chars_per_word", LONGEST)
    for name, value, usual in (
        ("continuing_subword_prefix", prefix, "##"),
        ("max_input_chars_per_word", longest, LONGEST),
    ):
        if value != usual:
            raise ModelError(f"{path}: {name} {printable(str(value))} is not supported")
    if not (normalizer.get("clean_text", True) and normalizer.get("handle_chinese_chars", True)):
        raise ModelError(f"{path}: a normalizer that leaves control or Chinese characters alone is not supported")
    lowers, strips = normalizer.get("lowercase", True), normalizer.get("strip_accents")
    tokens = Tokens(size, "bert", "bert-bge" if lowers else "default")
    if not lowers:
        tokens.more["normalizer.lowercase"] = False
    if strips is not None and strips is not lowers:
        tokens.more["normalizer.strip_accents"] = strips
    special = {added["content"] for added in content.get("added_tokens") or () if added.get("special")}
    for piece, token in model["vocab"].items():
        is_special = piece in special or piece == model.get("unk_token")
        spelled = piece if is_special else piece[2:] if piece.startswith("##") and piece != "##" else f"▁{piece}"
        tokens.put(token, spelled, CONTROL if is_special else NORMAL)
    return tokens


def from_unigram(path: Path, content: TokenizerJson, size: int) -> Tokens:
    """Read a unigram model: pieces, scores and the character map that normalizes texts. Raises ModelError."""
    model, charsmap, merges_spaces = content["model"], b"", False
    vocabulary = cast("list[tuple[str, float]]", model["vocab"])  # of type Unigram, which read_tokens has checked
    for step in steps(content.get("normalizer")):
        if step["type"] == "Precompiled":
            charsmap = b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}:
            merges_spaces = True
        else:
            raise ModelError(f"{path}: normalizer {printable(str(step['type']))} is not supported")
    kinds = {part["type"]: part for part in parts(content.get("pre_tokenizer"))}
    if not kinds.keys() <= {"WhitespaceSplit", "Metaspace"} or "Metaspace" not in kinds:
        raise ModelError(f"{path}: a unigram model with this pre-tokenizer is not supported")
    space = kinds["Metaspace"]
    adds = space.get("prepend_scheme", "always" if space.get("add_prefix_space", True) else "never") != "never"
    tokens = Tokens(size, "t5", "default", adds_space=adds)
    tokens.more["remove_extra_whitespaces"] = merges_spaces or "WhitespaceSplit" in kinds
    if charsmap:
        tokens.more["precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    for token, (piece, score) in enumerate(vocabulary):
        tokens.put(token, piece, UNKNOWN if token == model.get("unk_id") else NORMAL, float(score))
    for added in content.get("added_tokens") or ():
        if added["id"] != model.get("unk_id"):
            kind = CONTROL if added.get("special") else USER_DEFINED
            score = vocabulary[added["id"]][1] if added["id"] < len(vocabulary) else 0.0
            tokens.put(added["id"], added["content"], kind, float(score))
    return tokens
