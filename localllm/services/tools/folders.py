"""Restricts tools to the allowed folders; symbolic links are resolved first."""

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
        roots: absolute paths without symbolic links; relative names are relative to the first one.
    """

    def __init__(self, paths: Sequence[str]):
        """Resolve the folders. Raises UsageError for one that does not exist."""
        self.roots = [os.path.realpath(os.path.expanduser(folder)) for folder in paths]
        for folder, root in zip(paths, self.roots, strict=True):
            if not os.path.isdir(root):
                raise UsageError(f"allow: {folder} is not a folder")

    def resolve_path(self, path: str) -> str:
        """Resolve a path. Raises ToolError if it is outside of the allowed folders."""
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
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{path} is not a file")
            if not os.path.samestat(status, os.stat(self.resolve_path(path))):  # replaced between resolving and opening
                raise ToolError(f"{path} is outside of the allowed folders: {', '.join(self.roots)}")
            return os.fdopen(file, "rb")
        except BaseException:
            os.close(file)
            raise

    def relative_path(self, path: str) -> str:
        """Format a path for the model: relative to the first folder, or absolute."""
        return os.path.relpath(path, self.roots[0]) if is_within(path, self.roots[0]) else path


def is_within(path: str, root: str) -> bool:
    """Return whether a resolved path is `root` or in it."""
    try:
        return os.path.commonpath([os.path.normcase(path), os.path.normcase(root)]) == os.path.normcase(root)
    except ValueError:  # on another drive
        return False
