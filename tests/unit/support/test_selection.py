"""Test which cases a commit leaves out (selection.py), by running a small file of tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import selection
from project import ROOT, SUPPORT

CASES = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.sampled
@pytest.mark.parametrize("number", range(30))
def test_one(number): ...

@pytest.mark.sampled("name", always=("a",))
@pytest.mark.parametrize("name", list("abcdefghij"))
@pytest.mark.parametrize("number", range(3))
def test_named(name, number): ...

def test_always(): ...

@pytest.mark.real
def test_of_a_real_model(): ...

@given(st.integers())
def test_numbers(number):
    print("drawn", number)
"""
CONFTEST = "import selection\n\ndef pytest_addoption(pluginmanager):\n    pluginmanager.register(selection)\n"
NUMBER_OF_CASES = 62


@pytest.fixture
def run(tmp_path: Path):
    """Return a function that runs those tests outside of git: names, prints, last words."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)

    def call(*arguments: str) -> tuple[list[str], list[str], str]:
        path = {"PYTHONPATH": str(SUPPORT), "GIT_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-vsp", "no:cacheprovider", *arguments],
            cwd=tmp_path, capture_output=True, text=True, env=path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        names, drawn = re.findall(r"test_cases.py::(\S+) ", done.stdout), re.findall(r"^drawn (\S+)", done.stdout, re.M)
        return names, drawn, done.stdout

    return call


def test_few_commits_together_run_all_cases():
    """Run a third of the cases each."""
    cases = {f"test[{number}]" for number in range(200)}
    seen = [{case for case in cases if selection.has_turn(case, commit, 3)} for commit in map(str, range(25))]
    assert all(40 < len(cases) < 95 for cases in seen)
    assert set().union(*seen) == cases


def test_every_listed_long_test_exists():
    assert selection.LONG
    for name in selection.LONG:
        file, function = name.split("::")
        assert f"def {function}(" in (ROOT / file).read_text("utf-8"), name


@pytest.mark.sampled
@pytest.mark.slow
def test_a_sample_keeps_the_tests_of_a_value_together(run):
    """Draw the same sample outside of git each time."""
    names, drawn, words = run()
    always = {"test_always", "test_numbers", *(f"test_named[{number}-a]" for number in range(3))}
    assert always < set(names) and len(set(names)) < NUMBER_OF_CASES
    values = re.findall(r"test_named\[\d-(\w)\]", " ".join(names))
    assert values and {values.count(value) for value in values} == {3}
    assert set(run("-m", "not slow")[0]) == always
    assert f"\n{NUMBER_OF_CASES - len(names)} cases were left out" in words
    assert "Again the same: --commit 0000000000 " in words
    assert run("--commit", "0" * 40)[:2] == (names, drawn) != run("--commit", "1" * 40)[:2]


@pytest.mark.sampled
@pytest.mark.slow
def test_several_workers_draw_the_same_sample(run):
    words = run("-n", "2")[2]
    assert len(re.findall(r"^\d+ cases were left out", words, re.M)) == 1


@pytest.mark.sampled
@pytest.mark.slow
def test_all_runs_every_case_with_a_new_seed(run):
    """Reproduce what hypothesis drew by the printed arguments."""
    names, drawn, words = run("--all")
    assert len(names) == NUMBER_OF_CASES and "left out" not in words
    assert run("--all")[1] != drawn
    again = re.search("Again the same: (.*)", words)
    assert again and run(*again[1].split())[:2] == (names, drawn)


def test_a_case_given_by_name_is_run(run):
    cases = [f"test_cases.py::test_one[{number}]" for number in range(10)]
    assert len(run(*cases)[0]) == 10


@pytest.mark.sampled
@pytest.mark.slow
def test_real_models_are_tested_only_on_request(run):
    """Run them by --real or by name."""
    for arguments in (["--real"], ["--real", "--all"], ["test_cases.py::test_of_a_real_model"]):
        assert run(*arguments)[0] == ["test_of_a_real_model"]
    assert "test_of_a_real_model" not in run("--all")[0]
