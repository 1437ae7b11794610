"""Fill-in-the-middle tokens of a model: ids in the metadata, or tokens with well-known texts."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from localllm.files.gguf.metadata_reader import Checked
from localllm.text.token_types import FILL_END_TEXTS, FILL_TEXTS, PREFIX, special_id

TEXTS = {**FILL_TEXTS, **FILL_END_TEXTS}
OLDER_NAMES = {
    "fim_pre": "prefix",
    "fim_suf": "suffix",
    "fim_mid": "middle",
}  # in files from before 2024


class InfillTokens(NamedTuple):
    """Ids of fill-in-the-middle tokens.

    Attributes:
        prefix, suffix, middle: precede the parts of a prompt; the model continues after `middle`.
        repository, file: precede the names of a repository and of its files; None where a model has none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def read_infill_tokens(
    metadata: Mapping[str, object], find: Callable[[str], int | None], count: int
) -> InfillTokens | None:
    """Return the tokens; None if prefix, suffix or middle is missing.

    find: returns the special token with a text, or None.  count: vocabulary size.
    """
    keys = Checked(metadata, PREFIX)

    def read(name: str) -> int | None:
        for key in filter(None, (name, OLDER_NAMES.get(name))):
            if (token := special_id(keys, key, count)) is not None:
                return token
        return next((token for text in TEXTS[name] if (token := find(text)) is not None), None)

    prefix, suffix, middle = read("fim_pre"), read("fim_suf"), read("fim_mid")
    if prefix is None or suffix is None or middle is None:
        return None
    return InfillTokens(prefix, suffix, middle, read("fim_rep"), read("fim_sep"))
