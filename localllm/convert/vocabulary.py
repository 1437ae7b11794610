"""Translate a checkpoint's tokenizer files to the tokenizer.* keys of a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from localllm.convert.config import TOKENIZER_KEYS, warn_unused
from localllm.convert.files import read_json, read_text, report_as_model_error
from localllm.convert.tokenizer_json import PostProcessor, TokenizerJson
from localllm.convert.tokens import VocabularyBuilder, read_tokens
from localllm.errors import ModelError
from localllm.files.gguf.header import printable
from localllm.files.gguf.metadata import Irregularities
from localllm.files.gguf.metadata_reader import is_integer
from localllm.frozen import frozen
from localllm.text.pretokenize import COMPOSING, NORMALIZER, NOTHING, usually_uses_nfc
from localllm.text.vocabulary import END_TEXTS_KEY, MORE_ENDS, read_vocabulary

PREFIX = "tokenizer.ggml."
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # Hugging Face's names to GGUF's
ENCODER_SPECIAL = SPECIAL | {"sep": "seperator", "cls": "cls", "mask": "mask"}  # GGUF's spelling


@frozen
class VocabularySettings:
    """The JSON files of a checkpoint that say how its vocabulary is used."""

    folder: Path
    tokenizer: TokenizerJson | None
    config: Mapping[str, object]  # tokenizer_config.json
    texts: Mapping[str, object]  # special_tokens_map.json
    model: Mapping[str, object]  # config.json
    generation: Mapping[str, object]  # generation_config.json

    @classmethod
    def read(cls, folder: Path) -> "VocabularySettings":
        names = ("tokenizer_config", "special_tokens_map", "config", "generation_config")
        contents = [read_json(folder / f"{name}.json") or {} for name in names]
        return cls(folder, cast("TokenizerJson | None", read_json(folder / "tokenizer.json")), *contents)

    def get_token(self, name: str) -> str | None:
        """Return the string of a special token (bos, eos, unk, pad), or None."""
        for content in (self.config, self.texts):
            token = content.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
        return None

    def get_ids(self, name: str) -> list[int]:
        """Return the ids of a special token in config.json and generation_config.json; eos may have several."""
        tokens: dict[int, None] = {}
        for content in (self.model, self.generation):
            value = content.get(f"{name}_token_id")
            tokens |= dict.fromkeys(filter(is_integer, to_list(value)))
        return list(tokens)

    def read_template(self) -> dict[str, str | None] | None:
        """Return the tokens that tokenizer.json adds before (bos) and after (eos) a text.

        None if it has no template for them.
        """
        processor = (self.tokenizer or TokenizerJson()).get("post_processor") or PostProcessor()
        for step in processor.get("processors", [processor]):
            if step.get("type") == "TemplateProcessing":
                first, last = (step["single"][n].get("SpecialToken", {}).get("id") for n in (0, -1))
                return {"bos": first, "eos": last}
            if step.get("type") in ("RobertaProcessing", "BertProcessing"):
                return {"bos": step["cls"][0], "eos": step["sep"][0]}
        return None


def build_vocabulary_metadata(folder: Path, size: int, model: str = "") -> tuple[dict[str, object], list[str]]:
    """Build the tokenizer.* keys for a vocabulary of `size` tokens, and warnings. Raises ModelError.

    model: tokenizer.ggml.model of SentencePiece vocabularies, if it is not "llama". The keys are parsed like those of a
    GGUF file, so that localllm can read what it writes.
    """
    settings = VocabularySettings.read(folder)
    tokens = read_tokens(folder, settings.tokenizer, size, model == "gemma4")
    metadata = build_token_lists(tokens)
    with report_as_model_error(folder / "tokenizer.json"):
        ids = find_special_ids(tokens, settings)
        metadata |= {**ids, **build_tokenizer_flags(tokens, settings, ids)}
    metadata |= read_chat_templates(settings)
    try:
        metadata |= find_extra_end_tokens(metadata, settings)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    metadata |= build_localllm_keys(tokens, settings)
    warnings = [*tokens.warnings, *warn_wrong_types(settings), *warn_unknown_ends(tokens, settings)]
    warnings += warn_unused("tokenizer_config.json", settings.config, (), TOKENIZER_KEYS)
    if tokens.left_out:
        number, first = len(tokens.left_out), min(tokens.left_out)
        ends = ", ".join(map(printable, list_dropped_end_tokens(tokens, settings)))
        among = f"; among them {ends}, which ends answers" if ends else ""
        tokens_are = f"{number} token{'s' if number > 1 else ''} from id {first} on {'are' if number > 1 else 'is'}"
        warnings.append(f"{tokens_are} dropped: the model has {size}{among}")
    return metadata, warnings


def warn_wrong_types(settings: VocabularySettings) -> list[str]:
    """Return a warning for each value of a wrong type, which is ignored."""
    named = {"config.json": settings.model, "generation_config.json": settings.generation}
    odd = [
        f"{file}: {name}_token_id is not a number"
        for file, content in named.items()
        for name in SPECIAL
        if not all(is_integer(token) for token in to_list(content.get(f"{name}_token_id")))
    ]
    kinds: dict[str, type | tuple[type, ...]] = {
        "add_bos_token": bool,
        "add_eos_token": bool,
        "add_prefix_space": bool,
        "chat_template": (str, list),
    }
    kinds |= {f"{name}_token": (str, dict) for name in ENCODER_SPECIAL}
    for name, kind in kinds.items():
        if (value := settings.config.get(name)) is not None and not isinstance(value, kind):
            odd.append(f"tokenizer_config.json: {name} is {printable(str(value), 40)}")
    return [f"{problem}: ignored" for problem in odd]


def warn_unknown_ends(tokens: VocabularyBuilder, settings: VocabularySettings) -> list[str]:
    """Return a warning if eos_token_id names ids without a token."""
    ids = [
        token
        for token in settings.get_ids("eos")
        if token < 0 or (token >= tokens.size and token not in tokens.left_out)
    ]
    return (
        [f"eos_token_id {', '.join(map(str, ids))}: ignored, because the vocabulary has no such token"] if ids else []
    )


def to_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def build_token_lists(tokens: VocabularyBuilder) -> dict[str, object]:
    """Build the keys that hold the tokens: strings, types, scores, merges."""
    metadata: dict[str, object] = {
        f"{PREFIX}model": tokens.model,
        f"{PREFIX}pre": tokens.pre,
        f"{PREFIX}tokens": tokens.pieces,
    }
    if tokens.model in ("llama", "t5"):
        metadata[f"{PREFIX}scores"] = np.array(tokens.scores, np.float32)
    metadata[f"{PREFIX}token_type"] = np.array(tokens.types, np.int32)
    if tokens.merges is not None:
        metadata[f"{PREFIX}merges"] = tokens.merges
    return metadata | {f"{PREFIX}{key}": value for key, value in tokens.more.items()}


def find_special_ids(tokens: VocabularyBuilder, settings: VocabularySettings) -> dict[str, int]:
    """Find the id of each special token: by its string, else in config.json, else in the post-processor."""
    ids = {piece: token for token, piece in reversed(list(enumerate(tokens.pieces)))}
    template = settings.read_template() or {}
    metadata: dict[str, int] = {}
    for name, key in (ENCODER_SPECIAL if tokens.model in ("bert", "t5") else SPECIAL).items():
        by_number = [token for token in settings.get_ids(name) if 0 <= token < tokens.size]
        for token in (ids.get(settings.get_token(name) or ""), *by_number, ids.get(template.get(name) or "")):
            if token is not None:
                metadata.setdefault(f"{PREFIX}{key}_token_id", token)
    return metadata


def build_tokenizer_flags(
    tokens: VocabularyBuilder, settings: VocabularySettings, ids: Mapping[str, int]
) -> dict[str, bool]:
    """Decide which special tokens and spaces readers add before and after texts."""
    metadata: dict[str, bool] = {}
    if tokens.model == "bert":  # its readers always add tokens around texts
        return metadata
    for name, default in (("bos", tokens.model in ("llama", "gemma4")), ("eos", None)):
        token, template = ids.get(f"{PREFIX}{name}_token_id"), settings.read_template()
        adds = settings.config.get(f"add_{name}_token")
        if not isinstance(adds, bool):
            adds = default if template is None or token is None else template[name] == tokens.pieces[token]
        if adds is not None:
            metadata[f"{PREFIX}add_{name}_token"] = adds and token is not None
    adds_space = settings.config.get("add_prefix_space")
    adds_space = adds_space if isinstance(adds_space, bool) else tokens.adds_space
    if adds_space is not None:
        metadata[f"{PREFIX}add_space_prefix"] = adds_space
    return metadata


def find_extra_end_tokens(metadata: Mapping[str, object], settings: VocabularySettings) -> dict[str, object]:
    """Find the tokens of generation_config.json that end an answer besides EOS and those known by their strings.

    GGUF has keys for two of them. If there are more, all are also listed in Ollama's key, which llama.cpp does not
    read. Raises ModelError if the vocabulary is invalid or irregular.
    """
    vocabulary = read_vocabulary(metadata, oddities := Irregularities())
    if lines := oddities.format_lines():
        raise ModelError(lines[0].removeprefix("the file has irregularities that do not change its meaning: "))
    ends = [token for token in settings.get_ids("eos") if 0 <= token < len(vocabulary.pieces)]
    extra = [token for token in ends if token not in vocabulary.end_ids]
    named: dict[str, object] = {
        f"{PREFIX}{name}_token_id": token for name, token in zip(("eot", "eom"), extra, strict=False)
    }
    return named | ({f"{PREFIX}{MORE_ENDS}": np.array(ends, np.int32)} if len(extra) > len(named) else {})


def list_dropped_end_tokens(tokens: VocabularyBuilder, settings: VocabularySettings) -> list[str]:
    """Return the strings of tokens that end an answer but have no row in the embedding."""
    texts = [tokens.left_out[token] for token in settings.get_ids("eos") if token in tokens.left_out]
    named = settings.get_token("eos")
    return [*dict.fromkeys([*texts, *([named] if named in tokens.left_out.values() and named else [])])]


def build_localllm_keys(tokens: VocabularyBuilder, settings: VocabularySettings) -> dict[str, object]:
    """Build localllm's own keys: stop strings that are not tokens, and NFC where `pre` does not imply it."""
    texts = list_dropped_end_tokens(tokens, settings)
    metadata: dict[str, object] = {END_TEXTS_KEY: texts} if texts else {}
    if tokens.model == "gpt2" and tokens.composes != usually_uses_nfc(
        tokens.pre, str(settings.model.get("model_type")).replace("_", "")
    ):
        metadata[NORMALIZER] = COMPOSING if tokens.composes else NOTHING
    return metadata


def read_chat_templates(settings: VocabularySettings) -> dict[str, object]:
    """Read the chat template and named ones; a separate file takes precedence over tokenizer_config.json."""
    templates: dict[str, str] = {}
    content = settings.config.get("chat_template")
    if content is None:
        content = (read_json(settings.folder / "chat_template.json") or {}).get("chat_template")
    for entry in content if isinstance(content, list) else [{"name": "default", "template": content}]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if isinstance(name, str) and isinstance(text, str):
            templates[name] = text
    for path in [
        settings.folder / "chat_template.jinja",
        *sorted(settings.folder.glob("additional_chat_templates/*.jinja")),
    ]:
        if (text := read_text(path)) is not None:
            templates["default" if path.parent == settings.folder else path.stem] = text
    default = templates.pop("default", None)
    metadata: dict[str, object] = {} if default is None else {"tokenizer.chat_template": default}
    if templates:
        metadata["tokenizer.chat_templates"] = sorted(templates)
    return metadata | {f"tokenizer.chat_template.{name}": text for name, text in sorted(templates.items())}
