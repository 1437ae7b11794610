"""InternLM 2 and 3 (Cai et al. 2024, arXiv 2403.17297): llama, but for the names in its checkpoints."""

from localllm.arch.families.llama import forward, read

__all__ = ["forward", "read"]
