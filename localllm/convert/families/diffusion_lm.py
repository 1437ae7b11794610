"""Diffusion models: LLaDA, with experts and without, and Dream."""

from collections.abc import Callable, Mapping

from localllm.convert.config import Config
from localllm.convert.hyperparameters import CheckpointFacts
from localllm.convert.weights import Stored

USUAL = 156895  # mask token of LLaDA with experts, missing in its config.json


def read(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    """Read the mask token, too."""
    return add_mask_token(config, declared(config))


def moe(config: Config, declared: Callable[[Config], CheckpointFacts]) -> CheckpointFacts:
    return add_mask_token(config, declared(config), USUAL)


def add_mask_token(config: Config, h: CheckpointFacts, usual: int = 0) -> CheckpointFacts:
    """Add the mask token's id; usual: the default."""
    mask = config.count("mask_token_id", usual) if config.get("mask_token_id") is not None else usual
    return h.updated({"mask": mask}, attention__causal=False)


def of_mask(stored: Mapping[str, Stored], h: CheckpointFacts) -> dict[str, object]:
    return {"tokenizer.ggml.mask_token_id": h.sizes["mask"]} if h.sizes["mask"] else {}
