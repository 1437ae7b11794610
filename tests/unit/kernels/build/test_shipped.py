"""Test the object files of a wheel: which computers take them, and that a start with them compiles nothing."""

import ast
import hashlib
import json
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from project import ROOT

from localllm.files.cache.checksummed_cache import read_checksummed
from localllm.kernels.build import compilers, library, objects, shipped
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import get_object_file, get_symbol
from localllm.kernels.build.shipped import (
    can_serve,
    compute_source_hash,
    find_archive,
    list_shipped_names,
    read_shipped_objects,
)
from localllm.kernels.machine import SELECTING_FEATURES, Lane
from scripts.tools.platform_wheel import PlatformWheel
from scripts.tools.wheels import APPLE, ARM, SYSTEMS, X86, kernels_of, write_archive

LANE = Lane("haswell", "+avx2,+f16c,+fma,+ssse3,-avx512f")
NEWER = Lane("znver3", "+avx2,+f16c,+fma,+ssse3,+sha,-avx512f")


def write(folder: Path, objects: dict[str, bytes], lane: Lane = LANE, **changes: str) -> Path:
    """Write an archive and its description, as scripts/wheels does."""
    write_archive(folder / "one.zip", objects)
    digest = hashlib.sha256((folder / "one.zip").read_bytes()).hexdigest()
    row = {"cpu": lane.cpu, "features": lane.feature_string, "sha256": digest} | changes
    description = {"sources": compute_source_hash(), "archives": {"one.zip": row}}
    (folder / "lanes.json").write_text(json.dumps(description))
    find_archive.cache_clear()
    return folder


def test_shipped_objects_serve_lanes_with_more_features(tmp_path: Path):
    folder = write(tmp_path, {"add": b"1", "scale": b"22"})
    assert read_shipped_objects(["scale", "rope"], NEWER, folder) == {"scale": b"22"}
    assert list_shipped_names(NEWER, folder) == {"add", "scale"}


@pytest.mark.parametrize(
    "lane",
    [
        Lane("sandybridge", "+ssse3,+avx"),
        Lane("alderlake", f"{NEWER.feature_string},+avxvnni"),
        Lane("icelake-server", f"{LANE.feature_string.replace('-avx512f', '+avx512f')}"),
    ],
    ids=lambda lane: lane.cpu,
)
def test_shipped_objects_do_not_serve_lanes_with_other_kernels(tmp_path: Path, lane: Lane):
    folder = write(tmp_path, {"add": b"1"})
    assert read_shipped_objects(["add"], lane, folder) == {} and not list_shipped_names(lane, folder)


@pytest.mark.parametrize("damage", ["archive", "description", "sources", "nothing"])
def test_damaged_or_outdated_shipped_objects_are_ignored(tmp_path: Path, damage: str):
    folder = write(tmp_path, {"add": b"1"})
    description = folder / "lanes.json"
    if damage == "archive":
        (folder / "one.zip").write_bytes((folder / "one.zip").read_bytes()[:-1])
    elif damage == "description":
        description.write_text(description.read_text()[:-2])
    elif damage == "sources":
        description.write_text(description.read_text().replace(compute_source_hash(), "0" * 64))
    else:
        description.unlink()
    find_archive.cache_clear()
    assert read_shipped_objects(["add"], LANE, folder) == {}


def test_loading_shipped_objects_compiles_nothing_and_caches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    KernelLibrary(["add", "run"]).close()
    code = {name: read_checksummed(get_object_file(name)) or b"" for name in ("add", "run")}
    monkeypatch.setattr(shipped, "find_archive", lambda lane, folder=None: tmp_path / "one.zip")
    write_archive(tmp_path / "one.zip", code)
    new = tmp_path / "kernels" / ("0" * 20)
    for module in (objects, library):
        monkeypatch.setattr(module, "get_object_folder", lambda of=None: new)
    monkeypatch.setattr(compilers, "CompilerPool", None)  # nobody may call it
    loaded = KernelLibrary(["add"], later=["run"])
    assert loaded.addresses["add"] and loaded.warning is None
    assert read_checksummed(new / "add.o") == code["add"] and not (new / "run.o").exists()
    assert get_symbol("add") in code["add"].decode("latin1")


def test_lanes_are_told_apart_by_every_feature_in_the_sources():
    """A string constant that names a feature, anywhere in the kernels' sources, decides what they compile to."""
    known = {*llvm.get_host_cpu_features(), *["neon", "dotprod", "i8mm"]} | SELECTING_FEATURES
    constants = set()
    for path in (ROOT / "localllm" / "kernels").rglob("*.py"):
        if "cuda" not in path.parts and "build" not in path.parts and path.name != "machine.py":
            constants |= {
                node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
            }
    assert {word for word in constants if isinstance(word, str) and word in known} <= SELECTING_FEATURES


def test_archives_of_different_lanes_do_not_serve_each_other():
    for lanes in (X86, ARM, APPLE):
        served = [[can_serve(one, other) for other in lanes.values()] for one in lanes.values()]
        assert [row.count(True) for row in served] == [1] * len(lanes)
    zen_5 = Lane("znver5", f"{X86['avx512-bf16'].feature_string},+avxvnni")
    assert can_serve(X86["avx512-bf16"], zen_5) and not can_serve(X86["avx-vnni"], zen_5)


def test_kernels_of_a_lane_are_listed_once():
    for _, lanes in SYSTEMS.values():
        for lane in lanes.values():
            names = kernels_of(lane)
            assert len(names) == len(set(names)) > 200
            assert ("linear_tiles_quantized" in names) == lane.has_tiles


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_a_platform_wheel_contains_the_archives_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
):
    (tmp_path / "avx2.zip").touch()
    data = {"force_include": {}, "tag": None, "pure_python": True}
    PlatformWheel.initialize(None, version, data)
    assert data == {"force_include": {}, "tag": None, "pure_python": True}
    monkeypatch.setenv("LOCALLLM_WHEEL_KERNELS", str(tmp_path))
    monkeypatch.setenv("LOCALLLM_WHEEL_TAG", "py3-none-win_amd64")
    PlatformWheel.initialize(None, version, data)
    assert data["pure_python"] == (version == "editable")
    if version == "standard":
        assert data["tag"] == "py3-none-win_amd64"
        assert data["force_include"] == {str(tmp_path / "avx2.zip"): "localllm/data/kernels/avx2.zip"}
