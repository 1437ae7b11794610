"""Hatch's hook for wheels with machine code: adds what `scripts/wheels` has compiled, and names the platform.

Without its two variables in the environment, a wheel is the pure one that runs everywhere.
"""

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PlatformWheel(BuildHookInterface[Any]):
    """Adds localllm/data/kernels to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change what Hatch builds; version: standard or editable."""
        folder = os.environ.get("LOCALLLM_WHEEL_KERNELS")
        if folder and version == "standard":
            build_data["tag"] = os.environ["LOCALLLM_WHEEL_TAG"]
            build_data["pure_python"] = False
            for path in sorted(Path(folder).iterdir()):
                build_data["force_include"][str(path)] = f"localllm/data/kernels/{path.name}"
