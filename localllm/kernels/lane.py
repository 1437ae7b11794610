"""Which of a CPU's instructions multiply prompts."""

from localllm.kernels.target import cpu_features


def lane() -> str:
    """The lane in use here: amx-bf16, avx512-vnni, avx-vnni, avx2, ssse3, or portable."""
    features = cpu_features()
    if "amx-bf16" in features:
        from localllm.kernels.amx import has_tiles  # seldom needed

        if has_tiles():
            return "amx-bf16"
    if {"avx512vnni", "avx512bw"} <= features:
        return "avx512-vnni"
    names = {"avxvnni": "avx-vnni", "avx2": "avx2", "ssse3": "ssse3"}
    return next((name for feature, name in names.items() if feature in features), "portable")
