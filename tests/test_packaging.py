"""The wheel holds the whole program and its data, and the data says what is true."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

import localllm


def test_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert localllm.__version__ == project["version"]


def test_a_file_of_the_users_may_be_called_quant(tmp_path: Path):
    """Or like any other folder of this repository."""
    for name in ("quant", "scripts", "tests"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    script = tmp_path / "script.py"
    script.write_text("import localllm, localllm.services.quantize, sys\nprint(localllm.open, 'quant' in sys.modules)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.endswith(" False\n"), done


def test_what_is_installed_here_is_localllm_alone(tmp_path: Path):
    """In place, as for these tests, or as a wheel."""
    program = (
        "import localllm, importlib.util as u; print([n for n in ('quant', 'tests', 'scripts') if u.find_spec(n)])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, env=environment)
    assert done.stdout == b"[]\n", done


@pytest.mark.slow
def test_wheel(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        commands = archive.read(entry_points).decode()
        registry = archive.read("localllm/data/models.toml")
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("localllm", "localllm/quant")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources
    assert {"localllm/data/guide.gguf", "localllm/data/models.toml"} <= names
    assert registry == (ROOT / "models.toml").read_bytes()
    assert "localllm = localllm.cli.main:program" in commands
