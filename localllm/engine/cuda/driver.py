"""Detect a GPU driver, the only check on machines without one."""

from localllm.system.processes import library


def has_driver() -> bool:
    """Tell whether NVIDIA's driver is there; takes 0.1 ms where it is not."""
    try:
        library("libcuda.so.1", "nvcuda.dll")
    except OSError:
        return False
    return True
