"""Read the files of a PEFT folder: adapter_config.json and adapter_model.safetensors.

Sources: https://huggingface.co/docs/peft (LoraConfig); rank-stabilized factors: Kalajdzievski 2023, arXiv 2312.03732;
magnitudes (DoRA): Liu et al. 2024, arXiv 2402.09353.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.convert.files import read_json
from localllm.convert.safetensors_files import StoredTensor, read_header
from localllm.convert.transforms import as_float32
from localllm.errors import ModelError, UnsupportedError
from localllm.files.gguf.header import printable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = r"(?:base_model\.model\.)?"
MATRIX = re.compile(rf"{PREFIX}(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
MAGNITUDE = re.compile(rf"{PREFIX}(.+)\.lora_magnitude_vector(?:\.weight)?")
# The base model's own matrix, which PEFT saves beside the pair of an embedding or an output matrix.
BASE_COPY = re.compile(rf"{PREFIX}(.+)\.base_layer\.(?:weight|bias)")
EMBEDDING = ".lora_embedding_"
# Parameters of a module with the matrices of all experts, in the order in which PEFT wraps them.
STACKS = ("gate_up_proj", "down_proj")
# Kinds of adapters that are not supported, by the key of the settings that selects them.
UNSUPPORTED = {
    "lora_bias": "biases (lora_bias)", "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)", "use_qalora": "QA-LoRA (use_qalora)",
    "layer_replication": "repeated layers (layer_replication)", "use_bdlora": "BD-LoRA (use_bdlora)",
    "arrow_config": "routing between adapters (arrow_config)", "kasa_config": "KaSA (kasa_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
}  # fmt: skip
# Beginnings that change the base model, too: what is saved fits the changed one only.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class LoraPair(NamedTuple):
    """The matrices A and B that an adapter has for one matrix of the checkpoint.

    Attributes:
        a: float32 [rank, columns].  b: float32 [rows, rank].  factor: multiplier of their product.
        magnitude: of each row, or of each column if `of_columns`, float32; None without DoRA.
    """

    a: np.ndarray
    b: np.ndarray
    factor: float
    magnitude: np.ndarray | None = None
    of_columns: bool = False


def read_folder(path: Path) -> tuple[Mapping[str, Any], dict[str, LoraPair]]:
    """Read the settings of an adapter, and its pairs by the names of the checkpoint's tensors.

    Raises ModelError for an invalid folder, UnsupportedError for features that localllm lacks.
    """
    settings = read_json(path / CONFIG)
    if settings is None:
        raise ModelError(f"{path}: {CONFIG} is missing: expected a GGUF file or a folder that PEFT has saved")
    refuse_unsupported(path, settings)
    return settings, read_pairs(path, settings)


def refuse_unsupported(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless the adapter is LoRA and changes only matrices."""
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: adapters of type {printable(str(kind), 20)} are not supported, only LORA")
    for key, name in UNSUPPORTED.items():
        if settings.get(key):
            raise UnsupportedError(f"{path}: adapters with {name} are not supported: merge it with PEFT first")
    if settings.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: adapters with trained biases (bias) are not supported: merge it with PEFT")
    beginning = settings.get("init_lora_weights")
    if isinstance(beginning, str) and beginning.lower().startswith(CHANGES_BASE):
        raise UnsupportedError(
            f"{path}: init_lora_weights {printable(beginning, 20)} has changed the base model: save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )


def read_pairs(path: Path, settings: Mapping[str, Any]) -> dict[str, LoraPair]:
    """Read all pairs, by the names of the checkpoint's tensors. Raises ModelError."""
    if not (path / WEIGHTS).is_file():
        raise ModelError(f"{path}: {WEIGHTS} is missing; save the adapter as safetensors: pickles (.bin) are not read")
    sides, magnitudes, embeddings = read_tensors(path / WEIGHTS)
    if bool(settings.get("use_dora")) != bool(magnitudes):
        raise ModelError(f"{path}: use_dora of {CONFIG} and the tensors of {WEIGHTS} contradict each other")
    pairs = dict[str, LoraPair]()
    for module, matrices in sides.items():
        if len(matrices) < 2 or matrices["A"].shape[0] != matrices["B"].shape[1]:
            raise ModelError(f"{path / WEIGHTS}: the matrices of {printable(module)} are not a pair")
        a, b = matrices["A"], matrices["B"]
        owner = module.split(".base_layer", 1)[0]
        if parameters := list_parameters(settings, owner):
            depth = module.count(".base_layer")
            parameter = parameters[-1 - depth] if depth < len(parameters) else ""
            pairs.update(split_experts(path, settings, f"{owner}.{parameter}", a, b))
            continue
        magnitude, is_transposed = magnitudes.get(module), module in embeddings or bool(settings.get("fan_in_fan_out"))
        if magnitudes and (magnitude is None or len(magnitude) != b.shape[0]):
            raise ModelError(f"{path / WEIGHTS}: {printable(module)} has no magnitudes for its {b.shape[0]} outputs")
        if is_transposed:  # the weight is the transposed product
            a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
        factor = compute_factor(settings, module, a.shape[0])
        pairs[f"{module}.weight"] = LoraPair(a, b, factor, magnitude, is_transposed)
    if not pairs:
        raise ModelError(f"{path / WEIGHTS}: the file must have at least one pair of matrices")
    return pairs


def read_tensors(path: Path) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray], set[str]]:
    """Read the tensors of a file, sorted by what PEFT uses them for. Raises ModelError.

    Returns A and B by module, magnitudes by module, and the modules that are embeddings.
    """
    sides, magnitudes = dict[str, dict[str, np.ndarray]](), dict[str, np.ndarray]()
    embeddings, copies = set[str](), dict[str, str]()
    for name, stored in read_header(path).items():
        if match := MATRIX.fullmatch(name):
            sides.setdefault(match[1], {})[match[2]] = read_floats(stored, 2)
            if EMBEDDING in name:
                embeddings.add(match[1])
        elif match := MAGNITUDE.fullmatch(name):
            magnitudes[match[1]] = read_floats(stored, 1).reshape(-1)
        elif match := BASE_COPY.fullmatch(name):
            copies[match[1]] = name
        else:
            raise UnsupportedError(f"{path}: tensor {printable(name)} is not a low-rank matrix: not supported")
    if alone := sorted((copies.keys() | magnitudes.keys()) - sides.keys()):
        raise ModelError(f"{path}: has no low-rank matrices for {printable(alone[0])}")
    return sides, magnitudes, embeddings


def read_floats(stored: StoredTensor, dimensions: int) -> np.ndarray:
    """Read a vector (dimensions = 1) or a matrix (2) as float32. Raises ModelError."""
    if len(stored.shape) != dimensions or stored.dtype not in ("F64", "F32", "F16", "BF16"):
        what = "a matrix" if dimensions == 2 else "a vector"
        shape = f"{printable(stored.dtype)} {list(stored.shape)}"
        raise ModelError(f"{stored.path}: tensor {printable(stored.name)} must be {what} of floats (found {shape})")
    return as_float32(stored.read_rows(0, stored.shape[0] if dimensions == 2 else 1), stored.dtype)


def list_parameters(settings: Mapping[str, Any], module: str) -> list[str]:
    """List a module's parameters that have adapters of their own, in the order in which PEFT wraps them.

    Leaves out `weight` (of a router), whose pair looks like that of a linear layer.
    """
    targets, names = settings.get("target_parameters") or [], set[str]()
    for target in targets if isinstance(targets, list) else ():
        owner, _, name = str(target).rpartition(".")
        if f".{module}".endswith(f".{owner}") if owner else module.endswith(".experts"):
            names.add(name)
    return sorted(names - {"weight"}, key=lambda name: (STACKS.index(name) if name in STACKS else -1, name))


def split_experts(
    path: Path, settings: Mapping[str, Any], parameter: str, a: np.ndarray, b: np.ndarray
) -> Iterator[tuple[str, LoraPair]]:
    """Yield the pair of each expert from the pair of a parameter that stacks all experts.

    a: [experts * rank, columns]. b: [rows, rank * experts], columns ordered by rank, then by expert. Raises
    UnsupportedError for other parameters, ModelError for a rank that does not divide.
    """
    module, _, name = parameter.rpartition(".")
    if name not in STACKS or not module.endswith(".experts"):
        raise UnsupportedError(f"{path}: adapters of {printable(parameter)} (target_parameters) are not supported")
    rank = match_pattern(settings.get("rank_pattern"), parameter, settings.get("r"))
    if type(rank) is not int or rank < 1 or a.shape[0] % rank:
        raise ModelError(f"{path}: r must divide {a.shape[0]}, the ranks of {printable(parameter)} together")
    factor, count = compute_factor(settings, parameter, rank), a.shape[0] // rank
    each_a, each_b = a.reshape(count, rank, -1), b.reshape(len(b), rank, count).transpose(2, 0, 1)
    half = len(b) // 2
    rows = (
        {"down_proj": slice(None)} if name == "down_proj" else {"gate_proj": slice(half), "up_proj": slice(half, None)}
    )
    for expert in range(count):
        for matrix, some in rows.items():
            pair = LoraPair(each_a[expert], np.ascontiguousarray(each_b[expert][some]), factor)
            yield f"{module}.{expert}.{matrix}.weight", pair


def match_pattern(patterns: object, module: str, default: object) -> object:
    """Return the value whose pattern matches a module first, or the default."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error:
            continue
    return default


def compute_factor(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) with use_rslora. Raises ModelError.

    alpha_pattern may set another alpha for the module.
    """
    alpha = match_pattern(settings.get("alpha_pattern"), module, settings.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{CONFIG}: lora_alpha must be a number (found {printable(repr(alpha), 40)})")
    return float(alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank))
