"""Runs of the script that makes wrong files for hours: every kind is made and read, and nothing is found."""

import subprocess
import sys

import pytest
from project import ROOT

SCRIPTS = ROOT / "scripts" / "fuzz"
sys.path.append(str(SCRIPTS))

from fuzz_kinds import KINDS  # noqa: E402


@pytest.mark.slow
def test_damaged_files_of_every_format_are_refused_or_read() -> None:
    command = [sys.executable, str(SCRIPTS / "fuzz.py"), "--count", "200", "--first", "269"]  # all kinds
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "finding" not in ran.stdout
    assert all(f"\n{kind}: " in "\n" + ran.stdout for kind in KINDS)
