"""What products on tensor cores need of activations, in Numba's simulator."""

import numpy as np
from simulated import launch

random = np.random.default_rng(0)


def test_halves_keep_eleven_bits_of_any_size():
    x = random.normal(0, 1, (4, 48)).astype(np.float32) * np.float32([[1e-20], [1], [1e20], [0]])
    y, scales = np.zeros((4, 48), np.float16), np.zeros(4, np.float32)
    launch("halve", 5, count=np.array([4]), x=x, stride=192, columns=48, y=y, y_stride=96, scales=scales)
    back = y.astype(np.float32)
    for row in range(3):
        np.testing.assert_allclose(back[row] * scales[row], x[row], rtol=2.0**-11, atol=np.abs(x[row]).max() * 1e-7)
    launch("scale_rows", 4, count=np.array([4]), y=back, stride=192, columns=48, scales=scales)
    np.testing.assert_array_equal(back, y.astype(np.float32) * scales[:, None])


def test_a_number_that_is_none_spoils_its_row_alone():
    x = np.ones((3, 16), np.float32)
    x[1, 5] = np.nan
    y, scales = np.zeros((3, 16), np.float16), np.zeros(3, np.float32)
    launch("halve", 3, count=np.array([3]), x=x, stride=64, columns=16, y=y, y_stride=32, scales=scales)
    assert np.isnan(y[1].astype(np.float32) * scales[1]).all() and np.isfinite(y[[0, 2]]).all()


def test_two_parts_have_16_bits():
    x = random.normal(0, 1, (2, 40)).astype(np.float32)
    parts = np.zeros((2, 2, 40), np.uint16)
    launch(
        "split_bf16", 2, count=np.array([2]), x=x, stride=160, columns=40, high=parts[0], low=parts[1], y_stride=80
    )  # fmt: skip
    high, low = (parts.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(high + low, x, rtol=2.0**-14)
