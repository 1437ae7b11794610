"""Test the budget of lines of each package, so that growth is a decision."""

import pytest
from project import ROOT

# Lines of Python. A package that becomes larger than its row by more than 2 %, or smaller by more than 5 %, fails:
# change the row in the same commit, whose message says what the lines are for and what older ones they replace.
BUDGET = {
    "localllm/arch": 13_290,
    "localllm/cli": 13_080,
    "localllm/compat": 1_345,
    "localllm/convert": 8_615,
    "localllm/engine": 12_600,
    "localllm/files": 4_080,
    "localllm/generation": 14_505,
    "localllm/images": 347,
    "localllm/kernels": 18_250,
    "localllm/quantizing": 4_490,
    "localllm/server": 6_170,
    "localllm/services": 10_770,
    "localllm/system": 1_835,
    "localllm/text": 3_532,
    "quant": 3_300,
    "scripts": 15_420,
    "tests": 96_300,
}
GROWTH, LOSS = 1.02, 0.95


def count_lines(folder: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))


def judge(folder: str, lines: int, budget: int) -> str:
    """Return what is wrong with a package's size, "" if nothing is."""
    if lines > budget * GROWTH:
        return (
            f"{folder} has {lines} lines, {lines - budget} more than its row: shorten it, or raise the row and say why"
        )
    if lines < budget * LOSS:
        return f"{folder} has {lines} lines, {budget - lines} fewer than its row: lower the row"
    return ""


@pytest.mark.parametrize("folder", BUDGET)
def test_a_package_stays_within_its_budget(folder):
    assert not (wrong := judge(folder, count_lines(folder), BUDGET[folder])), wrong


def test_every_package_has_a_budget():
    packages = {f"localllm/{path.parent.name}" for path in (ROOT / "localllm").glob("*/*.py")}
    assert packages | {"quant", "tests", "scripts"} == set(BUDGET)


def test_growth_and_loss_are_noticed():
    assert "23 more" in judge("a", 1023, 1000)
    assert "60 fewer" in judge("a", 940, 1000)
    assert judge("a", 1019, 1000) == judge("a", 951, 1000) == ""
