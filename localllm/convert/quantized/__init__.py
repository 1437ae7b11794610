"""Read checkpoints with quantized weights as if they were float32.

`open_quantized` replaces the tensors of a quantization method (X.qweight, X.scales, ...) by X.weight, whose rows are
dequantized when they are read. Other tensors stay unchanged.
"""

from collections.abc import Callable, Mapping

from localllm.convert.config import CheckpointConfig
from localllm.convert.quantized import bitsandbytes, compressed_tensors, fp8, packed_columns
from localllm.convert.quantized.unpacking import TensorCollection
from localllm.convert.safetensors_files import StoredTensor
from localllm.errors import ModelError
from localllm.files.gguf.header import printable

# By quant_method: a function that replaces the method's tensors in a mapping by name.
METHODS: dict[str, Callable[[TensorCollection, CheckpointConfig], TensorCollection]] = {
    "awq": packed_columns.open_awq,
    "bitsandbytes": bitsandbytes.open_bitsandbytes,
    "compressed-tensors": compressed_tensors.open_compressed_tensors,
    "fbgemm_fp8": fp8.open_fp8,
    "fp8": fp8.open_fp8,
    "gptq": packed_columns.open_gptq,
    "modelopt": fp8.open_fp8,
}


def read_method(config: CheckpointConfig) -> str:
    """Return the quantization method that config.json declares, or ""."""
    method = config.get("quantization_config") or config.get("compression_config")
    if isinstance(method, dict):
        is_bitsandbytes = method.get("load_in_4bit") or method.get("load_in_8bit")
        return str(method.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else method))
    return str(method) if method else ""


def require_method(config: CheckpointConfig) -> str:
    """Return the quantization method, or "". Raises ModelError if it is not supported."""
    name = read_method(config)
    if name and name not in METHODS:
        supported = ", ".join(METHODS)
        raise config.make_error(
            f"the weights are quantized ({printable(name)}), which is not supported ({supported} are)"
        )
    return name


def open_quantized(stored: Mapping[str, StoredTensor], config: CheckpointConfig) -> Mapping[str, StoredTensor]:
    """Replace quantized tensors by dequantized ones. Raises ModelError for an unknown method or setting."""
    name = require_method(config)
    if not name:
        return fp8.open_unscaled(TensorCollection(stored)).remaining
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    tensors = METHODS[name](TensorCollection(stored), config.get_section(key))
    for each in tensors.remaining.values():
        if each.dtype in fp8.EIGHT_BITS:
            raise ModelError(f"{each.path}: the {each.dtype} tensor {printable(each.name)} must have a scale")
    return tensors.remaining
