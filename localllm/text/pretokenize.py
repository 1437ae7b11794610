"""Split text into words, by one pre-tokenizer for each value of `tokenizer.ggml.pre`.

A pre-tokenizer is a list of regular expressions (Oniguruma syntax, as in Hugging Face's tokenizer.json files). Each
splits the results of the previous ones into its matches and the text between them.

The expressions are those of the models' own tokenizer.json files if known, otherwise llama.cpp's. Both give the same
words except where llama.cpp does not distinguish upper and lower case: for non-ASCII letters in gpt-4o, tekken and
similar ones, for all letters in youtu, tiny_aya and kimi-k2; and for tiny_aya's digits before letters.
tests/support/pretokenizer_sources.py has the repository of each tokenizer.

Text is first normalized to NFC if the model's original tokenizer does so (llama.cpp never does), because file names of
macOS and PDFs often have decomposed characters ("e" and an accent for "é"). Only GGUF files converted by localllm state
whether to normalize; for others it follows from the pre-tokenizer or the architecture. Source: the tokenizers of
transformers (qwen2, qwen3_5, cohere, and gpt_neox, which OLMo, MPT, Mamba and ModernBERT use, too).
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, groupby
from unicodedata import category, normalize

from localllm.frozen import frozen


@frozen
class DigitGrouping:
    """A step that splits runs of digits into groups of three, counted from the right.

    A regular expression would scan the rest of the run for every group, which takes quadratic time.
    """

    runs: str  # the expression that matches a run
    decimal: bool = True  # decimal digits only, or every character of Unicode's category N


@frozen
class PreTokenizer:
    """A pre-tokenizer, and other properties that llama.cpp derives from its name."""

    patterns: tuple[str | DigitGrouping, ...]
    ignore_merges: bool = False  # a word that is a whole token becomes that token, regardless of merges
    adds_bos: bool = False  # the default of tokenizer.ggml.add_bos_token
    marks_spaces: bool = False  # SentencePiece style: "▁" for a space, raw UTF-8 instead of byte-level characters
    joins_lines: bool = False  # a run of newlines that is a token becomes that token, regardless of merges
    needs_merges: bool = True  # reject files without merges


_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _build_word_regex(
    digits: str, letters: str = r"[^\r\n\p{L}\p{N}]?\p{L}+", symbols: str = _SYMBOLS + r"[\r\n]*"
) -> str:
    """Build an expression like GPT-4's cl100k: contractions, words, digits, symbols, spaces.

    A word may begin with one other character.
    """
    return rf"{_CONTRACTION}|{letters}|{digits}|{symbols}|{_LINES_AND_SPACES}"


def _build_cased_word_regex(
    digits: str, ending: str, upper: str = _UPPER, lower: str = _LOWER, symbol_tail: str = r"[\r\n/]*"
) -> str:
    """Build an expression like GPT-4o's o200k, where a word also ends between lower and upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}|{_SYMBOLS}{symbol_tail}|{_LINES_AND_SPACES}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _build_word_regex(r"\p{N}{1,3}")
_QWEN2 = _build_word_regex(r"\p{N}")
_GPT4O = _build_cased_word_regex(r"\p{N}{1,3}", rf"(?:{_CONTRACTION})?")
_LINES = r"[^\n]+|\n+"
_WORDS_OF_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_KANA_AND_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3 = rf"{_ASCII_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
_SPARK = rf"{_ASCII_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_NOT_HAN_UPPER, _NOT_HAN_LOWER = rf"[{_UPPER[1:-1]}&&[^\p{{Han}}]]", rf"[{_LOWER[1:-1]}&&[^\p{{Han}}]]"
_KIMI_WORDS = _build_cased_word_regex(
    r"\p{N}{1,3}", rf"(?:{_CONTRACTION})?", _NOT_HAN_UPPER, _NOT_HAN_LOWER, symbol_tail=r"[\r\n]*"
)
# The cased letters as listed in DeepSeek's first tokenizer: no Unicode property gives the same set.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdb"
    "ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-퟿]+"
_AFMOE_SCRIPTS = "[一-鿿㐀-䶿\uf900-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_YOUTU_SCRIPTS = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_SPACES_BY_POWERS_OF_TWO = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s"

_QWEN35 = _build_word_regex(r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
# The lookbehind keeps the time linear: without it, every space of a long run would start a search for a newline.
_JAIS2 = _LLAMA3.replace(_LINES_AND_SPACES, rf"(?<![^\S\r\n])\s*[\r\n]+|{_SPACES_BY_POWERS_OF_TWO}")
_BAILING = _QWEN2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
_EXAONE_WORDS = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_EXAONE_MOE = _build_word_regex(r"\p{N}", _EXAONE_WORDS, rf"{_SYMBOLS}[\r\n/]?").replace(r"\s*[\r\n]+", r"\s*[\r\n]")
_CHAMELEON_IMAGES = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z")
_CHAMELEON = (*_CHAMELEON_IMAGES, r"([\t\n]|    |  )", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_CASED}]+", _DEEPSEEK_PUNCTUATION, r"(?<!\s)\s++$", _DEEPSEEK_HAN, r"\p{N}+")

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("chameleon", PreTokenizer(_CHAMELEON, adds_bos=True)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _build_word_regex(r"\p{N}+")), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    ("ufakzeka", PreTokenizer((_QWEN2.removeprefix(f"{_CONTRACTION}|"),))),
    ("seed-coder", PreTokenizer((_build_word_regex(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GPT4O,), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((DigitGrouping(r"(?<!\d)\d++\b"), _GPT4O))),
    ("tekken", PreTokenizer((_build_cased_word_regex(r"\p{N}", ""),), ignore_merges=True, adds_bos=True)),
    (
        "youtu",
        PreTokenizer((_YOUTU_SCRIPTS, _build_cased_word_regex(r"\p{N}", rf"(?:{_CONTRACTION})?")), ignore_merges=True),
    ),
    ("kimi-k2", PreTokenizer((rf"\p{{Han}}+|{_KIMI_WORDS}",), needs_merges=False)),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK)),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _SPARK, r"\p{N}"))),
    ("afmoe", PreTokenizer((DigitGrouping(r"\p{N}+", decimal=False), _AFMOE_SCRIPTS, _DEEPSEEK3))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_WORDS_OF_BLOOM,))),
    ("viking", PreTokenizer((_WORDS_OF_BLOOM, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", DigitGrouping(r"\d+")))),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((_LINES,), adds_bos=True, marks_spaces=True, joins_lines=True)),
    ("sarvam-moe", PreTokenizer((_LINES,), marks_spaces=True)),
)

PRETOKENIZERS: dict[str, PreTokenizer] = {name: family for names, family in _FAMILIES for name in names.split()}


Splitter = Callable[[str], list[str]]
WINDOW, MARGIN = 1 << 18, 1 << 12  # characters: see `split_in_windows`


def make_splitter(steps: Iterable[str | DigitGrouping]) -> Splitter:
    """Return a function that splits a text into words, whose concatenation is the text."""
    cuts: list[Splitter] = []
    for _, equal_steps in groupby(steps, type):
        group = list(equal_steps)
        cuts += [_make_digit_splitter(step) for step in group if isinstance(step, DigitGrouping)]
        cuts += (
            [_make_regex_splitter(expressions)]
            if (expressions := [step for step in group if isinstance(step, str)])
            else []
        )

    def words(text: str) -> list[str]:
        pieces = [text]
        for cut in cuts:
            pieces = [word for piece in pieces for word in cut(piece)]
        return pieces

    return lambda text: words(text) if len(text) <= WINDOW else split_in_windows(words, text)


def _make_regex_splitter(expressions: list[str]) -> Splitter:
    """Return a function that splits a text into the matches of Oniguruma expressions and the text between them."""
    from tokenizers import Regex, pre_tokenizers  # takes 15 ms, and SentencePiece does not need it

    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    pre_tokenizer = pre_tokenizers.Sequence(splits)

    def pieces(text: str) -> list[str]:
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    return pieces


def split_in_windows(cut: Splitter, text: str) -> list[str]:
    """Apply `cut` to a text, WINDOW characters at a time.

    Oniguruma fails, and the tokenizers library panics, on a match of several million characters. The words in the last
    MARGIN characters of a window are dropped, and the next window begins where the kept words end. Only a run of
    millions of spaces or symbols is cut at the end of its window.
    """
    window_words: list[str] = []
    at = 0
    while len(text) - at > WINDOW:
        words = cut(text[at : at + WINDOW])
        finished = _count_final_words(words)
        window_words += words[:finished]
        at += sum(map(len, words[:finished]))
    return window_words + cut(text[at:])


def _count_final_words(words: list[str]) -> int:
    """Return how many words of a window are final, at least one: those that end before its last MARGIN characters.

    If possible, the last of them ends with a letter before a space or newline, across which no pre-tokenizer's
    expression matches or looks.
    """
    ends = list(accumulate(map(len, words)))
    count = max(1, bisect_right(ends, WINDOW - MARGIN))
    best = (n for n in range(count, 0, -1) if words[n - 1][-1].isalpha() and words[n : n + 1] and words[n][0] in " \n")
    return next(best, count)


def _make_digit_splitter(step: DigitGrouping) -> Splitter:
    """Return a function that splits runs of digits into groups of three, counted from the right."""
    runs = _make_regex_splitter([step.runs])
    is_run = str.isdecimal if step.decimal else _is_numeric

    def cut(text: str) -> list[str]:
        return [part for word in runs(text) for part in (_split_threes(word) if is_run(word) else [word])]

    return cut


def _is_numeric(word: str) -> bool:
    return all(category(character)[0] == "N" for character in word)


def _split_threes(digits: str) -> list[str]:
    first = len(digits) % 3
    groups = [digits[at : at + 3] for at in range(first, len(digits), 3)]
    return [digits[:first], *groups] if first else groups


NORMALIZER, COMPOSING, NOTHING = (
    "localllm.normalizer",
    "nfc",
    "none",
)  # a metadata key that localllm writes, and its values
NFC_PRETOKENIZERS = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "olmo", "mpt", "modern-bert")
NFC_ARCHITECTURES = ("gptneox",)
GROWTH = 3  # maximum bytes of a text per byte of its NFC form
# NFC does not change text with only lower characters. A range of all higher ones would take 4 ms to compile.
_MAY_CHANGE = re.compile("[^\0-\u02ff]")
_SHORT = 1 << 12  # characters; the standard library takes quadratic time for long runs of combining marks


def uses_nfc(metadata: Mapping[str, object]) -> bool:
    """Return whether the model's original tokenizer normalizes to NFC."""
    declared = metadata.get(NORMALIZER)
    if declared in (COMPOSING, NOTHING):
        result: bool = declared == COMPOSING
        return result
    return usually_uses_nfc(metadata.get("tokenizer.ggml.pre"), metadata.get("general.architecture"))


def usually_uses_nfc(pretokenizer: object, architecture: object) -> bool:
    """Return whether tokenizers with this pre-tokenizer or architecture normalize to NFC."""
    return pretokenizer in NFC_PRETOKENIZERS or architecture in NFC_ARCHITECTURES


def to_nfc(text: str) -> str:
    """Normalize a text to NFC in linear time."""
    if text.isascii() or not _MAY_CHANGE.search(text):
        return text
    if len(text) <= _SHORT:
        return normalize("NFC", text)
    from tokenizers import normalizers  # takes 15 ms, and few texts need it

    return str(normalizers.NFC().normalize_str(text))
