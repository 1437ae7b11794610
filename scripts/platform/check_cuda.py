"""Check every golden model on a GPU.

    python scripts/platform/check_cuda.py [--card simulator|0] [OPTIONS] [NAME...]

The GPU is Numba's simulator, in which a token takes up to a few seconds, or a real one by its number. Prints for each
model the normalized mean square error (NMSE) of the prompt's logits and of some tokens after it, each read by a run of
its own, and the seconds. Exits with 1 if an error is above 1e-6 (1e-5 for quantized models, 1e-4 where llama.cpp rounds
GELU).
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
from models import DECLARATIONS, QUANTIZED, write_model  # noqa: E402
from models.golden import Golden, kept  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="simulator")
    parser.add_argument("--tokens", type=int, default=9, help="of the prompt; more than 8 are multiplied by cuBLAS")
    parser.add_argument("--decode", type=int, default=0, help="tokens after it, one by one")
    tensor_cores = "with f16, attention of over 16 tokens takes tensor cores: the simulator needs SIMULATED_WARP=32"
    parser.add_argument("--kv-type", default="f32", help=tensor_cores)
    parser.add_argument("names", nargs="*")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    if chosen.card == "simulator":
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
        from simulated import SimulatedCard

        from localllm.engine.cuda import devices

        devices.open_card = lambda number: SimulatedCard()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.names or [*DECLARATIONS, *QUANTIZED]:
            path = write_model(name, Path(folder) / "model.gguf")
            failed |= not check(name, path, chosen)
    return int(failed)


def check(name: str, path: Path, chosen: argparse.Namespace) -> bool:
    """Return whether the GPU computes a model within the bound, or reports that it cannot."""
    import numpy as np
    from engines import open_engine

    from localllm.errors import UnsupportedError
    from tests.goldens.test_logits import GELU, family, nmse

    golden, began = Golden.load(name), time.perf_counter()
    ids, count = golden.tokens.tolist(), min(chosen.tokens, len(golden.tokens))
    backend = "cuda:0" if chosen.card == "simulator" else f"cuda:{chosen.card}"
    try:
        engine = open_engine(path, context=128, kv_type=chosen.kv_type, backend=backend)
        rows = [engine.forward(ids[:count], 0, "all")]
        end = min(count + chosen.decode, len(ids))
        rows.extend(engine.forward(ids[i : i + 1], i) for i in range(count, end))
        engine.close()
    except Exception as error:  # the others are wanted, too
        print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return isinstance(error, UnsupportedError)
    got = kept(np.concatenate(rows))
    error = nmse(got, golden.prefill[: len(got)])
    good = error < (1e-4 if family(name) in GELU else 1e-6 if golden.native is None else 1e-5)
    print(f"{name}: {error:.1e}, {time.perf_counter() - began:.0f} s{'' if good else ' TOO MUCH'}", flush=True)
    return good


if __name__ == "__main__":
    sys.exit(main())
