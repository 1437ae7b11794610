"""The tokens by which a model fills in the middle of a text: ids in the metadata, or known texts in the vocabulary."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from localllm.files.gguf.metadata_reader import Checked
from localllm.text.endings import FILL_END_TEXTS, FILL_TEXTS
from localllm.text.token_types import PREFIX, special_id

TEXTS = {**FILL_TEXTS, **FILL_END_TEXTS}
OLDER_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}  # of the ids, in files of before 2024


class InfillTokens(NamedTuple):
    """Token ids.

    Attributes:
        prefix, suffix, middle: mark the parts of a text; the middle is last.
        repository, file: mark the names of a repository and of its files; None where a model has none.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def read_infill_tokens(
    metadata: Mapping[str, Any], find: Callable[[str], int | None], count: int
) -> InfillTokens | None:
    """Return the tokens; None if one of the first three is missing.

    find: returns the special token of a text.  count: of tokens.
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
