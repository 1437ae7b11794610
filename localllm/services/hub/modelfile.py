"""Read and write Modelfiles, with which Ollama describes a name: a model, and its settings.

Source: Ollama's documentation of the Modelfile.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from localllm.errors import UsageError
from localllm.files.models_folder import is_projector
from localllm.frozen import frozen
from localllm.services.hub.ollama_store import IDLE, PARAMETERS, convert_parameters
from localllm.text.messages import Message

FENCE = '"""'
ROLES = ("system", "user", "assistant")
IGNORED = ("renderer", "parser", "requires")  # instructions about Ollama's own program
INSTRUCTIONS = ("from", "parameter", "system", "message", "template", "adapter", "license", *IGNORED)
INSTRUCTION = re.compile(r"\s*([A-Za-z]+)(?:[ \t]+(.*))?", re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+|[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
MAX_BYTES = 1 << 20
LISTS = ("stop",)  # parameters that may be repeated
# Parameters of older versions, and the speed's; they are accepted without an effect.
UNUSED = (*IDLE, "num_keep", "num_gqa", "penalize_newline", "tfs_z", "vocab_only", "logits_all", "embedding_only")


@frozen
class Modelfile:
    """The content of a Modelfile.

    Attributes:
        base: the model after FROM.  projector: the file of a second FROM, "" for none.
        parameters: by Ollama's names.  adapters: paths or names of LoRA adapters.
        template: in Go's syntax, or the name of a built-in template.
    """

    base: str
    projector: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    system: str | None = None
    messages: tuple[Message, ...] = ()
    adapters: tuple[str, ...] = ()
    licenses: tuple[str, ...] = ()
    template: str | None = None

    def format(self) -> str:
        """Format the Modelfile, each instruction on a line of its own."""
        rows = [("FROM", self.base), *([("FROM", self.projector)] if self.projector else [])]
        rows += [("ADAPTER", each) for each in self.adapters]
        if self.template is not None:
            rows.append(("TEMPLATE", quote_text(self.template)))
        if self.system is not None:
            rows.append(("SYSTEM", quote_text(self.system)))
        rows += [("PARAMETER", line) for line in self.list_parameters()]
        rows += [("MESSAGE", f"{message['role']} {quote_text(message['content'])}") for message in self.messages]
        rows += [("LICENSE", quote_text(each)) for each in self.licenses]
        return "".join(f"{name} {value}\n" for name, value in rows)

    def list_parameters(self) -> list[str]:
        """Format each parameter as its name and its value."""
        return [
            f"{name} {quote_text(each) if isinstance(each, str) else each}"
            for name, value in self.parameters.items()
            for each in (value if isinstance(value, list) else [value])
        ]

    def to_options(self) -> dict[str, object]:
        """Return option values by their long names."""
        options = convert_parameters(self.parameters)
        if self.system is not None:
            options["system"] = self.system
        if self.projector:
            options["mmproj"] = self.projector
        if self.adapters:
            options["lora"] = [*self.adapters]
        if self.template is not None:
            options["chat-template"] = self.template
        return options

    def hide_folders(self) -> "Modelfile":
        """Return the Modelfile with the names of files in place of their paths."""
        base, projector, *adapters = (
            os.path.basename(each) if os.path.isabs(each) else each
            for each in (self.base, self.projector, *self.adapters)
        )
        return replace(self, base=base, projector=projector, adapters=tuple(adapters))

    def list_unused(self) -> list[str]:
        """Return the names of the parameters that have no effect."""
        return [name for name in self.parameters if name not in PARAMETERS]


def quote_text(text: str) -> str:
    """Quote a text so that `parse_modelfile` returns it unchanged. Raises UsageError for one with three quotes."""
    if FENCE in text:
        raise UsageError(f"a text in a Modelfile must not contain {FENCE}: remove it")
    if text and text == text.strip() and "\n" not in text and '"' not in text:
        return text
    return f"{FENCE}{text}{FENCE}"


def read_modelfile(path: str | os.PathLike[str]) -> Modelfile:
    """Read a Modelfile. Raises UsageError, which names the line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: a Modelfile must be at most {MAX_BYTES} bytes (found {len(data)})")
    try:
        return parse_modelfile(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: a Modelfile must be UTF-8: save it as that") from None


def parse_modelfile(text: str, subject: str) -> Modelfile:
    """Parse a Modelfile. Raises UsageError, which begins with the subject and the line."""
    values: dict[str, list[str]] = {}
    parameters: dict[str, object] = {}
    messages: list[Message] = []
    for number, name, value in iter_instructions(text, subject):
        where = f"{subject}, line {number}"
        if name == "parameter":
            add_parameter(parameters, *split_word(value), where)
        elif name == "message":
            role, content = split_word(value)
            if role.lower() not in ROLES:
                raise UsageError(f"{where}: a MESSAGE must begin with {', '.join(ROLES)} (found {role[:20]!r})")
            messages.append({"role": role.lower(), "content": unquote_text(content, where)})
        else:
            values.setdefault(name, []).append(unquote_text(value, where))
    bases = [each for each in values.get("from", ()) if not is_projector(each)]
    if len(bases) != 1 or not bases[0]:
        raise UsageError(f"{subject}: a Modelfile must have one FROM with a model (found {len(bases)})")
    projectors = [each for each in values["from"] if is_projector(each)]
    template, system = (values.get(name, [None])[-1] for name in ("template", "system"))
    return Modelfile(
        bases[0], "".join(projectors[:1]), parameters, system, tuple(messages), tuple(values.get("adapter", ())),
        tuple(values.get("license", ())), template,
    )  # fmt: skip


def iter_instructions(text: str, subject: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name in lower case, and the text after it of each instruction. Raises UsageError."""
    lines = iter(enumerate(text.replace("\r\n", "\n").split("\n"), 1))
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = INSTRUCTION.fullmatch(line)
        if not match or match[1].lower() not in INSTRUCTIONS:
            names = ", ".join(name.upper() for name in INSTRUCTIONS if name not in IGNORED)
            word = line.split()[0][:40]
            raise UsageError(f"{subject}, line {number}: unknown instruction {word!r}; there are {names}")
        value = match[2] or ""
        while value.count(FENCE) == 1:
            following = next(lines, None)
            if following is None:
                raise UsageError(f"{subject}, line {number}: the text has no closing {FENCE}")
            value = f"{value}\n{following[1]}"
        yield number, match[1].lower(), value


def split_word(text: str) -> tuple[str, str]:
    """Split the first word off a text."""
    word, _, rest = text.strip().partition(" ")
    return word, rest.strip()


def unquote_text(text: str, where: str) -> str:
    """Return a value without its quotation marks. Raises UsageError."""
    text = text.strip()
    for mark in (FENCE, '"'):
        if text.startswith(mark):
            if len(text) < 2 * len(mark) or not text.endswith(mark):
                raise UsageError(f"{where}: the text has no closing {mark}")
            return text[len(mark) : -len(mark)]
    return text


def add_parameter(parameters: dict[str, object], name: str, text: str, where: str) -> None:
    """Add a parameter. Raises UsageError for an unknown name or a missing value."""
    name = name.lower()
    require_parameters([name], where)
    value = unquote_text(text, where)
    if not text:
        raise UsageError(f"{where}: PARAMETER {name} needs a value")
    if name in LISTS:
        earlier = parameters.get(name)
        parameters[name] = [*(earlier if isinstance(earlier, list) else []), value]
    else:
        parameters[name] = parse_number(value)


def require_parameters(names: Iterable[str], where: str) -> None:
    """Raise UsageError unless Ollama has parameters of these names."""
    for name in names:
        if name not in PARAMETERS and name not in UNUSED:
            raise UsageError(f"{where}: unknown parameter {name[:40]!r}; there are {', '.join(PARAMETERS)}")


def parse_number(text: str) -> int | float | str:
    if not NUMBER.fullmatch(text):
        return text
    return float(text) if re.search("[.eE]", text) else int(text)
