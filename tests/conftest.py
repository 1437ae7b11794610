"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models, golden logits, vocabularies and texts, which lies next to the project's root.

    It is too large for the repository: tests that need it are skipped where it is missing, and fail there in CI.
    """
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        missing = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        missing(f"needs the shared folder, which is missing: {folder}")
    return folder
