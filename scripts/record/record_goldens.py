#!/usr/bin/env python3
"""Record what llama.cpp computes for the tiny random models of tests/support/models, in tests/goldens.

    python scripts/record/record_goldens.py --peer-python PEER/bin/python [NAME...]

PEER is a virtual environment with llama-cpp-python (recorded: 0.3.36). Without names: every model whose golden is
missing or of other numbers. For each it prints how far its logits spread, how many different tokens follow greedily, by
how much the most likely one wins at least, and how far our reference is: choose another seed in the declaration where
the tokens repeat or a choice is close.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "scripts" / "tools")]
from models import ANSWERING, DECLARATIONS, ENCODERS, MASKED, PARTLY, QUANTIZED, Model, exact, model, write  # noqa: E402
from models.answering import IN_BLOCKS, text_and_answer  # noqa: E402
from models.encoders import ROWS_IN_BLOCKS, RowsGolden, texts  # noqa: E402
from models.golden import FOLDER, STEPS, Golden, kept, prompt  # noqa: E402
from peer import ask_for_arrays  # noqa: E402

NAMES = [*DECLARATIONS, *PARTLY, *ANSWERING, *IN_BLOCKS, *ENCODERS, *ROWS_IN_BLOCKS, *MASKED, *QUANTIZED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME")
    options = parser.parse_args()
    names = options.names or [name for name in NAMES if not is_recorded(name)]
    with tempfile.TemporaryDirectory() as folder:
        failed = [name for name in names if not record(name, Path(folder), options.peer_python)]
    if failed:
        sys.exit(f"llama.cpp failed on {', '.join(failed)}")


def is_recorded(name: str) -> bool:
    kind = RowsGolden if name in (*ENCODERS, *ROWS_IN_BLOCKS, *MASKED) else Golden
    return (FOLDER / f"{name}.npz").exists() and kind.load(name).digest == model(name).digest()


def record(name: str, folder: Path, peer: str) -> bool:
    """Make a golden of what llama.cpp says, if it does."""
    made = model(name)
    if name in ENCODERS or name in ROWS_IN_BLOCKS:
        return record_rows(name, folder, peer)
    tokens = prompt(name, made.metadata[f"{made.arch}.vocab_size"])
    if name in MASKED:  # whose tokens see those behind them
        whole = logits(made, tokens.tolist(), [], folder, peer)
        if whole is not None:
            RowsGolden(kept(whole["prefill"]), made.digest()).save(name)
        return whole is not None
    text, read = [], tokens
    if name.partition("-")[0] in ANSWERING:
        text, read = text_and_answer(name, made)
        tokens, text = np.concatenate((text, read)), text.tolist()
    rows = logits(exact(made), read.tolist(), STEPS, folder, peer, text)
    again = rows is not None and {*made.formats.values()} - {"I32"}
    native = logits(made, read.tolist(), rows["then"].tolist(), folder, peer, text) if again else None
    if rows is None or (again and native is None):
        return False
    prefill, greedy, decode = rows["prefill"], rows["then"], rows["decode"]
    errors = native and np.array([nmse(native[kind], rows[kind]) for kind in ("prefill", "decode")])
    Golden(tokens, kept(prefill), greedy, kept(decode), made.digest(), errors).save(name)
    closest = margin(np.concatenate([prefill[-1:], decode[:-1]]))
    print(f"{name}: deviation {prefill.std():.2f}, {len({*greedy.tolist()})} tokens, margin {closest:.4f}", end="")
    print("" if errors is None else f", native {errors[0]:.1e} {errors[1]:.1e}", flush=True)
    return True


def record_rows(name: str, folder: Path, peer: str) -> bool:
    """Return the same of an encoder: its rows of a few texts."""
    made = model(name)
    rows = rows_of(exact(made), texts(name, made), folder, peer)
    if rows is None:
        return False
    RowsGolden(rows, made.digest()).save(name)
    print(f"{name}: deviation {rows.std():.2f} within texts, {rows.std(axis=0).mean():.2f} between")
    return True


def rows_of(made: Model, read: list[np.ndarray], folder: Path, peer: str) -> np.ndarray | None:
    """llama.cpp's rows of texts."""
    job: dict = {"model": str(write(made, folder / "model.gguf")), "texts": [text.tolist() for text in read]}
    job["alone"] = made.arch in ("llama-embed", "t5encoder")  # which llama.cpp cuts in pieces among others
    found = ask_for_arrays(peer, folder, job="rows", **job)
    return None if found is None else found["rows"]


def logits(
    model, tokens: list[int], then: list[int] | int, folder: Path, peer: str, text: list[int] | None = None
) -> dict[str, np.ndarray] | None:
    """Return llama.cpp's logits; text: what an encoder reads before."""
    job = {"model": str(write(model, folder / "model.gguf")), "tokens": tokens, "then": then, "encode": text}
    is_sparse = model.metadata.get("minimax-m3.leading_dense_block_count") == 0
    job["flash"] = is_sparse  # without it MiniMax M3 sees all keys there
    return ask_for_arrays(peer, folder, job="logits", **job)


def nmse(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the normalized mean square error."""
    return float(((got - expected) ** 2).sum() / ((expected - expected.mean()) ** 2).sum())


def margin(logits: np.ndarray) -> float:
    """By how much the largest logit of a row is ahead, at least."""
    best = np.sort(logits, axis=1)[:, -2:]
    return float((best[:, 1] - best[:, 0]).min())


if __name__ == "__main__":
    main()
