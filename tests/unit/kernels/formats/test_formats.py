"""Compare every block type with the `gguf` package, bit for bit, and test what compiled code depends on."""

import json
import os
import subprocess
import sys
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest
from kernel_calls import dequantized
from numba import njit, types
from project import ROOT

from localllm.kernels.cpu.signature import device
from localllm.kernels.formats.scalar import build_unpacker
from localllm.kernels.simd import load_u8, store_f32
from localllm.quant.formats import BY_NAME, FORMATS, LAYOUTS, list_float_offsets

BLOCKS = 16

UNPACK = {name: build_unpacker(name) for name in LAYOUTS}


@cache
def for_python(function):
    """Wrap a kernel function of two integers for calls from Python."""
    return njit(lambda first, second: function(first, second))


def unpack_blocks(name: str, data: np.ndarray) -> np.ndarray:
    """Dequantize uint8 [..., bytes per row] to float32 [..., weights per row], between two guards."""
    format = BY_NAME[name]
    data = np.ascontiguousarray(data)
    blocks = data.size // format.bytes
    buffer = np.full(blocks * format.block + 2, np.float32(7.25))
    weights = buffer[1:-1]
    unpack = for_python(UNPACK[name])
    for i in range(blocks):
        unpack(data.ctypes.data + i * format.bytes, weights.ctypes.data + 4 * i * format.block)
    assert buffer[0] == buffer[-1] == 7.25
    return weights.reshape(*data.shape[:-1], -1)


def random_blocks(name: str, scale: int | None = None) -> np.ndarray:
    """Return random blocks, uint8 [BLOCKS, bytes], with any finite scales, or with `scale`, the bits of a float16."""
    generator = np.random.default_rng(list(name.encode()))
    data = generator.integers(0, 256, (BLOCKS, BY_NAME[name].bytes), dtype=np.uint8)
    finite = generator.integers(0, 0x7C00, BLOCKS) | generator.integers(0, 2, BLOCKS) << 15
    finite[:3] = 0x0001, 0x83FF, 0x0000
    if scale is not None:
        finite[:] = scale
    for field in list_float_offsets(name):
        data[:, field : field + 2] = finite.astype("<u2").reshape(-1, 1).view(np.uint8)
        finite = np.roll(finite, 1)
    if name == "IQ1_M":
        for n in range(4):  # a quarter of d on top of each 16-bit integer
            high = data[:, 49 + 2 * n]
            high[:] = high & 15 | (finite >> (4 * n) & 15) << 4
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(UNPACK.keys() - {"MXFP4", "NVFP4"}))
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_infinite_scales_give_infinite_weights(name, bits):
    """Compare with gguf, which gives the same."""
    data = random_blocks(name, scale=bits)
    with np.errstate(invalid="ignore"):
        expected = dequantized(name, data)
    got = unpack_blocks(name, data)
    assert not np.isfinite(got).any()
    np.testing.assert_array_equal(got, expected)


def assert_same_bits(weights: np.ndarray, expected: np.ndarray) -> None:
    assert weights.shape == expected.shape
    np.testing.assert_array_equal(weights.view(np.uint32), expected.view(np.uint32))


def test_every_block_type_has_an_unpacker():
    assert UNPACK.keys() == {format.name for format in FORMATS.values() if format.block > 1}


@pytest.mark.sampled
@pytest.mark.parametrize("name", UNPACK)
def test_random_blocks_are_dequantized_as_by_gguf(name):
    data = random_blocks(name)
    expected = dequantized(name, data)
    assert np.isfinite(expected).all()
    assert_same_bits(unpack_blocks(name, data), expected)


def test_every_scale_byte_of_mxfp4_and_nvfp4_is_dequantized_as_by_gguf():
    codes = np.arange(16, dtype=np.uint8)
    codes = codes | codes[::-1] << 4
    scales = np.arange(256, dtype=np.uint8).reshape(-1, 1)
    mxfp4 = np.concatenate([scales, np.broadcast_to(codes, (256, 16))], axis=1)
    nvfp4 = np.concatenate([np.repeat(scales, 4, axis=1), np.broadcast_to(np.tile(codes, 2), (256, 32))], axis=1)
    with np.errstate(over="ignore"):  # 12 * 2 ** 127 is infinite
        assert_same_bits(unpack_blocks("MXFP4", mxfp4), dequantized("MXFP4", mxfp4))
    assert_same_bits(unpack_blocks("NVFP4", nvfp4), dequantized("NVFP4", nvfp4))


def undefined_symbols(function) -> list[str]:
    """Return the external symbols that a compiled function needs, without LLVM's intrinsics."""
    (compiled,) = function.overloads.values()
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    for symbol in [*module.functions, *module.global_variables]:
        if not symbol.is_declaration and symbol.name != compiled.fndesc.llvm_func_name:
            symbol.linkage = "internal"
    machine = llvm.Target.from_default_triple().create_target_machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    declared = [symbol.name for symbol in [*module.functions, *module.global_variables] if symbol.is_declaration]
    return [name for name in declared if not name.startswith("llvm.")]


def undefined_symbols_by_format() -> dict[str, list[str]]:
    for function in UNPACK.values():
        function.compile((types.int64, types.int64))
    return {name: undefined_symbols(function) for name, function in UNPACK.items()}


@pytest.mark.sampled
def test_machine_code_needs_no_external_functions():
    """The code is loaded into processes without Python, Numba's runtime or a C library.


    The test needs its own process: Numba compiled what Python has called before in this one with its runtime.
    """
    program = f"import json; from {__name__} import *; print(json.dumps(undefined_symbols_by_format()))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}  # where its helpers are
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout) == {name: [] for name in UNPACK}


def test_an_inlined_helper_keeps_its_loads():
    """Without an LLVM option that `blocks` sets, `gather` becomes empty: one address is "null + base" if inlined."""

    @device
    def pick(base, index):
        if index < 4:
            return load_u8(base + index) & 63
        return load_u8(base + 4 + index) & 15 | load_u8(base + index - 4) >> 6

    @device
    def gather(base, out):
        for index in range(8):
            store_f32(out + 4 * index, np.float32(pick(base + 4, index)))

    data, out = np.arange(32, dtype=np.uint8), np.empty(8, dtype=np.float32)
    gather.compile((types.int64, types.int64))
    (compiled,) = gather.overloads.values()
    module = llvm.parse_assembly(compiled.library.get_llvm_str())
    assert "unreachable" not in str(module.get_function(compiled.fndesc.llvm_func_name))
    for_python(gather)(data.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, [4, 5, 6, 7, 12, 13, 14, 15])
