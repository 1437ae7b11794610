"""Test attention of many tokens in Numba's simulator, with warps of 32 lanes.


tests/unit/kernels/cuda/test_attention.py runs this module in a process of its own.
"""

import numpy as np
import pytest
from simulated import WARP, launch

from tests.unit.kernels.cuda.test_attention import Shape, content, error, expected, run

assert WARP == 32


def attend_many(
    shape, run, q, keys, values, depth=16, window=0, chunked=False, softcap=0.0, slopes=None, sinks=None, lookahead=0
):
    """Run the kernel: float32 [tokens, heads * value_dim]."""
    heads = shape.kv_heads * shape.group
    y = np.full((len(q) + 1, heads * shape.value_dim), 7, np.float32)
    of_keys, of_values = keys.bytes, values.bytes
    launch(
        f"attend_many-{keys.kind}-{values.kind}-{shape.key_dim}-{shape.value_dim}-{depth}", len(q),
        sequences=run.sequences, sequence_count=np.array([len(run.sequences)]), q=q, q_stride=q.strides[0], y=y,
        y_stride=y.strides[0], keys=of_keys, values=of_values, key_head_stride=of_keys.strides[0],
        value_head_stride=of_values.strides[0], key_bytes=of_keys.shape[2], value_bytes=of_values.shape[2],
        heads=heads, kv_heads=shape.kv_heads, scale=shape.key_dim**-0.5, softcap=softcap, window=window,
        chunked=chunked, lookahead=lookahead, slopes=0 if slopes is None else slopes,
        sinks=0 if sinks is None else sinks,
    )  # fmt: skip
    assert (y[-1] == 7).all()
    return y[:-1]


SLOPES, SINKS = np.float32([0.5, 0.02]), np.float32([-20, 3])


@pytest.mark.parametrize(
    ("kinds", "shape", "spans", "options"),
    [
        (("F16", "F16"), Shape(16, 16, 1, 1), [(20, 70), (3, 3)], {}),
        (("F16", "F16"), Shape(32, 16, 2, 2), [(20, 80)], {"window": 30, "depth": 8}),
        (("Q8_0", "Q4_0"), Shape(20, 40, 1, 3), [(17, 129)], {"softcap": 5.0}),
        (("F16", "Q4_1"), Shape(16, 16, 1, 1), [(5, 200)], {"window": 50, "chunked": True}),
        (("F16", "F16"), Shape(16, 16, 1, 1), [(1, 1 + i) for i in range(18)], {}),  # more than there are blocks
        (("F16", "F16"), Shape(16, 16, 1, 2), [(5, 60), (13, 70)], {"slopes": SLOPES, "sinks": SINKS}),
        (("F16", "F16"), Shape(16, 16, 1, 2), [(40, 40), (3, 3)], {"lookahead": 1 << 40, "slopes": SLOPES}),
        (("F16", "F16"), Shape(16, 16, 1, 1), [(70, 70)], {"lookahead": 6, "window": 7}),
        (("F16", "F16"), Shape(160, 192, 1, 1), [(3, 70)], {}),  # half a page of keys at a time
    ],
)
def test_attention_of_many_tokens_agrees_with_numpy(kinds, shape, spans, options):
    tokens = run(spans)
    q, keys, values = content(shape, tokens, kinds)
    got = attend_many(shape, tokens, q, keys, values, **options)
    options = {name: value for name, value in options.items() if name != "depth"}
    assert error(got, expected(shape, tokens, q, keys.kept, values.kept, **options)) < 1e-6


def test_huge_queries_and_nan_of_many_tokens_stay_apart():
    """Use queries that float16 cannot represent."""
    shape, tokens = Shape(16, 16, 1, 1), run([(4, 40)])
    q, keys, values = content(shape, tokens, ("F16", "F16"))
    q[1] *= np.float32(1e6)
    exact = expected(shape, tokens, q, keys.kept, values.kept)
    q[2, 3] = np.nan
    got = attend_many(shape, tokens, q, keys, values)
    assert np.isnan(got[2]).all() and error(got[[0, 1, 3]], exact[[0, 1, 3]]) < 1e-6
