"""Test the manual page: it is that of the current help, and roff's programs find nothing wrong with it."""

import re
import shutil
import subprocess
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from write_man import MAN_PAGE, escape, format_man_page

from localllm.cli.registry import COMMANDS, list_params


def test_the_manual_page_is_that_of_the_current_help():
    assert MAN_PAGE.read_text(encoding="utf-8") == format_man_page(), "scripts/write_help.py writes it anew"


def test_the_manual_page_has_every_command_and_option():
    page = format_man_page().replace("\\-", "-").replace("\n", " ")
    headings = re.findall(r'\.SS "localllm (\S+) \[OPTIONS\]', page)
    assert headings == list(COMMANDS)
    names = {name for command in COMMANDS for param in list_params(command) for name in param.names}
    assert [name for name in names if name not in page] == []


def test_what_roff_would_interpret_is_escaped():
    assert escape(r".x \n -y") == r"\&.x \en \-y" and escape("'x") == r"\&'x" and escape("a.b") == "a.b"


@pytest.mark.parametrize("command", [["mandoc", "-Tlint", "-Wstyle"], ["man", "--warnings", "-l"]])
def test_the_manual_page_has_no_faults(command: list[str]):
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    result = subprocess.run(
        [*command, MAN_PAGE], capture_output=True, text=True, env={"MANPAGER": "cat", "PATH": "/usr/bin:/bin"}
    )
    assert result.stderr == "" and (command[0] == "man" or (result.returncode, result.stdout) == (0, ""))
    assert command[0] == "mandoc" or "ENVIRONMENT" in result.stdout


def test_wheels_install_the_manual_page():
    assert '"docs/localllm.1" = "share/man/man1/localllm.1"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
