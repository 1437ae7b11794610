"""Fixtures for all tests."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import compile_once
import import_once
import pytest
import real
import selection
from models import write_model
from project import ROOT, complaints
from tiny_model import write_tiny_model

import localllm
from localllm.cli import main
from localllm.cli.terminal import output as terminal

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # CUDA kernels run in Numba's simulator, must anything import them
os.environ["XDG_CONFIG_HOME"] = os.devnull  # nor are they bothered by the user's config.toml
os.environ["XDG_STATE_HOME"] = os.devnull  # nor does what they ask replace the last answer of `run`
os.environ["LOCALLLM_PREFIX_GB"] = "0"  # tests leave nothing in the user's cache, but for those that say so


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register --all, --commit and their effects, and the sharing of compiled modules."""
    pluginmanager.register(selection)
    pluginmanager.register(import_once)


@pytest.fixture(autouse=True)
def default_signals():
    """Restore the usual signal handlers for tests and the programs they start.

    A shell lets its background jobs ignore Ctrl-C, nohup lets a program ignore hang-ups, and so does our program
    once its exit code is decided.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("SIGHUP", "SIGQUIT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


@pytest.fixture
def link() -> Callable[[Path, Path], None]:
    """Return a function that makes a symbolic link; skip the test where there are none.

    Windows demands a right, and wine only claims to have made one.
    """

    def make(path: Path, target: Path) -> None:
        with suppress(*([OSError] if sys.platform == "win32" else [])):
            path.symlink_to(target)
        if not path.is_symlink():
            pytest.skip("no symbolic links here")

    return make


@pytest.fixture(scope="session", autouse=True)
def compile_each_kernel_once():
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_once.take_turns(monkeypatch)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of real models, golden logits, vocabularies and texts beside the project's root.

    It is too large for the repository: tests that need it are skipped where it is missing, and fail there in CI.
    """
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing(f"needs the shared folder, which is missing: {folder}")
    return folder


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Return a function from a row of scripts/real_models.toml to its path; skip the test if it is not there."""

    def path(name: str) -> Path:
        if missing := real.reason_to_skip(name):
            pytest.skip(missing)
        return real.path_of(name)

    return path


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a declaration in tests/support/models to its model's path, written once."""
    folder, written = tmp_path_factory.mktemp("models"), {}

    def path(name: str) -> Path:
        if name not in written:
            written[name] = write_model(name, folder / f"{name}.gguf")
        return written[name]

    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a small model whose kernels are compiled."""
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=200_000)
    localllm.open(path).close()  # compiles the kernels, once
    return str(path)


@pytest.fixture
def cli(capfdbinary, monkeypatch):
    """Return a function that runs the program in this process: arguments to (exit code, stdout, complaints)."""

    def call(*arguments: object, stdin: bytes = b"") -> tuple[str | int | None, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "argv", ["localllm", *map(str, arguments)])
        monkeypatch.setattr(main, "ignore_ctrl_c", lambda: None)
        monkeypatch.setattr(main, "prepare_interpreter", lambda: None)
        monkeypatch.setattr(terminal, "end_output", lambda: None)
        with pytest.raises(SystemExit) as end:
            main.main()
        sys.stderr.flush()
        out, err = capfdbinary.readouterr()
        return end.value.code, out.decode(), complaints(err)

    return call


@pytest.fixture
def refused(cli):
    """Return a function (argv, message) that requires exit code 2, no output, and one line with the message on stderr.

    It returns that line.
    """

    def require(argv: Iterable[object], message: str = "", stdin: bytes = b"") -> str:
        code, out, err = cli(*argv, stdin=stdin)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.startswith("localllm: error: ") and message in err, err
        return err

    return require
