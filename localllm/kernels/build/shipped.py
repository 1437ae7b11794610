"""Object files that a platform wheel contains, so that the first start compiles nothing.

`scripts/wheels` puts them in localllm/data/kernels: a zip archive for each lane, and lanes.json with the CPU and the
features of each archive, its SHA-256, and the hash of all sources. An archive serves every CPU that has these
features and needs the same kernels: compiled for Haswell or for Zen 3, the AVX2 code is equally fast on a Zen 3.
Missing kernels, and lanes without an archive, are compiled as usual.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TypedDict

from localllm.kernels.build.objects import SOURCES, add_sources
from localllm.kernels.machine import Lane, get_lane

FOLDER = Path(__file__).parents[2] / "data" / "kernels"


class KernelArchive(TypedDict):
    cpu: str
    features: str  # in LLVM's notation: +avx2,+fma
    sha256: str


def compute_source_hash() -> str:
    key = hashlib.sha256()
    add_sources(key, SOURCES)
    return key.hexdigest()


def can_serve(made_for: Lane, lane: Lane) -> bool:
    """Return whether `lane` needs the kernels compiled for the lane `made_for`, and can run them."""
    return made_for.choices == lane.choices and made_for.features <= lane.features


@cache
def find_archive(lane: Lane, folder: Path = FOLDER) -> Path | None:
    """Return the archive for a lane.

    Return None if there is none, if it is damaged, or if it was built from other sources.
    """
    try:
        manifest = json.loads((folder / "lanes.json").read_bytes())
        if manifest["sources"] != compute_source_hash():
            return None
        rows: dict[str, KernelArchive] = manifest["archives"]
        for name, row in rows.items():
            if can_serve(Lane(row["cpu"], row["features"]), lane):
                path = folder / name
                return path if hashlib.sha256(path.read_bytes()).hexdigest() == row["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def read_shipped_objects(names: Iterable[str], lane: Lane | None = None, folder: Path = FOLDER) -> dict[str, bytes]:
    """Return, by name, those of the object files that the archive for a lane contains."""
    if (path := find_archive(lane or get_lane(), folder)) is None:
        return {}
    from zipfile import ZipFile  # seldom needed

    with ZipFile(path) as archive:
        members = set(archive.namelist())
        return {name: archive.read(f"{name}.o") for name in names if f"{name}.o" in members}


def list_shipped_names(lane: Lane | None = None, folder: Path = FOLDER) -> frozenset[str]:
    if (path := find_archive(lane or get_lane(), folder)) is None:
        return frozenset()
    from zipfile import ZipFile  # seldom needed

    with ZipFile(path) as archive:
        return frozenset(name.removesuffix(".o") for name in archive.namelist())
