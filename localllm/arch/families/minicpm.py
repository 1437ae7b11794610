"""MiniCPM 1, 2 and 4 (Hu et al. 2024, arXiv 2404.06395): like Granite, but older files lack the factors."""

from localllm.arch.families.granite import GraniteHyperparameters, forward
from localllm.arch.family import HyperparameterReader

__all__ = ["forward", "read"]


def read(fields: HyperparameterReader) -> GraniteHyperparameters:
    """Read the hyperparameters, with llama.cpp's defaults. Raises ModelError."""
    if experts := fields.read_count("expert_count", 0):
        raise fields.make_unsupported_error(f"{fields.format_key('expert_count')} must be 0 (found {experts})")
    shared = GraniteHyperparameters.read_shared_fields(fields, interleaved=True)
    return GraniteHyperparameters(
        **shared,
        embedding_scale=fields.read_number("embedding_scale", 12.0) or 1.0,
        residual_scale=fields.read_number("residual_scale", 1.4 / shared["layers"] ** 0.5) or 1.0,
        score_scale=shared["attention"].head_dim ** -0.5,
        logit_scale=fields.read_factor("logit_scale", 256 / shared["width"]),
        rotated=True,
        has_shared=False,
    )


CHECKPOINTS = {
    "MiniCPMForCausalLM": {
        "layer": "attention gated norms", "rotated": True, "scalings": "longrope", "read": "@llama.read_minicpm",
        "defaults": {"tie_word_embeddings": True},
    },
}  # fmt: skip
