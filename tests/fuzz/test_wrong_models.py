"""Wrong models never answer: a golden model that lost a tensor, or whose numbers are damaged, is refused by name."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models import DECLARATIONS, MASKED

from localllm.engine.engine import Engine
from localllm.engine.options import EngineOptions
from localllm.errors import LocalllmError
from localllm.files.gguf.file import GGUFFile, Tensor

# What nobody can miss: without an output matrix the embedding is used; few models have factors for frequencies, and no
# hyperparameter says so; values may be keys in some layers of Gemma 4; one layer of this DeepSeek has a router at all.
MAY_BE_MISSING = {"output.weight", "rope_freqs.weight"}
MAY_BE_MISSING_IN = {("codeshell", "token_embd.weight"),
                     ("gemma4", "blk.0.attn_v.weight"), ("gemma4_shared", "blk.0.attn_v.weight"),
                     ("gemma4_experts", "blk.0.attn_v.weight"),
                     ("gemma4_values_are_keys", "blk.0.attn_v.weight"), ("lfm2moe", "blk.1.exp_probs_b.bias"),
                     ("deepseek2_v3", "blk.1.exp_probs_b.bias"),
                     ("ernie4_5_moe", "blk.1.exp_probs_b.bias"), ("dots1", "blk.1.exp_probs_b.bias"),
                     ("mistral4", "blk.1.exp_probs_b.bias"), ("deepseek32", "blk.1.exp_probs_b.bias"),
                     ("glm_dsa", "blk.1.exp_probs_b.bias")}  # fmt: skip

GUESSING = r"nextn\.(?!eh_proj)|layer_output_norm"  # of layers that guess further tokens, and are passed over

Damage = tuple[str, dict[str, Tensor]]  # what happened, and the tensors that are left


def refusal(file: GGUFFile) -> str | None:
    """Return why a model is not opened, or None if it is."""
    try:
        Engine(file, EngineOptions(threads=1, context=48, backend="reference")).close()
    except LocalllmError as error:
        return str(error)
    return None


def kinds(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one tensor of each kind: of layers, the first that has it."""
    first: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first.setdefault(re.sub(r"^blk\.\d+\.", "blk.N.", name), tensor)
    return {tensor.name: tensor for tensor in first.values()}


def damages(tensor: Tensor, tensors: dict[str, Tensor]) -> Iterator[Damage]:
    name, shape = tensor.name, tensor.shape
    others = {key: other for key, other in tensors.items() if key != name}
    yield "removed", others
    yield "renamed", others | {f"{name}x": replace(tensor, name=f"{name}x")}
    if len(shape) > 1 and shape[-1] != shape[-2]:
        turned = *shape[:-2], shape[-1], shape[-2]
        yield "transposed", tensors | {name: replace(tensor, shape=turned, data=tensor.data.reshape(*turned[:-1], -1))}
    if len(shape) == 1:
        data = np.concatenate([tensor.data] * 2)
        yield "twice as long", tensors | {name: replace(tensor, shape=(2 * shape[0],), data=data)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DECLARATIONS, *MASKED])
def test_damaged_tensors_are_refused_by_name(model_path, name):
    """Remove, rename or transpose each, or change its length; expect the tensor's name in the message."""
    file = GGUFFile.open(model_path(name))
    tensors = dict(file.tensors)
    assert refusal(file) is None
    for tensor in kinds({key: tensors[key] for key in tensors if not re.search(GUESSING, key)}).values():
        for damage, file.tensors in damages(tensor, tensors):
            optional = tensor.name in MAY_BE_MISSING or (name, tensor.name) in MAY_BE_MISSING_IN
            if not (damage == "removed" and optional):
                reason = refusal(file)
                assert reason is not None, f"{tensor.name} {damage}"
                named = tensor.name.rpartition(".")[0]
                for several in ("rope_factors", "ssm_b"):  # of which one is named
                    named = named[: named.index(several) + len(several)] if several in named else named
                assert named in reason, f"{tensor.name} {damage}: {reason}"


def wrong_values(value: Any) -> list[Any]:
    """Return values that no hyperparameter with such a value may have, whatever it means."""
    if isinstance(value, np.ndarray | list):
        return ["text", value[:-1]]
    if isinstance(value, str):
        return ["unheard-of", 7]
    if isinstance(value, bool):
        return ["text", 7]
    return ["text", -1, math.nan, math.inf] if isinstance(value, float) else ["text", -1, 2**31]


# Hyperparameters that llama.cpp does not read either, or that only mean something to other programs.
UNREAD = ("rope.scaling.yarn_", "tensor_data_layout", "rope.scaling.finetuned")
UNREAD_IN = {("mamba", "attention.head_count"), ("mamba2", "attention.head_count"),
             ("phi3", "attention.sliding_window"), ("phi3_longrope", "attention.sliding_window"),
             ("stablelm", "use_parallel_residual"), ("stablelm_12b", "use_parallel_residual")}  # fmt: skip


@pytest.mark.parametrize("name", [*DECLARATIONS, *MASKED])
def test_damaged_hyperparameters_are_refused_by_key(model_path, name):
    """Try wrong types, negative, too large ones and no numbers; expect the key, or the unknown value."""
    file = GGUFFile.open(model_path(name))
    metadata, prefix = dict(file.metadata), f"{file.metadata['general.architecture']}."
    for key, value in metadata.items():
        field = key.removeprefix(prefix)
        if not key.startswith(prefix) or field.startswith(UNREAD) or (name, field) in UNREAD_IN:
            continue
        for wrong in wrong_values(value):
            file.metadata = metadata | {key: wrong}
            reason = refusal(file)
            assert reason is not None, f"{key} = {wrong}"
            assert key in reason or f"rope scaling {wrong}" in reason, f"{key} = {wrong}: {reason}"
