"""Make a release. Usage: scripts/release VERSION [--dry-run] [--skip-tests].

Sets the version in pyproject.toml and CITATION.cff, gives CHANGELOG.md's "Unreleased" section its number and date, runs
scripts/check and scripts/test, builds wheel and sdist and looks into them, then commits and tags. --dry-run does all
but the commit and the tag in a copy of HEAD. Nothing is uploaded; the last lines say how.
"""

import argparse
import datetime
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
UNRELEASED = "## [Unreleased]"
WHEEL_HAS = [
    "localllm/cli/main.py",
    "localllm/quant/formats.py",
    "localllm/data/models.toml",
    "localllm/data/guide.gguf",
]
SDIST_HAS = [*["README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "scripts/test"], "tests/conftest.py"]


class ReleaseError(Exception):
    """Raised when a release is impossible; the message says what to do."""


def parse_version(text: str) -> tuple[int, int, int]:
    """Parse MAJOR.MINOR.PATCH. Raises ReleaseError."""
    match = VERSION.fullmatch(text)
    if not match:
        raise ReleaseError(f"{text} is not a semantic version: give MAJOR.MINOR.PATCH, for example 0.3.0")
    return int(match[1]), int(match[2]), int(match[3])


def require_next(current: str, wanted: str) -> None:
    """Require that a version is the current one (not tagged yet) or one of the three that may follow it."""
    major, minor, patch = parse_version(current)
    following = {(major, minor, patch + 1), (major, minor + 1, 0), (major + 1, 0, 0)}
    if parse_version(wanted) not in {(major, minor, patch), *following}:
        names = ", ".join(".".join(map(str, version)) for version in sorted(following))
        raise ReleaseError(f"{wanted} does not follow {current}: give one of {names}")


def release_changelog(text: str, version: str, date: str) -> str:
    """Move the entries under "Unreleased" to a section of the version; keep a section that is there already."""
    before, mark, after = text.partition(UNRELEASED)
    if not mark:
        raise ReleaseError(f'CHANGELOG.md has no section "{UNRELEASED}": add it')
    entries = after.split("\n## [", 1)[0].strip()
    has_section = f"\n## [{version}] - " in text
    if not entries and not has_section:
        raise ReleaseError('CHANGELOG.md has nothing under "Unreleased": write down what changed')
    if entries and has_section:
        raise ReleaseError(
            f'CHANGELOG.md has {version} already, and entries under "Unreleased": choose the next version'
        )
    return text if has_section else f"{before}{UNRELEASED}\n\n## [{version}] - {date}{after}"


def replace_version(text: str, pattern: str, value: str) -> str:
    """Replace the one line that a pattern matches from its start to the value. Raises ReleaseError."""
    changed, count = re.subn(rf'(?m)^({pattern})"?[^"\n]*"?$', lambda match: match[1] + value, text)
    if count != 1:
        raise ReleaseError(f"expected one line like {pattern!r}, found {count}")
    return changed


def update_files(tree: Path, version: str, date: str) -> None:
    """Write the version and the date wherever they stand."""
    edits = {
        "pyproject.toml": lambda text: replace_version(text, "version = ", f'"{version}"'),
        "CITATION.cff": lambda text: replace_version(
            replace_version(text, "version: ", version), "date-released: ", f'"{date}"'
        ),
        "CHANGELOG.md": lambda text: release_changelog(text, version, date),
    }
    for name, edit in edits.items():
        path = tree / name
        path.write_text(edit(path.read_text("utf-8")), "utf-8")


def run(tree: Path, *words: str) -> None:
    """Run a command in the tree. Raises ReleaseError when it fails."""
    print("> " + " ".join(words), file=sys.stderr, flush=True)
    if subprocess.run(words, cwd=tree).returncode:
        raise ReleaseError(f"{' '.join(words)} failed: fix that first")


def git(*words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build(tree: Path, version: str) -> list[Path]:
    """Build wheel and sdist in dist/, and look for what each must contain. Raises ReleaseError."""
    run(tree, sys.executable, "-m", "hatchling", "build", "--clean")
    wheel = tree / "dist" / f"localllm-{version}-py3-none-any.whl"
    sdist = tree / "dist" / f"localllm-{version}.tar.gz"
    with zipfile.ZipFile(wheel) as archive:
        require_contents(wheel, archive.namelist(), WHEEL_HAS)
    with tarfile.open(sdist) as archive:
        require_contents(sdist, archive.getnames(), [f"localllm-{version}/{name}" for name in SDIST_HAS])
    return [wheel, sdist]


def require_contents(package: Path, names: list[str], needed: list[str]) -> None:
    missing = [name for name in needed if name not in names]
    if missing:
        raise ReleaseError(f"{package.name} lacks {', '.join(missing)}: see [tool.hatch.build] in pyproject.toml")


def prepare(tree: Path, version: str, skip_tests: bool) -> list[Path]:
    """Do all that can be done without a commit, in a tree; return the packages."""
    update_files(tree, version, datetime.datetime.now(datetime.UTC).date().isoformat())
    if tree == ROOT:
        run(tree, "scripts/check")
        if not skip_tests:
            run(tree, "scripts/test")
    return build(tree, version)


def publishable() -> bool:
    """Return whether the project has a public address."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    return not any(".example" in url for url in urls.values())


def release(version: str, dry_run: bool, skip_tests: bool) -> None:
    """Make a release, or all of it but what lasts. Raises ReleaseError."""
    current = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    require_next(current, version)
    tag = f"v{version}"
    if tag in git("tag", "--list").split():
        raise ReleaseError(f"{tag} is there already: choose the next version")
    if git("status", "--porcelain"):
        raise ReleaseError("there are changes that are not committed: commit or stash them")
    if dry_run:
        run(ROOT, "scripts/check")
        if not skip_tests:
            run(ROOT, "scripts/test")
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "tree.tar")
            git("archive", "-o", str(archive), "HEAD")
            tree = Path(folder, "tree")
            with tarfile.open(archive) as files:
                files.extractall(tree, filter="data")
            for package in prepare(tree, version, skip_tests):
                print(f"would make {package.name}, {package.stat().st_size / 1e6:.1f} MB")
        print(f"would commit and tag {tag}")
        return
    packages = prepare(ROOT, version, skip_tests)
    if git("status", "--porcelain"):
        git("commit", "--all", "--message", f"release: {version}")
    git("tag", "--annotate", tag, "--message", f"localllm {version}")
    print("\n".join([*(str(package.relative_to(ROOT)) for package in packages), f"tagged {tag}"]))
    if publishable():
        print(f"next: git push --follow-tags; then upload dist/localllm-{version}*")
    else:
        print("next: [project.urls] in pyproject.toml has placeholders; give real addresses before you publish")


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="change nothing here")
    parser.add_argument("--skip-tests", action="store_true", help="run scripts/check only")
    options = parser.parse_args()
    try:
        release(options.version, options.dry_run, options.skip_tests)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
