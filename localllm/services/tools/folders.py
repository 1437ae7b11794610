"""Restrict tools to allowed folders, wherever symbolic links lead."""

import os
import stat
from collections.abc import Sequence
from typing import BinaryIO

from localllm.errors import UsageError
from localllm.services.tools.box import ToolError
from localllm.system.files import open_own


class Folders:
    """The folders that the user allows.

    Attributes:
        roots: absolute paths without symbolic links; names without a slash in front are of the first.
    """

    def __init__(self, given: Sequence[str]):
        """Resolve the folders. Raises UsageError for one that does not exist."""
        self.roots = [os.path.realpath(os.path.expanduser(folder)) for folder in given]
        for folder, root in zip(given, self.roots, strict=True):
            if not os.path.isdir(root):
                raise UsageError(f"allow: {folder} is not a folder")

    def resolve_path(self, path: str) -> str:
        """Resolve a path. Raises ToolError if it is outside."""
        if "\0" in path:
            raise ToolError("a path cannot contain NUL")
        real = os.path.realpath(os.path.join(self.roots[0], path))
        if not any(is_within(real, root) for root in self.roots):
            raise ToolError(f"{path} is outside of the allowed folders: {', '.join(self.roots)}")
        return real

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading. Raises ToolError if it is not a file or outside, OSError."""
        real = self.resolve_path(path)
        file = open_own(real, os.O_RDONLY)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise ToolError(f"{path} is not a file")
            if not os.path.samestat(found, os.stat(self.resolve_path(path))):  # something was moved meanwhile
                raise ToolError(f"{path} is outside of the allowed folders: {', '.join(self.roots)}")
            return os.fdopen(file, "rb")
        except BaseException:
            os.close(file)
            raise

    def relative_path(self, path: str) -> str:
        """Format a path for the model: relative to the first folder, or absolute."""
        return os.path.relpath(path, self.roots[0]) if is_within(path, self.roots[0]) else path


def is_within(path: str, root: str) -> bool:
    """Return whether a resolved path is a folder or in it."""
    try:
        return os.path.commonpath([os.path.normcase(path), os.path.normcase(root)]) == os.path.normcase(root)
    except ValueError:  # of another drive
        return False
