"""Folders that tools may look into, and nothing outside of them, wherever symbolic links lead."""

import os
import stat
from collections.abc import Sequence
from typing import BinaryIO

from localllm.errors import UsageError
from localllm.services.tools.box import ToolError
from localllm.system.files import open_own


class Folders:
    """Those that the user allows.

    Attributes:
        roots: absolute paths without symbolic links; names without a slash in front are of the first.
    """

    def __init__(self, given: Sequence[str]):
        """Raises UsageError for one that is none."""
        self.roots = [os.path.realpath(os.path.expanduser(folder)) for folder in given]
        for folder, root in zip(given, self.roots, strict=True):
            if not os.path.isdir(root):
                raise UsageError(f"allow: {folder} is no folder")

    def resolved(self, path: str) -> str:
        """Where a name leads. Raises ToolError if that is outside."""
        if "\0" in path:
            raise ToolError("a name cannot have a NUL in it")
        real = os.path.realpath(os.path.join(self.roots[0], path))
        if not any(is_within(real, root) for root in self.roots):
            raise ToolError(f"{path} is outside of what is allowed: {', '.join(self.roots)}")
        return real

    def open(self, path: str) -> BinaryIO:
        """A file to read. Raises ToolError for what is none or is outside, OSError."""
        real = self.resolved(path)
        file = open_own(real, os.O_RDONLY)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ToolError(f"{path} is no file")
            if not os.path.samestat(found, os.stat(self.resolved(path))):  # something was moved meanwhile
                raise ToolError(f"{path} is outside of what is allowed: {', '.join(self.roots)}")
            return os.fdopen(file, "rb")
        except BaseException:
            os.close(file)
            raise

    def shown(self, path: str) -> str:
        """A path as a tool names it: below the first folder, or as a whole."""
        return os.path.relpath(path, self.roots[0]) if is_within(path, self.roots[0]) else path


def is_within(path: str, root: str) -> bool:
    """Whether a path without links is a folder or in it."""
    try:
        return os.path.commonpath([os.path.normcase(path), os.path.normcase(root)]) == os.path.normcase(root)
    except ValueError:  # of another drive
        return False
