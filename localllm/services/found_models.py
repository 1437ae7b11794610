"""Finds models that other programs have downloaded, and only reads them.

    hf:OWNER/REPOSITORY:Q4_K_M   in Hugging Face's cache or LM Studio's folder
    ollama:llama3.2:3b           in Ollama's store; "ollama:" may be omitted

Sources: huggingface_hub's guide to its cache; Ollama's manifests, as its registry serves them.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

from localllm.errors import ModelError
from localllm.files.models_folder import ModelFile, list_files, model_files, size_of
from localllm.frozen import frozen

NameOf = Callable[[str, ModelFile, list[str]], str]  # (repository, model, all quantizations there): a name
HUGGING_FACE, LM_STUDIO, OLLAMA = "Hugging Face", "LM Studio", "Ollama"
PREFIX = "ollama:"
REGISTRY, LIBRARY = "registry.ollama.ai", "library"  # omitted in Ollama's names
MODEL_LAYER = "application/vnd.ollama.image.model"
MOST_MANIFEST = 1 << 20  # bytes; real ones have some hundreds
ELSEWHERE = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama/models")


@frozen
class FoundModel:
    """A model of another program.

    Attributes:
        name: name for commands.  program: the one that downloaded it.  path: path of the first file.  size: size of
        all, in bytes.
    """

    name: str
    program: str
    path: Path
    size: int
    quantization: str = ""

    def facts(self) -> dict[str, object]:
        """Return the model for JSON."""
        return {
            "name": self.name,
            "program": self.program,
            "path": str(self.path),
            "bytes": self.size,
            "quantization": self.quantization or None,
        }


def find_models(name_of: NameOf) -> list[FoundModel]:
    """List the models of all programs, by program and name; name_of: see catalogue.shortest_name."""
    hub = [model for folder in repository_folders() for model in iter_repository(*folder, name_of)]
    ollama = [FoundModel(f"{PREFIX}{name}", OLLAMA, path, size_of(path)) for name, path in iter_ollama()]
    by_name = {(model.program, model.name): model for model in reversed([*hub, *ollama])}  # the main snapshot wins
    return [by_name[key] for key in sorted(by_name)]


def find_elsewhere(name: str, repository: str, select: Callable[[list[str]], Sequence[str]]) -> str | None:
    """Return the path of a model that another program has downloaded, None if there is none.

    repository: the hub repository that the name refers to, "" for none.  select: returns the model's files among those
    of the repository, or raises ModelError.
    """
    for _, each, folder in repository_folders() if repository else ():
        if each.lower() == repository.lower():
            try:
                return str(folder / select(list_files(folder))[0])
            except ModelError:
                continue
    lower_name = name.removeprefix(PREFIX).lower()
    lower_name = lower_name if ":" in lower_name else f"{lower_name}:latest"
    return next((str(path) for each, path in iter_ollama() if each.lower() == lower_name), None)


def repository_folders() -> Iterator[tuple[str, str, Path]]:
    """Yield (program, repository's name, folder of its files)."""
    for folder in sorted_folders(hub_cache()):
        kind, _, name = folder.name.partition("--")
        if kind == "models" and name.count("--") == 1:
            yield from ((HUGGING_FACE, name.replace("--", "/"), snapshot) for snapshot in snapshots(folder))
    for parent in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
        for owner in sorted_folders(parent):
            yield from ((LM_STUDIO, f"{owner.name}/{folder.name}", folder) for folder in sorted_folders(owner))


def hub_cache() -> Path:
    """Return Hugging Face's cache, as huggingface_hub finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


def snapshots(folder: Path) -> list[Path]:
    """Return the folders of a repository's snapshots, the main branch's first."""
    try:
        main = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    return sorted(sorted_folders(folder / "snapshots"), key=lambda snapshot: snapshot.name != main)


def iter_repository(program: str, repository: str, folder: Path, name_of: NameOf) -> Iterator[FoundModel]:
    """Yield the complete models of a folder."""
    models = model_files(name for name in list_files(folder) if (folder / name).is_file())
    for model in models:
        if model.is_whole:
            name = name_of(repository, model, [each.quantization for each in models])
            paths = [folder / file for file in model.files]
            yield FoundModel(name, program, paths[0], sum(map(size_of, paths)), model.quantization)


def iter_ollama() -> Iterator[tuple[str, Path]]:
    """Yield the names of Ollama's models and the paths of their files."""
    models_variable = os.environ.get("OLLAMA_MODELS")
    for store in map(
        Path, [models_variable] if models_variable else [os.path.expanduser("~/.ollama/models"), *ELSEWHERE]
    ):
        for manifest in sorted(list_files(store / "manifests")):
            parts = manifest.split("/")
            if len(parts) >= 4 and (blob := model_blob(store, store / "manifests" / manifest)):
                shown_parts = [part for part, usual in zip(parts, (REGISTRY, LIBRARY), strict=False) if part != usual]
                yield "/".join([*shown_parts, *parts[2:-1]]) + f":{unquote(parts[-1])}", blob


def model_blob(store: Path, manifest: Path) -> Path | None:
    """Return the model file of a manifest, None if it has none or is damaged."""
    try:
        if size_of(manifest) > MOST_MANIFEST:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == MODEL_LAYER]
        algorithm, _, digest = digests[0].partition(":")
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    blob = store / "blobs" / f"{algorithm}-{digest}"
    return blob if algorithm == "sha256" and digest.isalnum() and blob.is_file() else None


def sorted_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, by name; none if it cannot be read."""
    try:
        return sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:
        return []
