"""Put only localllm on Python's path, for an editable installation, and not the folders beside it."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "localllm"

spec = spec_from_file_location(__name__, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)])
assert spec and spec.loader
sys.modules[__name__] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[__name__])
