"""Resolve model names: known models (models.toml), the Hugging Face hub, and files on disk.

    qwen3-4b                      a known model in its default quantization
    qwen3-4b:Q8_0                 in another quantization
    hf:OWNER/REPOSITORY           any model of the hub; :QUANTIZATION if it has several, or /FILE.gguf
    hf:OWNER/REPOSITORY@REVISION  at a branch, a tag or a commit
    OWNER/REPOSITORY              the same as hf:OWNER/REPOSITORY; also hf.co/OWNER/REPOSITORY and the page's URL
    gemma3:4b                     a known model by Ollama's name
    NAME                          a file in the models folder, as `localllm list` shows it
    ollama:NAME:TAG               a model in Ollama's store; those in Hugging Face's cache and LM Studio are hf:...

Most commands use this module, so it imports no slow ones.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from localllm.errors import ModelError, UsageError
from localllm.files.download import find_partials
from localllm.files.models_folder import (
    ENDING,
    LATEST,
    PARTIAL,
    ModelFile,
    get_created_path,
    get_models_folder,
    get_size,
    group_models,
    is_path,
    is_projector,
    list_created_names,
    list_own_files,
    normalize_quantization,
)
from localllm.files.models_folder import QUANTIZATION as TYPE
from localllm.files.settings import load_settings
from localllm.frozen import frozen

if TYPE_CHECKING:
    from localllm.services.hub.created_names import CreatedModel
    from localllm.services.hub.ollama_store import StoredModel

DATA = Path(__file__).resolve().parents[2] / "data"
USUAL = "Q4_K_M"  # default quantization
HUB = "hf:"
# The suffix of an incomplete download's file name.
PARTIAL_SUFFIX = re.compile(rf"\.[0-9a-f]+{re.escape(PARTIAL)}$")
REPOSITORY = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.%+-]+)?)"
    r"(?:/(?P<file>.+)|:(?P<quantization>[\w-]+))?"
)
REVISION = re.compile(
    r"/(?:resolve|blob|raw|tree|commit)/(?P<revision>refs/[^/]+/[^/]+|[^/]+)(?P<file>/.*)?"
)  # in a URL
MAIN = "main"
ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?P<rest>[/:][^?#]*)?(?:[?#].*)?"
)
# Ollama's names are FAMILY:TAG, such as qwen2.5-coder:1.5b-instruct-q4_K_M. The tag has the size, words and the
# quantization; without a tag, or with "latest", the family stands for one of its sizes.
REGISTRY = re.compile(r"^(?:registry\.ollama\.ai/)?(?:library/)?(?=[^/]+$)")
SIZE = re.compile(r"e?\d+(?:\.\d+)?[bm]|\d+x\d+(?:\.\d+)?b")
QUANTIZATION = re.compile(r"(?:iq|q|tq)\d\w*|b?f(?:p)?(?:16|32)|mxfp4")
ACTIVE = re.compile(r"a\d+(?:\.\d+)?[bm]")  # the active parameters of a mixture of experts
USUAL_WORDS = ("latest", "instruct", "it", "chat")  # words of a tag that apply to all known models
MAX_NAMES = 8  # maximum names listed in a message


@frozen
class KnownModel:
    """An entry of models.toml, which documents the fields."""

    name: str
    description: str
    architecture: str
    parameters: str
    file: str
    megabytes: int
    context: int
    license: str
    repository: str = ""
    quantization: str = ""
    ollama: Sequence[str] = ()

    @property
    def is_embedder(self) -> bool:
        return self.description.startswith("Embeddings")


@frozen
class HubReference:
    """A reference to a model on the Hugging Face hub.

    Attributes:
        text: the name as the user wrote it.  repository: OWNER/REPOSITORY, with @REVISION unless it is main.
        pattern: glob of the file's name.  quantization: the requested one, "" for the default.  usual: the default.
        megabytes: approximate, 0 if unknown.
    """

    text: str
    repository: str
    pattern: str = "*"
    quantization: str = ""
    usual: str = USUAL
    megabytes: int = 0

    @property
    def size(self) -> str:
        """The approximate size of the file as text, "" if unknown."""
        if not self.megabytes:
            return ""
        return f"about {self.megabytes / 1000:.1f} GB" if self.megabytes >= 1000 else f"about {self.megabytes} MB"


class MissingError(ModelError):
    """A model that is not on this computer, but can be pulled."""

    def __init__(self, reference: HubReference, relatives: Sequence[str] = ()):
        """Make the error; relatives: names of models of its family that are on this computer."""
        self.reference, self.relatives = reference, relatives
        size = f" ({reference.size})" if reference.size else ""
        here = f"; of its family, {', '.join(relatives[:MAX_NAMES])} {'are' if relatives[1:] else 'is'} here"
        super().__init__(
            f"{reference.text}: not on this computer; download it with `localllm pull {reference.text}`{size}"
            + here * bool(relatives)
        )

    def __reduce__(self) -> tuple[type["MissingError"], tuple[HubReference, Sequence[str]]]:
        return MissingError, (self.reference, self.relatives)


def get_registry_path() -> Path:
    installed = DATA / "models.toml"
    return installed if installed.exists() else DATA.parents[1] / "models.toml"


@cache
def load_registry() -> dict[str, KnownModel]:
    import tomllib

    with open(get_registry_path(), "rb") as file:
        return {entry["name"]: KnownModel(**entry) for entry in tomllib.load(file)["model"]}


@frozen
class LocatedModel:
    """The file that a model's name refers to; stored: what else the name has, created or in Ollama's store."""

    path: str
    stored: "StoredModel | CreatedModel | None" = None


def resolve_model(model: str | os.PathLike[str]) -> str:
    """Return the path of a model: an existing path unchanged, or the file that a name refers to.

    Raises MissingError for a model that can be pulled, ModelError for an unknown name, UsageError.
    """
    return find_model(model).path


def find_model(model: str | os.PathLike[str], depth: int = 0) -> LocatedModel:
    """Find a model's file, and what else its name has. Raises the errors of `resolve_model`.

    depth: of created names that stand for this one.
    """
    path = os.fspath(model)
    if is_path(path):
        return LocatedModel(path)
    name = resolve_alias(path)
    if is_path(name):
        return LocatedModel(name)
    if os.path.isfile(get_created_path(name)):
        from localllm.services.hub.created_names import find_created

        if created := find_created(name, depth):
            return LocatedModel(locate_base(created, depth), created)
    if (registered := load_registry().get(name.lower())) and not registered.repository:
        return LocatedModel(str(DATA / registered.file))
    reference = parse_reference(name)
    if reference and (paths := find_on_disk(reference)):
        return LocatedModel(str(paths[0]))
    try:
        if reference and name.startswith(HUB):
            raise MissingError(reference)
        return LocatedModel(find_in_folder(name))
    except ModelError as error:
        from localllm.services.hub.found_models import find_elsewhere  # seldom needed

        hub_reference = reference or HubReference(name, "")
        elsewhere = find_elsewhere(name, hub_reference.repository, lambda names: select_files(names, hub_reference))
        if elsewhere is None:
            same, relatives = find_similar(name)
            if len(same) == 1:
                return LocatedModel(str(same[0].path))
            raise (MissingError(reference, [each.name for each in relatives]) if reference else error) from None
        found_path, stored = elsewhere
        if stored:
            stored.require_supported()
        return LocatedModel(found_path, stored)


def locate_base(created: "CreatedModel", depth: int) -> str:
    """Return the file of the model that a created name stands for. Raises the errors of `resolve_model`."""
    try:
        return find_model(created.base, depth + 1).path
    except MissingError:
        raise
    except ModelError as error:
        raise error if depth else ModelError(f"{created.name} stands for {created.base}: {error}") from None


def list_other_names() -> dict[str, str]:
    """Return what the aliases and the created names stand for, by name."""
    from localllm.services.hub.created_names import find_created

    names: dict[str, str] = {}
    for name in list_created_names():
        try:
            created = find_created(name)
            names[name] = created.base if created else ""
        except ModelError:
            names[name] = "an invalid Modelfile"
    return names | dict(load_settings().aliases)


def resolve_adapter(name: str) -> str:
    """Return the path of an adapter: the file that a name refers to, or else the name itself, which may be a path.

    Raises MissingError for one that can be pulled, UsageError for a malformed name.
    """
    try:
        return resolve_model(name)
    except MissingError:
        raise
    except ModelError:
        return name


def resolve_alias(name: str) -> str:
    """Return what a name is an alias of, also through other aliases. Raises UsageError for aliases in a circle."""
    return load_settings().follow_alias(name)[-1]


def parse_reference(text: str) -> HubReference | None:
    """Parse a reference to a hub model; return None for other names.

    Raises UsageError for a malformed hf:... reference.
    """
    text = normalize_name(text)
    if text.startswith(HUB):
        match = REPOSITORY.fullmatch(text.removeprefix(HUB))
        if not match:
            raise UsageError(
                f"{text!r}: expected hf:OWNER/REPOSITORY, optionally followed by :QUANTIZATION or /FILE.gguf"
            )
        file = re.sub(r"([*?[])", r"[\1]", match["file"] or "")
        return HubReference(text, match["repository"], file or "*", match["quantization"] or "")
    name, _, quantization = text.partition(":")
    if registered := load_registry().get(name.lower()):
        if not registered.repository:
            return None
        usual = registered.quantization
        megabytes = registered.megabytes if quantization.upper() in ("", usual) else 0
        return HubReference(text, registered.repository, registered.file, quantization, usual, megabytes)
    return None


def normalize_name(text: str) -> str:
    """Convert hub URLs, OWNER/REPOSITORY and Ollama's names of known models to the forms above."""
    if address := ADDRESS.fullmatch(text):
        path, revision = address["rest"] or "", ""
        if match := REVISION.fullmatch(path.rstrip("/")):
            path = "" if path.startswith(("/tree/", "/commit/")) else match["file"] or ""
            revision = quote(unquote(match["revision"]), safe="")
        at = f"@{revision}" if revision not in ("", MAIN) else ""
        return HUB + address["repository"] + at + path.rstrip("/")
    text = REGISTRY.sub("", text).removesuffix(LATEST)
    if REPOSITORY.fullmatch(text) and not text.endswith(".gguf") and text.partition(":")[0].count("/") == 1:
        return HUB + text
    name, _, tag = text.lower().partition(":")
    if name in load_registry() and not SIZE.match(tag):  # the tag is a quantization
        return text
    return find_registered(text, load_registry().values()) or text


def select_files(names: Iterable[str], reference: HubReference) -> tuple[str, ...]:
    """Select the files of a repository that match a reference.

    Raises ModelError, which lists the available ones.
    """
    pattern, whose = reference.pattern.lower(), f"{reference.text}: {reference.repository}"
    models = [
        model
        for model in group_models(names)
        if any(fnmatchcase(name.lower(), pattern) for name in (*model.files, f"{model.name}.gguf"))
    ]
    if not models:
        raise ModelError(f"{whose} has no matching GGUF file")
    quantization = normalize_quantization(reference.quantization or reference.usual)
    exact = [model for model in models if quantization in model.tags]
    near = [model for model in models if model.quantization in (f"UD-{quantization}", f"{quantization}_MOE")]
    selected = exact or near or ([] if reference.quantization else models)
    if len({model.name for model in selected}) != 1:  # a repository may have the same model as one file and split
        several = "several files" if exact or near else "several quantizations"
        problem = several if selected else f"no {quantization}"
        raise ModelError(f"{whose} has {problem}; available: {list_models(models)}")
    if not selected[0].is_whole:
        raise ModelError(f"{whose} lacks splits of {selected[0].name}")
    return selected[0].files


def list_models(models: Iterable[ModelFile]) -> str:
    """List a repository's models by quantization if that is unique, else by file name."""
    models = list(models)
    kinds = [model.quantization for model in models]
    return ", ".join(
        kind if kind and kinds.count(kind) == 1 else f"{model.name}.gguf"
        for kind, model in zip(kinds, models, strict=True)
    )


def find_on_disk(reference: HubReference) -> list[Path]:
    """Return the files of a pulled model in order, or [] if it is absent or incomplete."""
    folder = get_models_folder() / reference.repository
    names = list_own_files(folder)
    if not names:
        return []
    try:
        return [folder / name for name in select_files(names, reference)]
    except ModelError:
        return []


def find_in_folder(name: str) -> str:
    """Find a model in the models folder by its listed name. Raises ModelError."""
    names = (name, name.removesuffix(LATEST))
    for model in list_models_on_disk():
        if model.name in names and model.is_whole:
            return str(model.path)
    raise make_unknown_name_error(name)


def make_unknown_name_error(name: str) -> ModelError:
    on_disk = [*list_created_names(), *(each.name for each in list_models_on_disk())]
    return ModelError(f"{name}: no such file{suggest_names(name, load_registry(), on_disk)}")


@frozen
class ModelOnDisk:
    """A model in the models folder; sizes are in bytes.

    Attributes:
        name: name for commands.  path: path of the first file.  files: all of them.  is_whole: False for an incomplete
        pull.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    size: int
    quantization: str
    is_whole: bool

    @property
    def kind(self) -> str:
        """The kind of file if it is not a model: "adapter" or "control vector"; "" for a model."""
        return self.read_header()[0]

    def read_header(self) -> tuple[str, str]:
        """Return the kind, and the format: as the file has it, or else as its name does."""
        from localllm.files.gguf.kinds import read_kind_and_format  # slow to import

        kind, format = read_kind_and_format(self.path) if self.is_whole else ("", "")
        return kind, format or self.quantization

    def to_dict(self) -> dict[str, object]:
        kind, format = self.read_header()
        return {
            "name": self.name, "path": str(self.path), "bytes": self.size, "quantization": self.quantization or None,
            "files": [str(path) for path in self.files], "complete": self.is_whole, "kind": kind or "model",
            "format": format or None,
        }  # fmt: skip


def list_models_on_disk() -> list[ModelOnDisk]:
    """List the models in the models folder by name, incomplete pulls included."""
    folder = get_models_folder()
    repositories: dict[str, list[str]] = {}
    for name in list_own_files(folder):
        parts = name.split("/")
        repository = "/".join(parts[:2]) if len(parts) > 2 else ""
        # NAME.gguf.CHECKSUM.partial is an incomplete NAME.gguf
        name = name.removesuffix(PARTIAL).rpartition(".")[0] if name.endswith(PARTIAL) else name
        repositories.setdefault(repository, []).append(name.removeprefix(f"{repository}/"))
    models = [
        model for repository, names in repositories.items() for model in iter_repository(folder, repository, names)
    ]
    return sorted(models, key=lambda model: model.name)


def iter_repository(folder: Path, repository: str, names: list[str]) -> Iterator[ModelOnDisk]:
    """Yield the models among a repository's files; repository: "" for files outside repositories."""

    models = group_models(set(names))
    for model in models:
        targets = tuple(folder / repository / file for file in model.files)
        partial_files = [path for target in targets for path in find_partials(target)]
        files = tuple(target for target in targets if target.is_file())
        size = sum(map(get_size, (*files, *partial_files)))
        is_complete = model.is_whole and len(files) == len(targets)
        name = find_shortest_name(repository, model, [each.quantization for each in models])
        yield ModelOnDisk(name, targets[0], (*files, *partial_files), size, model.quantization, is_complete)


def find_shortest_name(repository: str, model: ModelFile, quantizations: list[str]) -> str:
    """Return the shortest name that identifies a model in the models folder."""
    if not repository:
        return model.name
    for registered in load_registry().values():
        if registered.repository == repository and fnmatchcase(f"{model.name}.gguf".lower(), registered.file.lower()):
            is_usual = model.quantization == registered.quantization
            return registered.name if is_usual else f"{registered.name}:{model.quantization}"
    if model.quantization and quantizations.count(model.quantization) == 1:
        return f"{HUB}{repository}:{model.quantization}"
    return f"{HUB}{repository}/{model.files[0]}"


def find_removable(name: str) -> ModelOnDisk:
    """Find the model that `localllm rm NAME` would remove. Raises ModelError if there is none."""
    models, lower_name = list_models_on_disk(), resolve_alias(name).lower()
    if not is_path(name) and os.path.isfile(created := get_created_path(name)):
        return ModelOnDisk(name, created, (created,), get_size(created), "", True)
    for model in models:
        if model.name.lower() == lower_name:
            return add_projectors(model, models)
    try:
        path = Path(resolve_model(name)).absolute()
    except ModelError:
        path = Path(name).absolute()
    for model in models:
        if path in model.files:
            return add_projectors(model, models)
    raise ModelError(f"{name}: not in the models folder, {get_models_folder()}")


def add_projectors(model: ModelOnDisk, models: list[ModelOnDisk]) -> ModelOnDisk:
    """Add a repository's projectors, including incomplete ones, to its last model."""
    folder = model.path.parent
    if (
        len(folder.relative_to(get_models_folder()).parts) < 2
        or [each.path.parent for each in models].count(folder) != 1
    ):
        return model
    projectors = tuple(path for path in folder.iterdir() if is_projector(PARTIAL_SUFFIX.sub("", path.name)))
    return replace(model, files=(*model.files, *projectors), size=model.size + sum(map(get_size, projectors)))


def find_similar(name: str) -> tuple[list[ModelOnDisk], list[ModelOnDisk]]:
    """Find the models in the folder that an Ollama name means: those of its family, size and quantization.

    Return them, and all of its family. Without a quantization in the name, Q4_K_M is preferred; without a size in it,
    the size is that of the known model of that name, if there is one.
    """
    if "/" in REGISTRY.sub("", name) or name.endswith(".gguf"):
        return [], []
    wanted = parse_name(find_registered(name, load_registry().values()) or name)
    relatives = [
        (model, parts)
        for model in list_models_on_disk()
        if model.is_whole and (parts := parse_file_name(model)).family == wanted.family
    ]
    same = [
        model
        for model, parts in relatives
        if wanted.size in ("", parts.size) and parse_name(name).quantization in ("", parts.quantization)
    ]
    usual = [model for model in same if model.quantization == USUAL]
    return usual if len(usual) == 1 and len(same) > 1 else same, [model for model, _ in relatives]


def parse_file_name(model: ModelOnDisk) -> "NameParts":
    """Split the name of a file in the models folder into its components."""
    base = TYPE.sub("", model.path.name.removesuffix(ENDING)).strip("-._ ")
    words = [word for word in re.split("[-_]", base.lower()) if word not in ("meta", "gguf")]
    return parse_name("-".join(words))._replace(quantization=model.quantization)


# ---- Ollama's names, and suggestions for unknown names


class NameParts(NamedTuple):
    """A model's name split into family, size and quantization ("" for none).

    Models of one family differ in size; words of a tag belong to the family.
    """

    family: str
    size: str
    quantization: str = ""


def parse_name(text: str) -> NameParts:
    """Split a name from Ollama or models.toml into its components."""
    words = [word for word in re.split("[-:]", REGISTRY.sub("", text.lower())) if word not in ("", *USUAL_WORDS)]
    quantization = words.pop() if len(words) > 1 and QUANTIZATION.fullmatch(words[-1]) else ""
    size = next((word for word in words[1:] if SIZE.fullmatch(word)), "")
    family = "".join(word for word in words if word != size and not ACTIVE.fullmatch(word))
    return NameParts(re.sub("[^a-z0-9./]", "", family), size, quantization.replace("fp", "f").upper())


def find_registered(text: str, models: Iterable[KnownModel]) -> str | None:
    """Return the name in models.toml for an Ollama name, with its quantization; None if unknown."""
    wanted = parse_name(text)
    for model in models:
        if any(parse_name(each)[:2] == wanted[:2] for each in (model.name, *model.ollama)):
            return f"{model.name}:{wanted.quantization}" if wanted.quantization else model.name
    return None


def suggest_names(name: str, registered: Mapping[str, KnownModel], on_disk: Collection[str]) -> str:
    """Return the end of the error message about an unknown name: similar names of the requested size.

    registered: the models of models.toml.  on_disk: names of models in the models folder.
    """
    if os.path.dirname(REGISTRY.sub("", name)) or name.endswith(".gguf") or not name.strip():
        return ""
    if " " in name:
        return "; put the prompt after the model, or after -p"
    end = " (`localllm list --all` lists the known models)"
    asked, base = parse_name(name), REGISTRY.sub("", name).partition(":")[0].lower()
    plain = [each for each in on_disk if "/" not in each and each not in registered]
    relatives = find_relatives(parse_name(base).family, [*plain, *registered]) if len(base) > 2 else []
    close = relatives or get_close_matches(base, {*registered, *on_disk}, len(registered), cutoff=0.7)
    fitting = [each for each in close if asked.size in ("", parse_name(each).size)]
    if fitting:
        listed = fitting[: MAX_NAMES if relatives else 3]
        return f" and no model of that name; did you mean {' or '.join(listed)}?{end}"
    if relatives:
        others = ", ".join(relatives[:MAX_NAMES])
        return f" and no model of that name in the size {asked.size}; there are {others}{end}"
    return f" and no model of that name{end}"


def find_relatives(family: str, registered: Iterable[str]) -> list[str]:
    """Return the models of a family and its later versions; if none, those whose family begins with this one."""
    families = {each: parse_name(each).family for each in registered}
    version = re.compile(rf"{re.escape(family)}(\.\d+)?")
    relatives = [each for each, name in families.items() if version.fullmatch(name)]
    return relatives or [each for each, name in families.items() if name.startswith(family)]
