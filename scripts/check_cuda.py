"""Every golden model on a card: python scripts/check_cuda.py [--card simulator|0] [OPTIONS] [NAME...]

The card is Numba's simulator, in which a token takes seconds to minutes, or a real one by its number. For each model:
the error of the prompt's logits and of some tokens after it, each read by a run of its own, normalized (NMSE), and the
seconds that it took. Ends with 1 if one is above 1e-6, or for quantized models above 1e-5.
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", default="simulator")
    parser.add_argument("--tokens", type=int, default=9, help="of the prompt; more than 8 are multiplied by cuBLAS")
    parser.add_argument("--decode", type=int, default=0, help="tokens after it, one by one")
    tensor_cores = "with f16, attention of over 16 tokens takes tensor cores: the simulator needs SIMULATED_WARP=32"
    parser.add_argument("--kv-type", default="f32", help=tensor_cores)
    parser.add_argument("--folder", type=Path, default=ROOT.parent / "shared" / "goldens" / "arch")
    parser.add_argument("names", nargs="*")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    if chosen.card == "simulator":
        os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
        from simulated import SimulatedCard

        from localllm.engine import devices

        devices.open_card = lambda number: SimulatedCard()
    import numpy as np
    from engines import open_engine
    from test_goldens import nmse

    from localllm.errors import UnsupportedError

    backend, failed = "cuda:0" if chosen.card == "simulator" else f"cuda:{chosen.card}", 0
    for path in sorted(chosen.folder.glob("*.gguf")):
        if chosen.names and path.stem not in chosen.names:
            continue
        golden, began = np.load(path.with_suffix(".npz")), time.perf_counter()
        kind = next(end for end in ("_deq", "_exactgelu", "") if f"prefill_logits{end}" in golden)
        ids, expected = golden["tokens"].tolist(), golden[f"prefill_logits{kind}"]
        count = min(chosen.tokens, len(ids))
        try:
            engine = open_engine(path, context=128, kv_type=chosen.kv_type, backend=backend)
            errors = [nmse(engine.forward(ids[:count], 0, "all"), expected[:count])]
            for i in range(count, min(count + chosen.decode, len(ids))):
                errors.append(nmse(engine.forward(ids[i : i + 1], i)[0], expected[i]))
            engine.close()
        except Exception as error:  # the others are wanted, too
            print(f"{path.stem}: {type(error).__name__}: {error}", flush=True)
            failed += not isinstance(error, UnsupportedError)
            continue
        bad = not max(errors) < (1e-5 if kind == "_deq" else 1e-6)
        failed += bad
        told = ", ".join(f"{error:.1e}" for error in errors)
        print(f"{path.stem}: {told}, {time.perf_counter() - began:.0f} s{' TOO MUCH' if bad else ''}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
