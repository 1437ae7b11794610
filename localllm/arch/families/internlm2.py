"""InternLM 2 and 3 (Cai et al. 2024, arXiv 2403.17297): like llama, except for the names in their checkpoints."""

from localllm.arch.families.llama import forward, read

__all__ = ["forward", "read"]
