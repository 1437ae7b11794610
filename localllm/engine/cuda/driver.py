"""Whether there is a graphics card's driver: all that is asked where there is none."""

from localllm.system.processes import library


def has_driver() -> bool:
    """Whether there is NVIDIA's; takes 0.1 ms where there is none."""
    try:
        library("libcuda.so.1", "nvcuda.dll")
    except OSError:
        return False
    return True
