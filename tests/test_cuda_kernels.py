"""The CUDA kernels in Numba's simulator, each against its NumPy twin."""

import numpy as np
import pytest
from simulated import launch

COUNT = 3
random = np.random.default_rng(0)


def rows(columns: int, count: int = COUNT) -> np.ndarray:
    """Activations: float32 [count, columns padded to 16]."""
    x = np.zeros((count, -(-columns // 16) * 16), np.float32)
    x[:, :columns] = random.normal(0, 1, (count, columns))
    return x


@pytest.mark.parametrize(("columns", "group"), [(16, 16), (40, 40), (96, 32)])
def test_rms_norm(columns, group):
    x, weight, y = rows(columns), rows(columns, 1)[0], rows(columns, COUNT + 1) * 0
    launch(
        "rms_norm", COUNT + 1, count=np.array([COUNT]), x=x, weight=weight, y=y, stride=x.strides[0], columns=columns,
        group=group, epsilon=1e-5,
    )  # fmt: skip
    groups = x[:, :columns].reshape(COUNT, -1, group).astype(np.float64)
    expected = groups / np.sqrt((groups**2).mean(axis=2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        y[:COUNT, :columns], expected.reshape(COUNT, -1) * weight[:columns], rtol=1e-5, atol=1e-6
    )
    assert not y[COUNT].any()
