"""The loop in which threads walk a tape together.

A tape is an array of steps. A step's work is cut into parts; threads claim parts one by one, in order, and a thread
that finds none left goes on. Steps are grouped in stages: all parts of a stage are done before a part of the next
starts. Nobody waits for a *thread*: a thread that the operating system has put aside between parts holds up no one, and
one that comes back late finds its steps taken and catches up. (A barrier that counts threads loses half of its speed
or more when another program is busy; so does giving each thread a fixed share.) A thread put aside *within* a part does
hold up the rest, for a time slice of 3 or 4 ms; so threads offer their processor after SLICE cycles, between parts,
which costs nothing if nobody wants it.

A step is 5 int64: kernel address, arguments address, most parts, address of a count that limits the parts (0: none),
1 if a stage begins here. A step's claim cell, one cache line, packs run number (32 bits), parts (16), next part (16):
a late thread of an earlier run sees a newer run number and leaves.

The job is int64[16]: 0 the run number, 1 tape, 2 steps, 3 claim cells, 8 parts done in this run, 12 threads that sleep
(bit i: thread i), 13 stop, 14 address of the operating system's yield function.
"""

from localllm.kernels.cpu.signature import device, kernel
from localllm.kernels.simd import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_address,
    call_kernel,
    cpu_pause,
    cycles,
    load_i64,
    store_i64,
)

STEP = 40  # bytes of a step
LINE = 64  # bytes between claim cells
SPINS = 2000  # looks before a waiting thread starts to yield: about 40 us
# Cycles that a thread runs before it offers its processor: 1 to 2 ms, less than a time slice. Beside a busy process,
# decode of a 1.2 B model keeps 0.65 of its speed with this and 0.57 without.
SLICE = 4_000_000
IDLE_YIELDS = 2000  # yields before a thread without work goes to sleep: about 1 ms


@device
def claim(cell, run, parts):
    """The next unclaimed part of a step; -1 if there is none left, -2 if this run is over."""
    while True:
        packed = atomic_load(cell)
        seen = packed >> 32
        if seen > run:
            return -2
        if seen < run:
            if atomic_replace(cell, packed, (run << 32) | (parts << 16) | 1):
                return 0
        else:
            part = packed & 0xFFFF
            if part >= (packed >> 16) & 0xFFFF:
                return -1
            if atomic_replace(cell, packed, packed + 1):
                return part


@device
def wait_for_parts(job, run, parts):
    """Wait until `parts` parts of this run are done; False if the run is over."""
    spins = 0
    while atomic_load(job + 64) < parts:
        if atomic_load(job) != run:
            return False
        spins += 1
        if spins < SPINS:
            cpu_pause()
        else:
            call_address(load_i64(job + 14 * 8))
    return atomic_load(job) == run


@device
def parts_of(step):
    """How many parts a step has in this run; at least 1, since its claim cell has to see every run."""
    parts, count = load_i64(step + 16), load_i64(step + 24)
    if count != 0:
        parts = max(min(parts, load_i64(count)), 1)
    return parts


@device
def walk(job, run, thread):
    """Do a thread's share of run number `run`."""
    tape, steps, cells = load_i64(job + 8), load_i64(job + 16), load_i64(job + 24)
    before_stage, before_step, since = 0, 0, cycles()
    for i in range(steps):
        step = tape + i * STEP
        if load_i64(step + 32) == 1:
            before_stage = before_step
            if not wait_for_parts(job, run, before_stage):
                return
        parts = parts_of(step)
        before_step += parts
        while True:
            part = claim(cells + i * LINE, run, parts)
            if part == -2:
                return
            if part < 0:
                break
            call_kernel(load_i64(step), load_i64(step + 8), part, parts, thread)
            atomic_add(job + 64, 1)
            if cycles() - since > SLICE:
                call_address(load_i64(job + 14 * 8))
                since = cycles()
    wait_for_parts(job, run, before_step)


@kernel
def run(job, thread, _, __):
    """Start the next run and return when it is done. For the one thread that gives the orders."""
    number = atomic_load(job) + 1
    atomic_store(job + 64, 0)
    atomic_store(job, number)
    walk(job, number, thread)


@kernel
def work(job, thread, seen, _):
    """Take part in every run after the one whose number is at address `seen`, until there was none for a while."""
    idle, last = 0, load_i64(seen)
    while atomic_load(job + 13 * 8) == 0 and idle < SPINS + IDLE_YIELDS:
        number = atomic_load(job)
        if number != last:
            walk(job, number, thread)
            last, idle = number, 0
        elif idle < SPINS:
            cpu_pause()
        else:
            call_address(load_i64(job + 14 * 8))
        idle += 1
    store_i64(seen, last)
