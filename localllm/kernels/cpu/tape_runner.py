"""The loop in which threads execute a tape together.

A tape is an array of steps. A step's work is divided into parts; threads claim parts one by one, in order, and a thread
that finds none left continues with the next step. Steps are grouped in stages: all parts of a stage are done before a
part of the next one starts. No part waits for a *thread*: a thread that the operating system preempts between two parts
delays no other, and skips the finished steps when it resumes. (A barrier that counts threads loses half of its speed or
more when another program is busy; so do fixed shares per thread.) A thread that is preempted *within* a part does delay
the others, for a time slice of 3 or 4 ms. Therefore threads yield their CPU between parts after a shorter time
(`slice_cycles`), which costs nothing if no other program needs it.

A step's claim cell, one cache line, packs the id of the run (32 bits, which wrap), the number of parts (16 bits) and
the next part (16 bits). A late thread of an earlier run sees a newer id in the cell and leaves. It also leaves when the
job's run id has become even, which ends the run. From then on Python may change the counts that the tape reads. A part
count that the thread derived from them may be stale, so it must not wait for those parts.

A run is one call from Python, from the first part to the last. No exception can interrupt it, not even Ctrl-C.
"""

from localllm.kernels import simd
from localllm.kernels.cpu.shared_job import JOB, STEP
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.system.cpu import CACHE_LINE

STEP_BYTES = 8 * len(STEP)
SPINS = 2000  # iterations before a waiting thread starts to yield: about 40 us
IDLE_YIELDS = 2000  # yields before a thread without work goes to sleep: about 1 ms


@device
def get_field(job, place):
    return job + place * 8


@device
def yield_cpu(job):
    simd.call_address(load_argument(job, JOB.offer))


@device
def call_system(job, function, x, y):
    """Call a function of the operating system with arguments x, y, -1, 0; it ignores surplus ones.

    Windows' wait function takes all four: the last two are the timeout (-1: none) and the mode of the mutex.
    """
    simd.call_kernel(load_argument(job, function), x, y, -1, 0)


@device
def claim(cell, run, parts):
    """Claim the next part of a step; return its index, -1 if none is left, or -2 if this run is over."""
    while True:
        packed = simd.atomic_load(cell)
        ahead = ((packed >> 32) - run) << 32  # of 64 bits only the sign counts
        if ahead > 0:
            return -2
        if ahead < 0:
            if simd.atomic_replace(cell, packed, (run << 32) | (parts << 16) | 1):
                return 0
        else:
            part = packed & 0xFFFF
            if part >= (packed >> 16) & 0xFFFF:
                return -1
            if simd.atomic_replace(cell, packed, packed + 1):
                return part


@device
def wait_for_parts(job, run, parts):
    """Wait until `parts` parts of this run are done; return False if the run ends before."""
    spins = 0
    while simd.atomic_load(get_field(job, JOB.done)) < parts:
        if simd.atomic_load(get_field(job, JOB.run)) != run:
            return False
        spins += 1
        if spins < SPINS:
            simd.cpu_pause()
        else:
            yield_cpu(job)
    return simd.atomic_load(get_field(job, JOB.run)) == run


@device
def count_parts(step):
    """Return the number of parts into which a step is divided.

    There is at least one, because every run writes its id to the step's claim cell.
    """
    parts, count = load_argument(step, STEP.parts), load_argument(step, STEP.count)
    if count != 0:
        parts = max(min(parts, simd.load_i64(count)), 1)
    return parts


@device
def run_parts(job, run, thread):
    """Execute a thread's share of the run `run`: claim and call parts, step by step."""
    tape, steps, cells = load_argument(job, JOB.tape), load_argument(job, JOB.steps), load_argument(job, JOB.cells)
    before_stage, before_step, since = 0, 0, simd.cycles()
    for i in range(steps):
        step = tape + i * STEP_BYTES
        if load_argument(step, STEP.stage) == 1:
            before_stage = before_step
            if not wait_for_parts(job, run, before_stage):
                return
        parts = count_parts(step)
        before_step += parts
        while True:
            part = claim(cells + i * CACHE_LINE, run, parts)
            if part == -2:
                return
            if part < 0:
                break
            simd.call_kernel(load_argument(step, STEP.kernel), load_argument(step, STEP.arguments), part, parts, thread)
            simd.atomic_add(get_field(job, JOB.done), 1)
            if simd.cycles() - since > simd.slice_cycles():
                yield_cpu(job)
                since = simd.cycles()
    wait_for_parts(job, run, before_step)


@device
def sleep(job, number):
    """Sleep until another run than `number` starts, or until threads must end."""
    call_system(job, JOB.lock, get_field(job, JOB.sleep_mutex), 0)
    simd.atomic_add(get_field(job, JOB.sleepers), 1)
    while simd.atomic_load(get_field(job, JOB.run)) == number and simd.atomic_load(get_field(job, JOB.stop)) == 0:
        call_system(job, JOB.wait, get_field(job, JOB.wake_condition), get_field(job, JOB.sleep_mutex))
    simd.atomic_add(get_field(job, JOB.sleepers), -1)
    call_system(job, JOB.unlock, get_field(job, JOB.sleep_mutex), 0)


@device
def wake_sleepers(job):
    """Wake sleeping threads after a change of `run` or `stop`.

    A thread that is about to sleep checks both fields once more.
    """
    if simd.atomic_load(get_field(job, JOB.sleepers)) > 0:
        call_system(job, JOB.lock, get_field(job, JOB.sleep_mutex), 0)
        call_system(job, JOB.wake, get_field(job, JOB.wake_condition), 0)
        call_system(job, JOB.unlock, get_field(job, JOB.sleep_mutex), 0)


@kernel
def run(job, stop, _, __):
    """Start the next run, take part as thread 0, and return when it is done.

    stop 1: end the other threads instead. Concurrent callers are serialized.
    """
    call_system(job, JOB.lock, get_field(job, JOB.run_mutex), 0)
    if stop == 1:
        simd.atomic_store(get_field(job, JOB.stop), 1)
        wake_sleepers(job)
    else:
        number = simd.atomic_load(get_field(job, JOB.run)) + 1
        simd.atomic_store(get_field(job, JOB.done), 0)
        simd.atomic_store(get_field(job, JOB.run), number)
        wake_sleepers(job)
        run_parts(job, number, 0)
        simd.atomic_store(get_field(job, JOB.run), number + 1)
    call_system(job, JOB.unlock, get_field(job, JOB.run_mutex), 0)


@kernel
def work(job, thread, _, __):
    """Take part in every run until the job stops; sleep when there has been no run for a while."""
    idle, last = 0, 0
    while simd.atomic_load(get_field(job, JOB.stop)) == 0:
        number = simd.atomic_load(get_field(job, JOB.run))
        if number != last and number & 1:
            run_parts(job, number, thread)
            last, idle = number, 0
        elif idle < SPINS:
            simd.cpu_pause()
        elif idle < SPINS + IDLE_YIELDS:
            yield_cpu(job)
        else:
            sleep(job, number)
            idle = 0
        idle += 1
