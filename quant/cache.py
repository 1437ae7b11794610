"""Where machine code is kept between starts."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again; LOCALLLM_CACHE overrides it."""
    if "LOCALLLM_CACHE" in os.environ:
        return Path(os.environ["LOCALLLM_CACHE"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "localllm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "localllm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "localllm"
