"""Find models that other programs have downloaded; their files are only read.

    hf:OWNER/REPOSITORY:Q4_K_M   in Hugging Face's cache or LM Studio's folder
    ollama:llama3.2:3b           in Ollama's store; "ollama:" may be omitted

Sources: huggingface_hub's guide to its cache; Ollama's manifests, as its registry serves them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from localllm.errors import ModelError
from localllm.files.models_folder import ModelFile, get_size, group_models, list_files
from localllm.frozen import frozen
from localllm.services.hub.ollama_store import StoredModel, find_stored, iter_stored

NameOf = Callable[[str, ModelFile, list[str]], str]  # (repository, model, all its quantizations) -> name
HUGGING_FACE, LM_STUDIO, OLLAMA = "Hugging Face", "LM Studio", "Ollama"

LM_STUDIO_SETTINGS = Path(".lmstudio", ".internal", "user-concrete-model-default-config")  # in the user's home


@frozen
class FoundModel:
    """A model of another program.

    Attributes:
        name: name for commands.  program: the one that downloaded it.  path: path of the first file.  size: of all
        files, in bytes.
    """

    name: str
    program: str
    path: Path
    size: int
    quantization: str = ""

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name, "program": self.program, "path": str(self.path), "bytes": self.size,
            "quantization": self.quantization or None,
        }  # fmt: skip


def find_models(name_of: NameOf) -> list[FoundModel]:
    """List the models of all programs, sorted by program and name; name_of: see catalogue.find_shortest_name."""
    hub = [model for folder in iter_repositories() for model in iter_models(*folder, name_of)]
    ollama = [FoundModel(model.shown_name, OLLAMA, model.path, get_size(model.path)) for model in iter_stored()]
    by_name = {
        (model.program, model.name): model for model in reversed([*hub, *ollama])
    }  # the main snapshot has priority
    return [by_name[key] for key in sorted(by_name)]


def find_elsewhere(
    name: str, repository: str, select: Callable[[list[str]], Sequence[str]]
) -> tuple[str, StoredModel | None] | None:
    """Find a model that another program downloaded; return its path, and its entry in Ollama's store, if any.

    Returns None if there is no such model.

    repository: the hub repository that the name refers to, "" for none.  select: returns the model's files among the
    repository's, or raises ModelError.
    """
    for _, each, folder in iter_repositories() if repository else ():
        if each.lower() == repository.lower():
            try:
                return str(folder / select(list_files(folder))[0]), None
            except ModelError:
                continue
    stored = find_stored(name)
    return (str(stored.path), stored) if stored else None


def list_unused_files(path: str, template: str | None) -> Iterator[str]:
    """Yield a line for each unused file with instructions or settings for a model.

    path: the model's file, in a repository's folder.  template: its chat template, None if another one was chosen.
    """
    folder = Path(path).parent
    jinja = folder / "chat_template.jinja"
    if template is not None and jinja.is_file() and jinja.read_text(encoding="utf-8").strip() != template.strip():
        yield (
            f"{jinja} is not used, but differs from the model's chat template; use it with --chat-template-file {jinja}"
        )
    others = [folder / name for name in ("template", "system", "params")]  # of Ollama, in repositories of the hub
    *_, owner, repository = folder.parts
    others.append(Path.home() / LM_STUDIO_SETTINGS / owner / repository / f"{Path(path).name}.json")
    yield from (f"{each} is not used" for each in others if each.is_file())


def iter_repositories() -> Iterator[tuple[str, str, Path]]:
    """Yield program, repository name and folder of each downloaded repository."""
    for folder in list_folders(get_hub_cache()):
        kind, _, name = folder.name.partition("--")
        if kind == "models" and name.count("--") == 1:
            yield from ((HUGGING_FACE, name.replace("--", "/"), snapshot) for snapshot in list_snapshots(folder))
    for parent in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for owner in list_folders(parent):
            yield from ((LM_STUDIO, f"{owner.name}/{folder.name}", folder) for folder in list_folders(owner))


def get_hub_cache() -> Path:
    """Return the folder of Hugging Face's cache, determined as huggingface_hub does."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def list_snapshots(folder: Path) -> list[Path]:
    """Return the folders of a repository's snapshots, the main branch's first."""
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(list_folders(folder / "snapshots"), key=lambda snapshot: snapshot.name != main)


def iter_models(program: str, repository: str, folder: Path, name_of: NameOf) -> Iterator[FoundModel]:
    """Yield the complete models of a folder."""
    models = group_models(name for name in list_files(folder) if (folder / name).is_file())
    for model in models:
        if model.is_whole:
            name = name_of(repository, model, [each.quantization for each in models])
            paths = [folder / file for file in model.files]
            yield FoundModel(name, program, paths[0], sum(map(get_size, paths)), model.quantization)


def list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:
        return []
