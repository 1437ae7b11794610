"""Names as Ollama writes them, and suggestions for unknown names.

A name is FAMILY:TAG, such as qwen2.5-coder:1.5b-instruct-q4_K_M. The tag has the size, words and the quantization;
without a tag, or with "latest", a family means one of its sizes.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, Protocol

REGISTRY = re.compile(r"^(?:registry\.ollama\.ai/)?(?:library/)?(?=[^/]+$)")
SIZE = re.compile(r"e?\d+(?:\.\d+)?[bm]|\d+x\d+(?:\.\d+)?b")
QUANTIZATION = re.compile(r"(?:iq|q|tq)\d\w*|b?f(?:p)?(?:16|32)|mxfp4")
ACTIVE = re.compile(r"a\d+(?:\.\d+)?[bm]")  # weights that a mixture of experts uses for a token
USUAL_WORDS = ("latest", "instruct", "it", "chat")  # of a tag: the models that are known are these
MOST_NAMES = 8  # that a message lists


class Registered(Protocol):
    """A model of models.toml; ollama: names of it that do not follow from its own."""

    @property
    def name(self) -> str: ...
    @property
    def ollama(self) -> Sequence[str]: ...


class NameParts(NamedTuple):
    """The parts of a name that say which model it is, without what separates them, and the quantization, "" for none.

    Models of one family differ in their sizes; words of a tag belong to the family.
    """

    family: str
    size: str
    quantization: str = ""


def parse_name(text: str) -> NameParts:
    """Split a name, of Ollama or of models.toml, into its parts."""
    words = [word for word in re.split("[-:]", REGISTRY.sub("", text.lower())) if word not in ("", *USUAL_WORDS)]
    quantization = words.pop() if len(words) > 1 and QUANTIZATION.fullmatch(words[-1]) else ""
    size = next((word for word in words[1:] if SIZE.fullmatch(word)), "")
    family = "".join(word for word in words if word != size and not ACTIVE.fullmatch(word))
    return NameParts(re.sub("[^a-z0-9./]", "", family), size, quantization.replace("fp", "f").upper())


def find_registered(text: str, models: Iterable[Registered]) -> str | None:
    """Return the name in models.toml of the model that Ollama calls so, with the quantization; None without one."""
    wanted = parse_name(text)
    for model in models:
        if any(parse_name(each)[:2] == wanted[:2] for each in (model.name, *model.ollama)):
            return f"{model.name}:{wanted.quantization}" if wanted.quantization else model.name
    return None


def suggestion(name: str, registered: Mapping[str, Registered], on_disk: Collection[str]) -> str:
    """Return the end of the error about an unknown name: similar names, never of another size than the one asked for.

    registered: the models of models.toml.  on_disk: names of models in the folder.
    """
    if os.path.dirname(REGISTRY.sub("", name)) or name.endswith(".gguf") or not name.strip():
        return ""
    if " " in name:
        return "; a text to answer stands behind the model, or behind -p"
    end = " (`localllm list --all` shows the known ones)"
    asked, base = parse_name(name), REGISTRY.sub("", name).partition(":")[0].lower()
    relatives = relatives_of(parse_name(base).family, registered) if len(base) > 2 else []
    close = relatives or get_close_matches(base, {*registered, *on_disk}, len(registered), cutoff=0.7)
    fitting = [each for each in close if asked.size in ("", parse_name(each).size)]
    if fitting:
        listed = fitting[: MOST_NAMES if relatives else 3]
        return f" and no model of that name; did you mean {' or '.join(listed)}?{end}"
    if relatives:
        return (
            f" and no model of that name in the size {asked.size}; there are {', '.join(relatives[:MOST_NAMES])}{end}"
        )
    return f" and no model of that name{end}"


def relatives_of(family: str, registered: Iterable[str]) -> list[str]:
    """Return the models of a family and of its later versions; without one, those whose names begin so."""
    families = {each: parse_name(each).family for each in registered}
    version = re.compile(rf"{re.escape(family)}(\.\d+)?")
    relatives = [each for each, name in families.items() if version.fullmatch(name)]
    return relatives or [each for each, name in families.items() if name.startswith(family)]
