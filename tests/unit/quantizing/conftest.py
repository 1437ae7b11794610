"""Fixtures: models that several tests quantize."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localllm.cli.main import main
from tests.unit.quantizing.quantize_parts import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model-F32.gguf")


@pytest.fixture
def importance(tmp_path: Path) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(9)
    rows = {"blk.0.ffn_down.weight": (1, 512), "blk.1.ffn_gate_exps.weight": (3, 256), "blk.0.attn_v.weight": (1, 256)}
    return {name: generator.uniform(0, 1, shape).astype(np.float32) ** 4 for name, shape in rows.items()}


@pytest.fixture
def command(capfd, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `localllm quantize`: exit code, stdout, stderr."""

    def call(*arguments) -> tuple[int, str, str]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", ["localllm", "quantize", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return (end.value.code or 0, *capfd.readouterr())

    return call
