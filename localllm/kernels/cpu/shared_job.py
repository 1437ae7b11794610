"""The memory that Python and the kernels share: offsets of the fields of a job and of a step.

This module does not import Numba.
"""

from typing import NamedTuple

from localllm.kernels.table import declare_arguments
from localllm.system.cpu import CACHE_LINE

WORDS = CACHE_LINE // 8  # of 64 bits in a line


class JobField(NamedTuple):
    """Indices of the fields of a job, int64 [JOB_WORDS].

    Fields that different threads write are in different cache lines.
    """

    run: int = 0  # the id of the run: odd during the run, even after it
    tape: int = 1  # address of the steps
    steps: int = 2  # number of steps
    cells: int = 3  # address of the steps' claim cells (tape_runner.py), LINE bytes each
    done: int = WORDS  # parts done in this run
    sleepers: int = 2 * WORDS  # threads that sleep or are about to
    stop: int = 2 * WORDS + 1  # 1: threads must end
    # Addresses of the operating system's functions, from localllm.system.processes.
    offer: int = 3 * WORDS
    lock: int = 3 * WORDS + 1
    unlock: int = 3 * WORDS + 2
    wait: int = 3 * WORDS + 3
    wake: int = 3 * WORDS + 4
    run_mutex: int = 4 * WORDS  # a mutex, at most 64 bytes: held by the caller during its run
    sleep_mutex: int = 5 * WORDS  # a mutex: held to go to sleep and to wake sleeping threads
    wake_condition: int = 6 * WORDS  # a condition variable, at most 64 bytes, on which threads sleep


JOB = JobField()
JOB_WORDS = 7 * WORDS

# A step of the tape. kernel, arguments: addresses; parts: the number of parts; count: address of a count that limits
# the parts further, or 0; stage: 1 if a stage begins with this step.
STEP = declare_arguments("kernel arguments parts count stage")
