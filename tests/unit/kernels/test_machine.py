"""Test the lane that a process compiles for, by the features of its CPU."""

import pytest

from localllm.kernels.machine import Lane, get_lane

AVX2 = "+avx2,+f16c,+fma,+ssse3"
SKYLAKE = f"{AVX2},+avx512f,+avx512bw,+avx512vl"


@pytest.fixture
def lane_of(monkeypatch: pytest.MonkeyPatch):
    def lane(features: str) -> Lane:
        monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
        return get_lane.__wrapped__()

    return lane


def test_avx_512_without_vnni_computes_as_avx2(lane_of):
    lane = lane_of(SKYLAKE)
    assert lane.has_avx2_only and not lane.has_512_bits and lane.choices == lane_of(AVX2).choices
    assert "-avx512f" in lane.feature_string.split(",")  # LLVM uses no more than our sources


def test_avx_512_with_vnni_keeps_its_features(lane_of):
    features = f"{SKYLAKE},+avx512vnni"
    assert lane_of(features).feature_string == features and lane_of(features).has_512_bits
