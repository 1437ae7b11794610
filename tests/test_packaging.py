"""Test that the wheel holds the whole program and its data."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from project import ROOT

import localllm


def test_the_version_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert localllm.__version__ == project["version"]


def test_a_users_file_may_be_named_quant(tmp_path: Path):
    """Try the names of this repository's other folders, too."""
    for name in ("quant", "scripts", "tests"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    script = tmp_path / "script.py"
    script.write_text(
        "import localllm, localllm.quantizing.quantize, sys\nprint(localllm.open, 'quant' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.endswith(" False\n"), done


def test_only_localllm_is_installed(tmp_path: Path):
    """Check an installation in place or from a wheel."""
    program = (
        "import localllm, importlib.util as u; print([n for n in ('quant', 'tests', 'scripts') if u.find_spec(n)])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, env=environment)
    assert done.stdout == b"[]\n", done


def installed_files() -> set[str]:
    """Return the files of an installation, by their installed paths."""
    places = {ROOT / "localllm": "localllm", ROOT / "quant": "localllm/quant"}
    return {"localllm/data/models.toml"} | {
        f"{place}/{path.relative_to(folder).as_posix()}"
        for folder, place in places.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_repository_has_no_symbolic_links():
    """Keep it usable on Windows, in archives and in copies."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def require_whole_program(python: str, folder: Path, **environment: str) -> None:
    """Check that this Python has all of localllm."""
    program = (
        "import localllm, localllm.quant.formats, localllm.services.hub.catalogue as c\n"
        "assert len(c.load_registry()) >= 40 and localllm.builtin_model().exists(), c.get_registry_path()\n"
        "print(localllm.__path__[0], sep='')"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([python, "-c", program], cwd=folder, capture_output=True, text=True, env=clean)
    assert done.returncode == 0, done.stderr


def test_a_copied_folder_runs(tmp_path: Path):
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored)
    require_whole_program(sys.executable, tmp_path / "copy", PYTHONPATH=str(tmp_path / "copy"))


def build(kind: str, source: Path, target: Path) -> Path:
    """Build an sdist, wheel or editable wheel of a source tree."""
    target.mkdir()
    program = f"import sys, hatchling.build as backend; backend.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(target)], check=True, cwd=source, stdout=subprocess.DEVNULL)
    (file,) = target.iterdir()
    return file


def install(wheel: Path, folder: Path) -> None:
    """Install into a new environment with this one's dependencies, and run it there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / ("bin/python" if os.name == "posix" else "Scripts/python.exe"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", str(wheel)], check=True, stdin=subprocess.DEVNULL)
    require_whole_program(python, folder, PYTHONPATH=os.pathsep.join(map(str, site_packages())))


@pytest.mark.sampled
@pytest.mark.slow
def test_wheel_sdist_and_editable_install_the_whole_program(tmp_path: Path):
    """Build the same wheel from the source archive as from the repository."""
    wheel, archive = build("wheel", ROOT, tmp_path / "wheel"), build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path / "sources", filter="data")
    (unpacked,) = (tmp_path / "sources").iterdir()
    assert build("wheel", unpacked, tmp_path / "again").read_bytes() == wheel.read_bytes()
    check_wheel(wheel)
    install(wheel, tmp_path / "installed")
    install(build("editable", ROOT, tmp_path / "editable"), tmp_path / "in place")


def site_packages() -> list[Path]:
    """Return where this Python has localllm's dependencies."""
    return [Path(path) for path in sys.path if Path(path).name == "site-packages"]


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        manuals = {name for name in names if ".data/data/share/man/man1/" in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        commands = archive.read(entry_points).decode()
        registry = archive.read("localllm/data/models.toml")
    assert [manual.rpartition("/")[2] for manual in manuals] == ["localllm.1"]
    assert names - manuals == installed_files()
    assert registry == (ROOT / "models.toml").read_bytes()
    assert "localllm = localllm.cli.main:run_program" in commands
