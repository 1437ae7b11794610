"""Checkpoints with quantized weights: converting yields the weights that were packed.

Weights are packed here number by number, by the formats' descriptions, from codes, scales and zero points drawn
before; the expected weights are computed from those, before anything is packed.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoint import CONFIG, edit_json, make_weights, write_checkpoint, write_safetensors

from localllm.convert import open_folder
from localllm.convert.quantized.unpacking import FLOATS_OF_8_BITS, unpack_stream, unpack_words
from localllm.convert.transforms import as_float32
from localllm.errors import ModelError

NAMES = [f"model.layers.{n}.{part}" for n in (0, 1)
         for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")]  # fmt: skip
Packed = tuple[list[tuple[str, str, np.ndarray]], np.ndarray]  # tensors (suffix, type, values), the weights meant
RANDOM = np.random.default_rng(3)


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16)


def words(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> np.ndarray:
    """Pack rows of numbers in 32-bit words, one by one: place p of a word has number order[p] of its 32 // bits."""
    each = 32 // bits
    rows, columns = numbers.shape
    packed = np.zeros((rows, -(-columns // each)), np.uint32)
    for column in range(columns):
        word, within = divmod(column, each)
        place = order.index(within) if order else within
        packed[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(place * bits)
    return packed.view(np.int32)


def stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of numbers as a stream of bits, so that three bits may lie across words."""
    ones = (numbers[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(numbers), -1)
    return np.packbits(ones, axis=1, bitorder="little").view(np.int32)


def fp8(codes: np.ndarray) -> np.ndarray:
    """Decode numbers of E4M3, by the definition."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(int), codes & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -value, value)


def codes_of_fp8(shape: tuple[int, ...]) -> np.ndarray:
    codes = RANDOM.integers(0, 256, shape, np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x30, codes).astype(np.uint8)


def fp8_blocks(rows: int, columns: int) -> Packed:
    codes, scales = codes_of_fp8((rows, columns)), RANDOM.uniform(0.001, 0.01, (-(-rows // 24), -(-columns // 40)))
    scales = scales.astype(np.float32)
    whole = np.kron(scales, np.ones((24, 40), np.float32))[:rows, :columns]
    return [("weight", "F8_E4M3", codes), ("weight_scale_inv", "F32", scales)], fp8(codes) * whole


def fp8_tensor(rows: int, columns: int) -> Packed:
    codes, scale = codes_of_fp8((rows, columns)), np.float32(0.0035)
    more = [("weight_scale", "F32", np.array(scale)), ("input_scale", "F32", np.array(1, np.float32))]
    return [("weight", "F8_E4M3", codes), *more], fp8(codes) * scale


def fp8_rows(rows: int, columns: int) -> Packed:
    codes, scales = codes_of_fp8((rows, columns)), RANDOM.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
    return [("weight", "F8_E4M3", codes), ("weight_scale", "F32", scales)], fp8(codes) * scales


def packed(
    rows: int, columns: int, bits: int = 4, size: int = 16, zeros: bool = False, order: bool = False, one: bool = False
) -> Packed:
    """Pack as compressed-tensors does: signed numbers, half their range added; zero points packed along rows."""
    middle, groups = 1 << bits - 1, columns // size
    numbers = RANDOM.integers(-middle, middle, (rows, columns))
    scales = half(RANDOM.uniform(0.01, 0.1, (1 if one else rows, groups)))
    zero = RANDOM.integers(-middle, middle, (rows, groups)) if zeros else np.zeros((rows, groups), int)
    group = RANDOM.permutation(np.arange(columns) // size) if order else np.arange(columns) // size
    tensors = [("weight_packed", "I32", words(numbers + middle, bits)), ("weight_scale", "F16", scales),
               ("weight_shape", "I64", np.array([rows, columns]))]  # fmt: skip
    tensors += [("weight_zero_point", "I32", np.ascontiguousarray(words((zero + middle).T, bits).T))] if zeros else []
    tensors += [("weight_g_idx", "I32", group.astype(np.int32))] if order else []
    return tensors, (numbers - zero[:, group]) * scales.astype(np.float32)[:, group]


def int8(rows: int, columns: int, each_row: bool = True) -> Packed:
    numbers = RANDOM.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = half(RANDOM.uniform(0.001, 0.01, (rows if each_row else 1, 1)))
    return [("weight", "I8", numbers), ("weight_scale", "F16", scales)], numbers * scales.astype(np.float32)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def fours(rows: int, columns: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw bytes of two 4-bit floats, the first in the low half, and return their values too."""
    codes = RANDOM.integers(0, 16, (rows, columns), np.uint8)
    values = np.array([*E2M1, *(-value for value in E2M1)])[codes]
    return codes[:, 0::2] | codes[:, 1::2] << 4, values


def nvfp4(rows: int, columns: int) -> Packed:
    data, values = fours(rows, columns, 16)
    scales, whole = codes_of_fp8((rows, columns // 16)) & 0x7F, np.array([250.0], np.float32)
    spread = np.repeat(fp8(scales), 16, axis=1)
    return [("weight_packed", "U8", data), ("weight_scale", "F8_E4M3", scales),
            ("weight_global_scale", "F32", whole)], values * spread / 250  # fmt: skip


def modelopt_nvfp4(rows: int, columns: int) -> Packed:
    data, values = fours(rows, columns, 16)
    scales = codes_of_fp8((rows, columns // 16)) & 0x7F
    spread = np.repeat(fp8(scales), 16, axis=1)
    return [("weight", "U8", data), ("weight_scale", "F8_E4M3", scales),
            ("weight_scale_2", "F32", np.array(0.002, np.float32))], values * spread * 0.002  # fmt: skip


def mxfp4(rows: int, columns: int) -> Packed:
    data, values = fours(rows, columns, 32)
    scales = RANDOM.integers(118, 126, (rows, columns // 32), np.uint8)
    spread = np.repeat(2.0 ** (scales.astype(int) - 127), 32, axis=1)
    return [("weight_packed", "U8", data), ("weight_scale", "U8", scales)], values * spread


def awq(rows: int, columns: int) -> Packed:
    """Pack [inputs, outputs]; place p of a word has output [0, 2, 4, 6, 1, 3, 5, 7][p] of eight."""
    numbers, zero = RANDOM.integers(0, 16, (columns, rows)), RANDOM.integers(0, 16, (columns // 16, rows))
    scales, order = half(RANDOM.uniform(0.01, 0.1, (columns // 16, rows))), [0, 2, 4, 6, 1, 3, 5, 7]
    spread = [np.repeat(part, 16, axis=0) for part in (zero, scales.astype(np.float32))]
    tensors = [("qweight", "I32", words(numbers, 4, order)), ("qzeros", "I32", words(zero, 4, order))]
    return [*tensors, ("scales", "F16", scales)], ((numbers - spread[0]) * spread[1]).T


def gptq(rows: int, columns: int, bits: int = 4, order: bool = False, added: int = 1) -> Packed:
    """Pack [inputs, outputs] along inputs; zero points less one."""
    numbers = RANDOM.integers(0, 1 << bits, (columns, rows))
    zero = RANDOM.integers(1, 1 << bits, (columns // 16, rows))
    scales = half(RANDOM.uniform(0.01, 0.1, (columns // 16, rows)))
    group = np.arange(columns) // 16
    group = RANDOM.permutation(group) if order else group
    weight = np.ascontiguousarray(stream(numbers.T, bits).T)
    tensors = [("qweight", "I32", weight), ("qzeros", "I32", stream(zero - added, bits)), ("scales", "F16", scales),
               ("g_idx", "I32", group.astype(np.int32))]  # fmt: skip
    return tensors, ((numbers - zero[group]) * scales.astype(np.float32)[group]).T


NF4 = np.array([-1.0, -0.6961928, -0.5250731, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803,
                0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)  # fmt: skip


def bnb4(rows: int, columns: int, nested: bool = False) -> Packed:
    """Pack codes of the flattened matrix, the first in the high half; blocks of 64."""
    codes, blocks = RANDOM.integers(0, 16, rows * columns, np.uint8), -(-rows * columns // 64)
    state_of = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    data = (codes[0::2] << 4 | codes[1::2])[:, None]
    tensors = [("weight", "U8", data), ("weight.quant_map", "F32", NF4)]
    if nested:
        table = np.sort(RANDOM.normal(size=256)).astype(np.float32)
        small, large = (
            RANDOM.integers(0, 256, blocks, np.uint8),
            RANDOM.uniform(0.1, 1, -(-blocks // 256)).astype(np.float32),
        )
        scales = table[small] * np.repeat(large, 256)[:blocks] + np.float32(0.5)
        state_of |= {"nested_blocksize": 256, "nested_offset": 0.5, "nested_dtype": "float32"}
        tensors += [("weight.absmax", "U8", small), ("weight.nested_absmax", "F32", large),
                    ("weight.nested_quant_map", "F32", table)]  # fmt: skip
    else:
        scales = RANDOM.uniform(0.01, 0.1, blocks).astype(np.float32)
        tensors.append(("weight.absmax", "F32", scales))
    state = np.frombuffer(json.dumps(state_of).encode(), np.uint8)
    tensors.append(("weight.quant_state.bitsandbytes__nf4", "U8", state))
    return tensors, (NF4[codes] * np.repeat(scales, 64)[: rows * columns]).reshape(rows, columns)


def bnb8(rows: int, columns: int) -> Packed:
    numbers, scales = RANDOM.integers(-127, 128, (rows, columns)), RANDOM.uniform(0.5, 2, rows).astype(np.float32)
    tensors = [("weight", "I8", numbers.astype(np.int8)), ("SCB", "F32", scales)]
    return [*tensors, ("weight_format", "U8", np.array(0, np.uint8))], numbers * scales[:, None] / 127


CT = {"quant_method": "compressed-tensors"}
CASES: dict[str, tuple[dict, Callable[[int, int], Packed]]] = {
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, fp8_blocks),
    "fp8-tensor": ({"quant_method": "fp8"}, fp8_tensor),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt_nvfp4),
    "ct-w4a16": (CT | {"format": "pack-quantized"}, packed),
    "ct-asymmetric": (CT | {"format": "pack-quantized"}, lambda r, c: packed(r, c, zeros=True)),
    "ct-actorder": (CT | {"format": "pack-quantized"}, lambda r, c: packed(r, c, order=True)),
    "ct-w8a16": (CT | {"format": "pack-quantized"}, lambda r, c: packed(r, c, bits=8, size=32)),
    "ct-w4-tensor": (CT | {"format": "pack-quantized"}, lambda r, c: packed(r, c, size=c, one=True)),
    "ct-w8a8": (CT | {"format": "int-quantized"}, int8),
    "ct-w8-tensor": (CT | {"format": "int-quantized"}, lambda r, c: int8(r, c, each_row=False)),
    "ct-fp8-rows": (CT | {"format": "float-quantized"}, fp8_rows),
    "ct-fp8-tensor": (CT | {"format": "float-quantized"}, fp8_tensor),
    "ct-nvfp4": (CT | {"format": "nvfp4-pack-quantized"}, nvfp4),
    "ct-mxfp4": (CT | {"format": "mxfp4-pack-quantized"}, mxfp4),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq),
    "gptq-act-order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda r, c: gptq(r, c, order=True)),
    "gptq-v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda r, c: gptq(r, c, added=0)),
    **{f"gptq-{n}": ({"quant_method": "gptq", "bits": n}, partial(gptq, bits=n, order=True)) for n in (2, 3, 8)},
    "bnb-nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bnb4),
    "bnb-nf4-nested": ({"load_in_4bit": True}, lambda r, c: bnb4(r, c, nested=True)),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb8),
}


def write_quantized(folder: Path, case: str) -> dict[str, np.ndarray]:
    """Write a checkpoint with some quantized weights; returns what they mean."""
    write_checkpoint(folder)
    config, make = CASES[case]
    tensors, meant = [], {}
    for name, array in make_weights(CONFIG).items():
        module = name.removesuffix(".weight")
        if module not in NAMES:
            tensors.append((name, "F32", array))
            continue
        parts, meant[name] = make(*array.shape)
        tensors += [(f"{module}.{suffix}", dtype, values) for suffix, dtype, values in parts]
    write_safetensors(folder / "model.safetensors", tensors)
    edit_json(folder / "config.json", quantization_config=config)
    return meant


PLACES = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down"}  # fmt: skip


def expected_rows(name: str, meant: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the GGUF name, and the rows in its order: queries rotate pairs there."""
    _, _, layer, *part, _ = name.split(".")
    place = PLACES[".".join(part)]
    if place == "attn_q":
        meant = meant.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(meant.shape)
    return f"blk.{layer}.{place}.weight", meant


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_opened_weights_equal_the_packed_ones(tmp_path: Path, case: str):
    meant = write_quantized(tmp_path / "model", case)
    tensors = {tensor.name: tensor for tensor in open_folder(tmp_path / "model").tensors}
    for name, weights in meant.items():
        place, rows = expected_rows(name, weights)
        tensor = tensors[place]
        assert tensor.shape == rows.shape and tensor.format.name == "F32"
        for first, last in ((0, len(rows)), (3, 11), (len(rows) - 1, len(rows))):
            decoded = as_float32(tensor.read_rows(first, last), "F32")
            assert np.allclose(decoded, rows[first:last], rtol=1e-6, atol=1e-9), place


@pytest.mark.sampled
@pytest.mark.parametrize("case", ["fp8-blocks", "awq", "gptq-act-order", "ct-w4a16", "bnb-nf4-nested"])
def test_quantized_checkpoints_convert_and_run_by_command(tmp_path: Path, cli, case: str):
    write_quantized(tmp_path / "model", case)
    code, _, err = cli("quantize", tmp_path / "model", tmp_path / "out.gguf", "Q8_0")
    assert code == 0, err
    assert cli("run", tmp_path / "out.gguf", "-p", "Hi", "-n", "1")[0] == 0


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "format"), [("ct-w4a16", "Q4_0"), ("ct-mxfp4", "MXFP4")])
def test_codes_are_kept_where_a_format_has_the_same(tmp_path: Path, cli, monkeypatch, case: str, format: str):
    """Expect no second rounding: Q4_0 has 4-bit numbers with a float16 scale for 32, MXFP4 the same blocks."""
    if case == "ct-w4a16":
        monkeypatch.setitem(CASES, case, (CASES[case][0], lambda r, c: packed(r, c, size=32)))
    meant = write_quantized(tmp_path / "model", case)
    assert cli("quantize", tmp_path / "model", tmp_path / "out.gguf", format, "--pure")[0] == 0
    from localllm.files.gguf.file import GGUFFile
    from localllm.kernels.reference import dequantize

    converted = GGUFFile.open(tmp_path / "out.gguf").tensors
    for name, weights in meant.items():
        place, rows = expected_rows(name, weights)
        assert np.array_equal(dequantize(converted[place]), rows.astype(np.float32)), place


BROKEN = {
    "a scale of another shape": ("fp8-blocks", "weight_scale_inv", "does not match"),
    "no zero points": ("awq", "qzeros", " is missing"),
    "no state": ("bnb-nf4", "weight.absmax", " is missing"),
    "no scales": ("gptq", "scales", " is missing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_quantized_checkpoint_is_refused(tmp_path: Path, monkeypatch, name: str):
    case, suffix, message = BROKEN[name]
    config, make = CASES[case]

    def broken(rows: int, columns: int) -> Packed:
        parts, meant = make(rows, columns)
        if message == "does not match":
            return [(s, d, v[:1, :1].repeat(9, 0) if s == suffix else v) for s, d, v in parts], meant
        return [part for part in parts if part[0] != suffix], meant

    monkeypatch.setitem(CASES, case, (config, broken))
    write_quantized(tmp_path / "model", case)
    with pytest.raises(ModelError, match=message):
        open_folder(tmp_path / "model")


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "quip"}, r"quantized \(quip\), which is not supported"),
    ({"quant_method": "gptq", "bits": 5}, "bits \\(found 5\\)"),
    ({"quant_method": "awq", "version": "gemv"}, "version gemv"),
])  # fmt: skip
def test_unknown_quantization_methods_are_refused(tmp_path: Path, config: dict, message: str):
    edit_json(write_checkpoint(tmp_path / "model") / "config.json", quantization_config=config)
    with pytest.raises(ModelError, match=message):
        open_folder(tmp_path / "model")


def test_eight_bit_floats_decode_as_specified():
    """Check the largest, smallest and special ones (OCP 8-bit Floating Point Specification 1.0, table 1)."""
    e4m3, e5m2, e8m0 = (FLOATS_OF_8_BITS[name] for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0"))
    assert (e4m3[0x7E], e4m3[0x01], e4m3[0x38], e4m3[0xB8]) == (448, 2.0**-9, 1, -1) and np.isnan(
        e4m3[[0x7F, 0xFF]]
    ).all()
    assert (e5m2[0x7B], e5m2[0x01], e5m2[0x3C], e5m2[0x7C]) == (57344, 2.0**-16, 1, np.inf) and np.isnan(e5m2[0x7D])
    assert (e8m0[127], e8m0[0], e8m0[254]) == (1, 2.0**-127, 2.0**127) and np.isnan(e8m0[255])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_numbers_unpack_to_themselves(bits: int):
    numbers = RANDOM.integers(0, 1 << bits, (5, 64))
    assert np.array_equal(unpack_stream(stream(numbers, bits), bits), numbers)
    if 32 % bits == 0:
        assert np.array_equal(unpack_words(words(numbers, bits), bits), numbers)


def with_8_bits(folder: Path, **config: object) -> Path:
    """Write a checkpoint whose projections are FP8 numbers without scales."""
    folder = write_checkpoint(folder, config)
    tensors = [("F8_E4M3" if "proj" in name else "F32", name, array) for name, array in make_weights(CONFIG).items()]
    random = np.random.default_rng(1)
    write_safetensors(folder / "model.safetensors", [
        (name, dtype, random.integers(0, 0x7E, array.shape, np.uint8) if dtype != "F32" else array)
        for dtype, name, array in tensors
    ])  # fmt: skip
    return folder


def test_weights_cast_to_8_bits_are_read_as_numbers(tmp_path: Path):
    tensors = {tensor.name: tensor for tensor in open_folder(with_8_bits(tmp_path)).tensors}
    rows = tensors["blk.0.ffn_up.weight"].read_rows(0, 96).view(np.float32)
    random = np.random.default_rng(1)
    codes = {name: random.integers(0, 0x7E, array.shape, np.uint8)
             for name, array in make_weights(CONFIG).items() if "proj" in name}  # fmt: skip
    np.testing.assert_array_equal(rows, fp8(codes["model.layers.0.mlp.up_proj.weight"]).astype(np.float32))


def test_a_missing_scale_is_named(tmp_path: Path):
    folder = with_8_bits(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ModelError, match=r"F8_E4M3 tensor .*_proj\.weight must have a scale"):
        open_folder(folder)
