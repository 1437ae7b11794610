"""Record the system calls by which bytes reach the disk, in their order."""

import os

import pytest

Call = tuple[str, int]  # what was called, and the number (st_ino) of the file or folder that it is about


class SystemCalls(list[Call]):
    """The writes, fsyncs and renames of this process's os module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        for name in ("write", "pwrite", "fsync"):
            monkeypatch.setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        monkeypatch.setattr(os, "replace", self._replacing(os.replace))

    def _of_descriptor(self, name, real):
        def call(descriptor, *arguments):
            self.append((name.removeprefix("p"), os.fstat(descriptor).st_ino))
            return real(descriptor, *arguments)

        return call

    def _replacing(self, real):
        def replace(source, target):
            self.append(("name", os.stat(source).st_ino))
            return real(source, target)

        return replace

    def of(self, path: os.PathLike[str]) -> list[str]:
        """Return the calls on a file and its folder, without repetitions."""
        numbers = {os.stat(path).st_ino: "", os.stat(os.path.dirname(path)).st_ino: " folder"}
        named = [name + numbers[number] for name, number in self if number in numbers]
        return [name for place, name in enumerate(named) if place == 0 or named[place - 1] != name]


SAFE = ["write", "fsync", "name", "fsync folder"]  # what makes a new file last through a power failure
