"""Apertus."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.tensors import as_float32
from localllm.convert.weights import Stored
from localllm.errors import ModelError

ROPE_OF_APERTUS = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read Apertus, which scales RoPE where config.json says nothing."""
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        config = config.updated(rope_parameters=ROPE_OF_APERTUS)
    return declared(config)


OF_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def xielu(stored: Mapping[str, Stored], h: CheckpointFacts) -> dict[str, object]:
    """Read the activation's parameters as metadata. Raises ModelError."""
    numbers: dict[str, list[float]] = {name: [] for name in OF_XIELU}
    for number in range(h.sizes["layers"]):
        for name, values in numbers.items():
            tensor = stored.get(f"model.layers.{number}.mlp.act_fn.{name}")
            if tensor is None or tensor.shape not in ((), (1,)):
                raise ModelError(f"there is no {name} of the activation of layer {number}")
            values.append(float(as_float32(replace(tensor, shape=(1,)).rows(0, 1), tensor.dtype)[0, 0]))
    return {f"xielu.{name}": values for name, values in numbers.items()}
