"""What Python and the threads' kernels share: places in a job and in a step, by name. Nothing here knows Numba."""

from typing import NamedTuple

from localllm.kernels.arguments import arguments

LINE = 64  # bytes of a cache line: two threads that write to the same one slow each other down


class Job(NamedTuple):
    """Places in a job, int64 [JOB_WORDS]. Each line of the cache has its own writers."""

    run: int = 0  # the number of the run: odd while it is going on, even when it is done
    tape: int = 1  # address of the steps
    steps: int = 2  # how many
    cells: int = 3  # address of the steps' claim cells, LINE bytes each
    done: int = 8  # parts done in this run
    sleepers: int = 16  # threads that sleep, or are about to
    stop: int = 17  # 1: the threads shall end
    # Addresses of the operating system's sched_yield, pthread_mutex_lock and _unlock, pthread_cond_wait and _broadcast.
    offer: int = 24
    lock: int = 25
    unlock: int = 26
    wait: int = 27
    wake: int = 28
    turn: int = 32  # a mutex, of which Linux needs 48 bytes and macOS 64: held by the caller whose run it is
    bed: int = 40  # a mutex: held to go to sleep and to wake the sleepers
    bell: int = 48  # a condition variable of the same size, on which they sleep


JOB = Job()
JOB_WORDS = 56

# A step of the tape: addresses of kernel and arguments, most parts, address of a count that limits the parts (0: none),
# 1 if a stage begins here.
STEP = arguments("kernel arguments parts count stage")
