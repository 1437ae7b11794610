"""A build hook of Hatch for wheels with machine code: add the kernels of `scripts/wheels`, and name the platform.

Without its two environment variables the wheel is the pure one, which runs everywhere.
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
