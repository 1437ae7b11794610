"""Read Ollama's store: its models by name, with all layers of a name.

A name in the store is more than a file: it may have an adapter, a system message, parameters, messages and a template.
Source: Ollama's manifests, and its documentation of the Modelfile.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from localllm.errors import ModelError
from localllm.files.gguf.kinds import ADAPTER, read_kind
from localllm.files.models_folder import get_size, list_files
from localllm.frozen import frozen
from localllm.generation.options import OPTIONS
from localllm.generation.sampling.options import OPTIONS as SAMPLING
from localllm.generation.sampling.options import map_names
from localllm.services.hub.go_templates import find_marks
from localllm.text.messages import Message

PREFIX = "ollama:"
REGISTRY, LIBRARY, LATEST = "registry.ollama.ai", "library", "latest"  # omitted in Ollama's names
LAYER = "application/vnd.ollama.image."
MAX_LAYER = 1 << 20  # maximum bytes of a manifest or a text layer; real ones have a few thousand
SYSTEM_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama/models")
# Parameters and the options that they set. Those in IDLE only affect speed.
PARAMETERS = {"num_ctx": "ctx-size", "num_thread": "threads"} | {
    theirs: declared[name].long_name
    for declared in (OPTIONS, SAMPLING)
    for theirs, name in map_names("ollama", declared).items()
}
IDLE = frozenset(("num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock", "numa", "f16_kv"))
UNLIMITED = ("num_predict", "num_thread")  # values below 1 mean the default


def convert_parameters(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Convert parameters to option values by their long names; those without a counterpart are left out."""
    return {
        PARAMETERS[name]: value
        for name, value in parameters.items()
        if name in PARAMETERS and not (name in UNLIMITED and isinstance(value, int) and value < 1)
    }


@frozen
class StoredModel:
    """A model of Ollama's store.

    Attributes:
        name: with its tag, as Ollama shows it.  path: path of the weights.
        layers: paths of the other layers by type, such as "system".
    """

    name: str
    path: Path
    layers: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)

    @property
    def shown_name(self) -> str:
        return f"{PREFIX}{self.name}"

    @property
    def source(self) -> str:
        """Where its settings come from, for messages."""
        return f"{self.shown_name} in Ollama's store"

    @property
    def base(self) -> str:
        """The name that it stands for: none."""
        return ""

    def require_supported(self) -> None:
        """Raise ModelError for a name with an adapter that is no GGUF file."""
        if any(read_kind(path) != ADAPTER for path in self.layers.get("adapter", ())):
            raise ModelError(
                f"{self.shown_name} has an adapter that is not a GGUF adapter, or is missing:"
                " convert it and create the name again, or run its base model"
            )

    def read_text(self, kind: str) -> str | None:
        """Return the text of a layer, or None without one. Raises ModelError if it is damaged or missing."""
        paths = self.layers.get(kind)
        if not paths:
            return None
        try:
            if get_size(paths[-1]) > MAX_LAYER:
                raise ValueError
            return paths[-1].read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise self._make_damaged_error(kind) from None

    def read_options(self) -> dict[str, object]:
        """Return option values by their long names. Raises ModelError, as `text` does."""
        options = convert_parameters(self._read_parameters())
        if system := self.read_text("system"):
            options["system"] = system
        if projectors := [path for path in self.layers.get("projector", ()) if path.is_file()]:
            options["mmproj"] = str(projectors[0])
        if adapters := self.layers.get("adapter"):
            options["lora"] = [str(path) for path in adapters]
        return options

    def read_messages(self) -> list[Message]:
        """Return the messages that begin each conversation. Raises ModelError, as `text` does."""
        messages = self._read_json("messages", list)
        for message in messages:
            if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ROLE_AND_CONTENT):
                raise self._make_damaged_error("messages")
        return [{key: message[key] for key in ROLE_AND_CONTENT} for message in messages]

    def describe_unused(self, template: str | None, is_chosen: bool) -> list[str]:
        """List unused layers and parameters of the name, each as a line for the user.

        template: the chat template of the file, in Jinja.  is_chosen: whether the user chose another one.
        """
        lines = list[str]()
        if names := sorted(self._read_parameters().keys() - PARAMETERS.keys() - IDLE):
            lines.append(f"{self.shown_name}: ignored parameters (not supported): {', '.join(names)}")
        if not is_chosen and self._replaces_template(template):
            lines.append(
                f"{self.shown_name}: the name's template is ignored, but differs from the model's chat template;"
                " choose one with --chat-template"
            )
        return lines

    def _replaces_template(self, source: str | None) -> bool:
        """Return whether the name's template formats conversations differently from a Jinja one.

        Ollama's templates use Go's syntax, so only the markers around messages are compared, such as <|im_start|>.
        """
        template = self.read_text("template")
        if template is None:
            return False
        marks = find_marks(template)
        return not marks or not source or any(mark not in source for mark in marks)

    def _read_parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self._read_json("params", dict)
        return parameters

    def _read_json(self, kind: str, type_expected: type) -> Any:
        text = self.read_text(kind)
        if text is None:
            return type_expected()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise self._make_damaged_error(kind) from None
        if not isinstance(value, type_expected):
            raise self._make_damaged_error(kind)
        return value

    def _make_damaged_error(self, kind: str) -> ModelError:
        return ModelError(f"{self.shown_name}: its {kind} layer in Ollama's store is damaged or missing")


ROLE_AND_CONTENT = ("role", "content")


def find_stored(name: str) -> StoredModel | None:
    """Find a model by name in Ollama's store; "ollama:", the registry and the tag "latest" may be omitted."""
    wanted = name.removeprefix(PREFIX).lower().removeprefix(f"{REGISTRY}/").removeprefix(f"{LIBRARY}/")
    wanted = wanted if ":" in wanted.rpartition("/")[2] else f"{wanted}:{LATEST}"
    return next((model for model in iter_stored() if model.name.lower() == wanted), None)


def iter_stored() -> Iterator[StoredModel]:
    """Yield the models of Ollama's store."""
    models_variable = os.environ.get("OLLAMA_MODELS")
    folders = [models_variable] if models_variable else [os.path.expanduser("~/.ollama/models"), *SYSTEM_FOLDERS]
    for store in map(Path, folders):
        for manifest in sorted(list_files(store / "manifests")):
            parts = manifest.split("/")
            if len(parts) < 4:
                continue
            layers = read_layers(store, store / "manifests" / manifest)
            if weights := layers.pop("model", ()):
                shown_parts = [part for part, usual in zip(parts, (REGISTRY, LIBRARY), strict=False) if part != usual]
                name = "/".join([*shown_parts, *parts[2:-1]]) + f":{unquote(parts[-1])}"
                if weights[0].is_file():
                    yield StoredModel(name, weights[0], layers)


def read_layers(store: Path, manifest: Path) -> dict[str, tuple[Path, ...]]:
    """Return the paths of a manifest's layers by type; an empty dict for a damaged manifest."""
    layers = dict[str, tuple[Path, ...]]()
    try:
        if get_size(manifest) > MAX_LAYER:
            return {}
        for layer in json.loads(manifest.read_bytes())["layers"]:
            kind, (algorithm, _, digest) = layer["mediaType"], layer["digest"].partition(":")
            if kind.startswith(LAYER):
                if algorithm != "sha256" or not digest.isalnum():
                    return {}
                name = kind.removeprefix(LAYER)
                layers[name] = (*layers.get(name, ()), store / "blobs" / f"{algorithm}-{digest}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return layers
