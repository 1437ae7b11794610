#!/usr/bin/env python3
"""Compare localllm with llama.cpp on the tiny models of tests/models with other numbers and dimensions.

    python scripts/check_models.py --peer-python PEER/bin/python [--seed N] [--backend cpu|reference] [NAME...]

Every seed draws other weights, and other widths, head counts, windows, vocabularies, experts and lengths of prompts for
each model. Prints the error of the prompt's logits and of a few tokens behind it, normalized (NMSE); ends with 1 if one
is above 1e-8 (1e-6 where llama.cpp rounds GELU, 1e-4 with kernels that do not).
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]
from models import DECLARATIONS, model, write  # noqa: E402
from models.declaration import DEFAULTS  # noqa: E402
from models.numbers import Numbers  # noqa: E402
from record_goldens import logits, nmse  # noqa: E402
from test_goldens import GELU, looked_up, runs  # noqa: E402

from localllm.arch import verbs  # noqa: E402

STEPS = 4


def other_dims(name: str, numbers: Numbers) -> dict[str, int]:
    """Dimensions that a model can have instead of its own."""
    declared = {**DEFAULTS, **DECLARATIONS[name].dims}
    found = {"vocab": 270 + int(numbers.integers(1, 40)[0]), "hidden": 40 + int(numbers.integers(1, 90)[0])}
    if declared["hidden"] == 0:
        del found["hidden"]
    if "window" in declared and declared["window"] < 100:
        found["window"] = 3 + int(numbers.integers(1, 30)[0])
    if "experts" in declared and "expert_group_count" not in str(declared.get("router")):
        found["experts"] = declared.get("used", 2) + 1 + int(numbers.integers(1, 9)[0])
    if "expert_hidden" in declared:
        found["expert_hidden"] = 17 + int(numbers.integers(1, 60)[0])
        if declared.get("shared_hidden") == declared["expert_hidden"]:  # one expert more, to some
            found["shared_hidden"] = found["expert_hidden"]
    if declared["kv_heads"] not in (None, 0, declared["heads"]) and "head_dim" in declared:
        groups = declared["heads"] // declared["kv_heads"]
        found["kv_heads"] = 1 + int(numbers.integers(1, 3)[0])
        found["heads"] = groups * found["kv_heads"]
        found["width"] = 33 + int(numbers.integers(1, 80)[0])
    return found


def check(name: str, seed: int, backend: str, peer: str, folder: Path) -> bool:
    numbers = Numbers(seed, name, "dims")
    dims = other_dims(name, numbers) if seed else {}
    made = model(name, seed, **dims)
    tokens = numbers.integers(5 + int(numbers.integers(1, 70)[0]), made.metadata[f"{made.arch}.vocab_size"])
    theirs = logits(made, tokens.tolist(), STEPS, folder, peer)
    if theirs is None:
        print(f"{name} {dims}: llama.cpp refuses these", flush=True)
        return True
    ours = runs(write(made, folder / "ours.gguf"), backend, tokens, theirs["then"])
    errors = [nmse(ours[kind], theirs[kind]) for kind in ("prefill", "decode")]
    good = max(errors) < ((1e-6 if backend == "reference" else 1e-4) if name in GELU else 1e-8)
    told = f"{len(tokens)} tokens: {errors[0]:.1e} {errors[1]:.1e}"
    print(f"{name} {dims} {told}{'' if good else ' TOO MUCH'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=["cpu", "reference"], default="reference")
    parser.add_argument("names", nargs="*", choices=[[], *DECLARATIONS], metavar="NAME")
    options = parser.parse_args()
    verbs.gelu = looked_up(verbs.gelu)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            check(name, options.seed, options.backend, options.peer_python, Path(folder))
            for name in options.names or DECLARATIONS
        ]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
