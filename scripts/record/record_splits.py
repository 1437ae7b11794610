"""Record what llama-gguf-split makes of the tests' models.

    python scripts/record/record_splits.py llama-gguf-split

tests/goldens/gguf_split.json gets the SHA-256 of each file by the options, and of the file that --merge makes of them.
"""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from split_models import CASES, MODELS  # noqa: E402


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def main(program: str) -> None:
    found: dict[str, dict[str, object]] = {"splits": {}, "merged": {}}
    for case in CASES:
        kind, *options = case.split()
        with TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "out").mkdir()
            model = MODELS[kind](folder / "model.gguf")
            subprocess.run([program, "--split", *options, model, folder / "out" / "x"], check=True)
            files = sorted((folder / "out").iterdir())
            found["splits"][case] = {path.name: digest(path) for path in files}
            subprocess.run([program, "--merge", files[0], folder / "merged.gguf"], check=True)
            found["merged"][case] = digest(folder / "merged.gguf")
    (ROOT / "tests" / "goldens" / "gguf_split.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
