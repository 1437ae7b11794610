"""Ask llama.cpp, in a process of its own, since it aborts where it does not understand a file."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

PROGRAM = Path(__file__).with_name("run_llama_cpp.py")


def ask_peer(python: str, *jobs: dict[str, Any]) -> None:
    """Run jobs of run_llama_cpp.py; python: an interpreter that has llama-cpp-python. Raises CalledProcessError."""
    lines = "".join(json.dumps(job) + "\n" for job in jobs)
    subprocess.run([python, PROGRAM], input=lines, text=True, check=True)


def ask_for_arrays(python: str, folder: Path, **job: Any) -> dict[str, np.ndarray] | None:
    """Return the arrays that a job writes, by name; None if llama.cpp fails. folder: for the file."""
    job["out"] = str(folder / "out.npz")
    try:
        ask_peer(python, job)
    except subprocess.CalledProcessError:
        return None
    with np.load(job["out"]) as out:
        return dict(out)


def ask_for_json(python: str, folder: Path, **job: Any) -> Any:
    """Return what a job writes; None if llama.cpp fails. folder: for the file."""
    job["out"] = str(folder / "out.json")
    try:
        ask_peer(python, job)
    except subprocess.CalledProcessError:
        return None
    return json.loads(Path(job["out"]).read_text("utf-8"))
