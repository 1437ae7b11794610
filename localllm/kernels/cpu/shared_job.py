"""The memory that Python and the threads' kernels share: fields of a job and of a step, by name.

This module does not import Numba.
"""

from typing import NamedTuple

from localllm.kernels.arguments import arguments
from localllm.system.cpu import LINE

WORDS = LINE // 8  # of 64 bits in a line


class Job(NamedTuple):
    """Places in a job, int64 [JOB_WORDS]. Each line of the cache has its own writers."""

    run: int = 0  # the number of the run: odd while it is going on, even when it is done
    tape: int = 1  # address of the steps
    steps: int = 2  # how many
    cells: int = 3  # address of the steps' claim cells, LINE bytes each
    done: int = WORDS  # parts done in this run
    sleepers: int = 2 * WORDS  # threads that sleep, or are about to
    stop: int = 2 * WORDS + 1  # 1: the threads shall end
    # Addresses of the operating system's functions, as localllm.system.processes has them.
    offer: int = 3 * WORDS
    lock: int = 3 * WORDS + 1
    unlock: int = 3 * WORDS + 2
    wait: int = 3 * WORDS + 3
    wake: int = 3 * WORDS + 4
    run_mutex: int = 4 * WORDS  # a mutex, which needs at most 64 bytes: held by the caller whose run it is
    sleep_mutex: int = 5 * WORDS  # a mutex: held to go to sleep and to wake the sleepers
    wake_condition: int = 6 * WORDS  # a condition variable of the same size, on which they sleep


JOB = Job()
JOB_WORDS = 7 * WORDS

# A step of the tape: addresses of kernel and arguments, most parts, address of a count that limits the parts (0: none),
# 1 if a stage begins here.
STEP = arguments("kernel arguments parts count stage")
