"""InternLM 2."""

from localllm.convert.config import Config
from localllm.convert.families.fused_qkv import IN_GROUPS, with_fused_rows
from localllm.convert.family import Family
from localllm.convert.hyperparameters import CheckpointFacts, decoder
from localllm.convert.layers import (
    ATTENTION,
    GATED,
    NORMS_BEFORE,
)


def internlm2(config: Config) -> CheckpointFacts:
    """Read InternLM 2: a group's rows are its queries, a key and a value."""
    config.only("bias", False)
    return with_fused_rows(decoder(config.updated(head_dim=None)))


INTERNLM2 = Family(
    "internlm2",
    {**IN_GROUPS, "attn_output": ATTENTION["attn_output"], **GATED, **NORMS_BEFORE},
    internlm2,
    defaults={"rms_norm_eps": 1e-6},
)
