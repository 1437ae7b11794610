#!/usr/bin/env python3
"""Compare localllm with llama.cpp on the tiny models of tests/support/models with other numbers and dimensions.

    python scripts/record/check_models.py --peer-python PEER/bin/python [--seed N] [--backend cpu|reference] [NAME...]

Every seed draws other weights, and other widths, head counts, windows, vocabularies, experts and lengths of prompts for
each model. Prints the error of the prompt's logits and of a few tokens behind it, normalized (NMSE); ends with 1 if one
is above 1e-8 (1e-6 where llama.cpp rounds GELU, 1e-4 with kernels that do not).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from models import ANSWERING, DECLARATIONS, ENCODERS, model, write  # noqa: E402
from models.answering import GELU as GELU_OF_T5  # noqa: E402
from models.answering import text_and_answer  # noqa: E402
from models.declaration import DEFAULTS  # noqa: E402
from models.encoders import GELU as GELU_OF_TEXTS  # noqa: E402
from models.encoders import texts  # noqa: E402
from models.golden import LONG  # noqa: E402
from models.numbers import Numbers  # noqa: E402
from record_goldens import logits, nmse, rows_of  # noqa: E402

from localllm.arch import rowwise_verbs  # noqa: E402
from tests.goldens.test_encoder_decoder import all_logits, opened  # noqa: E402
from tests.goldens.test_encoders import rows  # noqa: E402
from tests.goldens.test_logits import GELU, looked_up, runs  # noqa: E402

STEPS = 4
MODELS = DECLARATIONS | ANSWERING | ENCODERS
ONE_FOR_ALL = ("deepseek4",)  # whose heads have one key
ROUNDED = GELU | {*GELU_OF_T5, *GELU_OF_TEXTS}


def other_dims(name: str, numbers: Numbers) -> dict[str, int]:
    """Dimensions that a model can have instead of its own."""
    declared = {**DEFAULTS, **MODELS[name].dims}
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
        found["kv_heads"] = 1 if MODELS[name].arch in ONE_FOR_ALL else 1 + int(numbers.integers(1, 3)[0])
        found["heads"] = groups * found["kv_heads"]
        found["width"] = 33 + int(numbers.integers(1, 80)[0])
    return found


def check(name: str, seed: int, backend: str, peer: str, folder: Path) -> bool:
    numbers = Numbers(seed, name, "dims")
    dims = other_dims(name, numbers) if seed else {}
    made = model(name, seed, **dims)
    path = write(made, folder / "ours.gguf")
    if name in ENCODERS:
        read = texts(name, made)
        theirs = rows_of(made, read, folder, peer)
        errors = [] if theirs is None else [nmse(rows(path, name, backend, read), theirs)]
        return told(name, dims, backend, f"{len(read)} texts", errors)
    if name in ANSWERING:
        text, answer = text_and_answer(name, made)
        theirs = logits(made, answer.tolist(), STEPS, folder, peer, text.tolist())
        then = [] if theirs is None else [[token] for token in theirs["then"]]
        errors = [] if theirs is None else [nmse(all_logits(opened(path, backend), text, answer, *then),
                                                 np.concatenate((theirs["prefill"], theirs["decode"])))]  # fmt: skip
        return told(name, dims, backend, f"{len(text)} and {len(answer)} tokens", errors)
    length = 5 + int(numbers.integers(1, 70)[0]) + LONG.get(name, 0)
    tokens = numbers.integers(length, made.metadata[f"{made.arch}.vocab_size"])
    theirs = logits(made, tokens.tolist(), STEPS, folder, peer)
    errors = []
    if theirs is not None:
        ours = runs(path, backend, tokens, theirs["then"])
        errors = [nmse(ours[kind], theirs[kind]) for kind in ("prefill", "decode")]
    return told(name, dims, backend, f"{len(tokens)} tokens", errors)


def told(name: str, dims: dict[str, int], backend: str, what: str, errors: list[float]) -> bool:
    """Print how far they are, nothing of what llama.cpp does not open; whether that is near enough."""
    good = max(errors, default=0) < ((1e-6 if backend == "reference" else 1e-4) if name in ROUNDED else 1e-8)
    found = " ".join(f"{error:.1e}" for error in errors) or "llama.cpp refuses these"
    print(f"{name} {dims} {what}: {found}{'' if good else ' TOO MUCH'}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", choices=["cpu", "reference"], default="reference")
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], metavar="NAME")
    options = parser.parse_args()
    rowwise_verbs.gelu = looked_up(rowwise_verbs.gelu)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            check(name, options.seed, options.backend, options.peer_python, Path(folder))
            for name in options.names or MODELS
        ]
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main())
