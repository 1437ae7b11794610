"""Compare the kernels of all lanes that this machine has with NumPy, in one process.


The compiler gets another lane, of which nothing else knows, and tests of test_kernels.py and others run on its kernels.
"""

import struct
import sys

import llvmlite.binding as llvm
import pytest
from kernel_calls import caller, compiled_for

from localllm.files.cache.checksummed_cache import read_checksummed
from localllm.kernels.build.library import KernelLibrary
from localllm.kernels.build.objects import get_object_file
from localllm.kernels.machine import Lane, get_lane
from tests.unit.kernels.cpu import test_kernels
from tests.unit.kernels.cpu import test_recurrent as test_recurrent_kernels
from tests.unit.kernels.cpu.attention import test_attend as test_attention

BASE = "+64bit,+cmov,+cx8,+fxsr,+mmx,+sse,+sse2"
SSSE3 = BASE + ",+sse3,+ssse3"
AVX2 = SSSE3 + ",+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16,+sahf"
AVX512 = AVX2 + "".join(f",+avx512{name}" for name in ("f", "bw", "cd", "dq", "vl"))
LANES = {
    "portable": Lane("x86-64", BASE),
    "ssse3": Lane("core2", SSSE3),
    "avx2": Lane("haswell", AVX2),
    "avx-vnni": Lane("alderlake", AVX2 + ",+avxvnni"),
    "avx512-vnni": Lane("cascadelake", AVX512 + ",+avx512vnni"),
}
MATHEMATICS = {"log", "logf", "sin", "cos", "sincos"}  # what kernels may call, once for many numbers
PRODUCTS = ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS", "IQ2_S", "Q1_0", "Q2_0", "NVFP4"]
pytestmark = [pytest.mark.slow(20), pytest.mark.sampled(every=24)]  # each compiles for itself


@pytest.fixture(params=LANES)
def other(request, monkeypatch) -> Lane:
    """Return a lane of this machine."""
    lane = LANES[request.param]
    if not lane.features <= get_lane().features:
        pytest.skip("this CPU does not have it")
    monkeypatch.setattr(test_kernels, "LANE", lane)
    return lane


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_every_lane_agree_with_numpy(other, name):
    """Multiply one token, a few, and many in one plane and in two; check also NaN."""
    call = caller([f"linear_quantized-{name}"], other)
    for tokens in (1, 7, test_kernels.MANY):
        test_kernels.test_quantized_products_multiply_integers_exactly(call, name, tokens)
    test_kernels.test_nan_spoils_only_its_row_or_token(call, name, 4, True)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "NVFP4"])
def test_embeddings_of_every_lane_agree_with_numpy(other, name):
    test_kernels.test_embedding_rows_are_dequantized_and_keep_nan(caller([f"embed-{name}"], other), name)


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_attention_of_every_lane_agrees_with_numpy(other, name):
    call = caller([f"attend-{name}", "plan", "merge", f"store-{name}"], other)
    test_attention.test_storing_rounds_tokens_at_their_positions_and_changes_nothing_else(call, name, 80)
    for tokens, length in ((1, 300), (33, 300)):
        test_attention.test_attention_agrees_with_numpy_wherever_pages_lie(call, name, tokens, length)


def test_rowwise_kernels_of_every_lane_agree_with_numpy(other, monkeypatch):
    without_dots = "ssse3" in other.features and not {"avxvnni", "avx512vnni"} & other.features
    monkeypatch.setattr(test_kernels, "BYTE_OFFSET", 0 if without_dots else 128)  # of bytes that rescale.py makes
    call = caller(["rms_norm", "layer_norm", "add", "swiglu", "rope", "angles", "quantize", "logits"], other)
    test_kernels.test_rms_norm_agrees_with_numpy_and_keeps_nan(call, 7, 100, 100, False)
    test_kernels.test_layer_norm_agrees_with_numpy_and_keeps_nan(call, 7, 100, 100, True)
    test_kernels.test_adding_rows_or_a_bias_agrees_with_numpy(call, 7, 100)
    test_kernels.test_swiglu_agrees_with_numpy(call, 7, 100)
    test_kernels.test_rope_rotates_the_first_dimensions_of_each_head(call, 80, 32, True)
    test_kernels.test_angles_agree_with_numpy(call, 40)
    for in_pairs in (False, True):
        test_kernels.test_quantize_agrees_with_numpy_and_rounds_within_half_a_step(call, 7, 320, in_pairs)
    test_kernels.test_logits_are_copied_and_infinite_ones_flagged(call, 100)
    for function in test_kernels.FUNCTIONS:
        test_kernels.test_elementwise_functions_agree_with_numpy(call, 7, 100, function)


def test_recurrent_kernels_of_every_lane_agree_with_the_reference(other):
    call, counts = caller(["convolve", "selective_scan", "head_scan-delta"], other), test_recurrent_kernels.COUNTS[-1]
    test_recurrent_kernels.test_convolving_agrees_with_the_reference(call, counts, 48, 3, False)
    test_recurrent_kernels.test_selective_scans_agree_with_the_reference(call, counts, 48, 16)
    test_recurrent_kernels.test_head_scans_agree_with_the_reference(call, counts, "delta", 2, 2, 20, 16)


def functions_needed(code: bytes) -> set[str]:
    """Return the external functions that machine code in an ELF file calls."""
    sections = {section.name(): section.data() for section in llvm.ObjectFileRef.from_data(code).sections()}
    names = sections[b".strtab"]
    symbols = struct.iter_unpack("<IBBHQQ", sections[b".symtab"])
    starts = [name for name, _, _, section, _, _ in symbols if name and section == 0]
    return {names[start : names.index(b"\0", start)].decode() for start in starts}


@pytest.mark.skipif(sys.platform != "linux", reason="object files are of another kind")
@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_kernels_of_older_lanes_call_no_functions_but_mathematics(other, name):
    kernels = ["rms_norm", "rope", "geglu", "quantize", f"embed-{name}"]
    kernels += compiled_for([f"linear_quantized-{name}"]) if name == "Q4_K" else [f"attend-{name}"]
    KernelLibrary(kernels, lane=other)
    needed = (functions_needed(read_checksummed(get_object_file(kernel, other)) or b"") for kernel in kernels)
    assert set().union(*needed) <= MATHEMATICS
