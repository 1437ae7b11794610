"""CUDA kernels of recurrent layers: convolutions, Mamba, Mamba 2, delta rule and RWKV.

States are stored as on the CPU (kernels/cpu/recurrent.py), so that they can be copied between both. Formulas and
arguments are in localllm/kernels/table.py.

The columns of a state are stored in groups of 16. A block of threads processes ACROSS columns; PARTS threads share the
rows of a column, and add up their results. In the delta rule, a token needs the product of its key and the state before
it: that is summed up while the previous token changes the state.
"""

from numba import cuda, float32

from localllm.kernels.cuda.elementwise.formulas import compute_sigmoid
from localllm.kernels.cuda.gpu import BLOCK, device, exp, load_f32, load_i64, store_f32
from localllm.kernels.table import SEQUENCE

ACROSS = min(16, BLOCK // 2)
PARTS = BLOCK // ACROSS
SEQUENCE_BYTES = 8 * len(SEQUENCE)
ZERO = float32(0)


@device
def load_token_range(sequences, number):
    """Return the index of a sequence's first token in the run, and the number of its tokens."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.first), load_i64(sequence + 8 * SEQUENCE.count)


@device
def load_states(sequences, number, offset):
    """Return the addresses of a part of the state, before and after the run."""
    sequence = sequences + number * SEQUENCE_BYTES
    return load_i64(sequence + 8 * SEQUENCE.state) + offset, load_i64(sequence + 8 * SEQUENCE.next_state) + offset


@device
def get_column_in_block():
    return cuda.threadIdx.x % ACROSS


@device
def get_first_row():
    """Return the first row of this thread in its column.

    Its other rows follow at distances of PARTS.
    """
    return cuda.threadIdx.x // ACROSS


@device
def sum_column(x):
    """Return the sum of x over the threads of this thread's column.

    All threads of the block must call it.
    """
    numbers = cuda.shared.array(BLOCK, float32)
    cuda.syncthreads()  # until the previous sums have been read
    numbers[cuda.threadIdx.x] = x
    cuda.syncthreads()
    total = ZERO
    for part in range(PARTS):
        total += numbers[part * ACROSS + get_column_in_block()]
    return total


TOKENS = 32  # consecutive tokens of a thread, unless there are more taps


@device
def find_row(x, stride, window, row_bytes, taps, t):
    """Return the address of the x of token t of the run.

    Tokens before the run are in the window.
    """
    return x + t * stride if t >= 0 else window + (t + taps - 1) * row_bytes


def convolve(sequences, sequence_count, offset, taps, weights, bias, silu, x, y, stride, columns):
    """Write y[t] = bias + the sum over taps of weights[tap] * x[t - taps + 1 + tap], and the new window.

    A thread processes one column and some tokens. Only the thread with a sequence's first tokens reads the old window,
    and afterwards writes the new one, row by row in order, so that both may be the same memory.
    """
    column = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    row_bytes, tokens = (columns + 15) // 16 * 64, max(TOKENS, taps)
    if column >= 4 * columns:
        return
    for s in range(load_i64(sequence_count)):
        token, count = load_token_range(sequences, s)
        window, target = load_states(sequences, s, offset + column)
        source = x + token * stride + column
        for start in range(cuda.blockIdx.y * tokens, count, cuda.gridDim.y * tokens):
            for t in range(start, min(start + tokens, count)):
                total = load_f32(bias + column)
                for tap in range(taps):
                    row = find_row(source, stride, window, row_bytes, taps, t - taps + 1 + tap)
                    total += load_f32(weights + tap * row_bytes + column) * load_f32(row)
                store_f32(y + (token + t) * stride + column, total * compute_sigmoid(total) if silu == 1 else total)
        if cuda.blockIdx.y == 0:
            for row in range(taps - 1):
                last_x = load_f32(find_row(source, stride, window, row_bytes, taps, count - taps + 1 + row))
                store_f32(target + row * row_bytes, last_x)


LOWEST = float32(-3e38)


def gated_mean(sequences, sequence_count, offset, taps, stretches, places, x, x_stride, y, stride, columns):
    """Compute the gated mean (GATED_MEAN in table.py) of one column and some tokens per thread."""
    column = 4 * (cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    row_bytes, bytes_per_token = (2 * stretches * columns + 15) // 16 * 64, (columns + 15) // 16 * 64
    tokens, gates = max(TOKENS, taps), 4 * stretches * columns
    if column >= 4 * columns:
        return
    for s in range(load_i64(sequence_count)):
        token, count = load_token_range(sequences, s)
        window, target = load_states(sequences, s, offset + column)
        source, length = x + token * x_stride + column, load_i64(sequences + s * SEQUENCE_BYTES + 8 * SEQUENCE.length)
        for start in range(cuda.blockIdx.y * tokens, count, cuda.gridDim.y * tokens):
            for t in range(start, min(start + tokens, count)):
                top, total, mean, least = LOWEST, ZERO, ZERO, max(taps - 1 - (length - count + t), 0)
                for tap in range(least, taps):
                    row = find_row(source, x_stride, window, row_bytes, taps, t - taps + 1 + tap)
                    row += tap * stretches // taps * 4 * columns
                    top = max(top, load_f32(row + gates) + load_f32(places + tap * bytes_per_token + column))
                for tap in range(least, taps):
                    row = find_row(source, x_stride, window, row_bytes, taps, t - taps + 1 + tap)
                    row += tap * stretches // taps * 4 * columns
                    gate = load_f32(row + gates) + load_f32(places + tap * bytes_per_token + column)
                    weight = exp(gate - top) + (gate - gate)
                    total, mean = total + weight, mean + weight * load_f32(row)
                store_f32(y + (token + t) * stride + column, mean / total)
        if cuda.blockIdx.y == 0:
            for row in range(taps - 1):
                last_row = find_row(source, x_stride, window, row_bytes, taps, count - taps + 1 + row)
                for side in range(2 * stretches):
                    store_f32(target + row * row_bytes + 4 * side * columns, load_f32(last_row + 4 * side * columns))


@device
def advance_column(source, target, rates, dt, x, b, c, state_size):
    """Update the state of a column for one token.

    Return this thread's share of the product of c with the new state.
    """
    read = ZERO
    for n in range(get_first_row(), state_size, PARTS):
        state = exp(dt * load_f32(rates + 64 * n)) * load_f32(source + 64 * n) + dt * x * load_f32(b + 4 * n)
        store_f32(target + 64 * n, state)
        read += state * load_f32(c + 4 * n)
    return read


def selective_scan(
    sequences, sequence_count, offset, x, dt, b, c, state_stride, rates, skip, y, stride, columns, state_size
):
    column = cuda.blockIdx.x * ACROSS + get_column_in_block()
    state, factor = (column // 16 * state_size * 16 + column % 16) * 4, load_f32(skip + 4 * column)
    for s in range(load_i64(sequence_count)):
        first, count = load_token_range(sequences, s)
        source, target = load_states(sequences, s, offset + state)
        for t in range(first, first + count):
            at, of_state = t * stride + 4 * column, t * state_stride
            number, step = load_f32(x + at), load_f32(dt + at)
            read = advance_column(source, target, rates + state, step, number, b + of_state, c + of_state, state_size)
            total = sum_column(read) + factor * number
            if get_first_row() == 0:
                store_f32(y + at, total)
            source = target


@device
def multiply_state(state, k, key_dim):
    """Return this thread's share of the product of a key with a column of the state."""
    total = ZERO
    for i in range(get_first_row(), key_dim, PARTS):
        total += load_f32(state + 64 * i) * load_f32(k + 4 * i)
    return total


@device
def advance(source, target, decay, d, k, q, next_k, key_dim):
    """Update a column of the state for one token.

    Return this thread's shares of the products of the query, and of the next token's key, with the new column.
    """
    of_query, of_key = ZERO, ZERO
    for i in range(get_first_row(), key_dim, PARTS):
        number = load_f32(source + 64 * i) * decay + load_f32(k + 4 * i) * d
        store_f32(target + 64 * i, number)
        of_query += number * load_f32(q + 4 * i)
        of_key += number * load_f32(next_k + 4 * i)
    return of_query, of_key


def make_head_scan(rule):
    is_delta = rule == "delta"

    def head_scan(
        sequences, sequence_count, offset, q, k, key_stride, v, y, stride, dt, strength, head_stride, rates, skip,
        heads, key_heads, repeat, key_dim, value_dim,
    ):  # fmt: skip
        width = (value_dim + 15) // 16 * 16
        head, column = cuda.blockIdx.x * ACROSS // width, cuda.blockIdx.x * ACROSS % width + get_column_in_block()
        state = ((head * width + column - column % 16) * key_dim + column % 16) * 4
        key, value = head // repeat % key_heads * key_dim * 4, (head * value_dim + column) * 4
        rate, factor, key_reads = load_f32(rates + 4 * head), ZERO if is_delta else load_f32(skip + 4 * head), ZERO
        for s in range(load_i64(sequence_count)):
            first, count = load_token_range(sequences, s)
            source, target = load_states(sequences, s, offset + state)
            if is_delta:
                key_reads = sum_column(multiply_state(source, k + first * key_stride + key, key_dim))
            for t in range(first, first + count):
                of_head, of_key = t * head_stride + 4 * head, t * key_stride + key
                of_next = of_key + key_stride if t + 1 < first + count else of_key
                decay, by = exp(rate * load_f32(dt + of_head)), load_f32(strength + of_head)
                number = load_f32(v + t * stride + value) if column < value_dim else ZERO
                d = (number - decay * key_reads) * by
                query_reads, next_key_reads = advance(
                    source, target, decay, d, k + of_key, q + of_key, k + of_next, key_dim
                )
                query_reads = sum_column(query_reads)
                if is_delta:
                    key_reads = sum_column(next_key_reads)
                if get_first_row() == 0 and column < value_dim:
                    store_f32(y + t * stride + value, query_reads + factor * number)
                source = target

    return head_scan


@device
def update_gated(source, target, r, w, k, number, key_dim):
    """Update a column of the state for one token: state = w * state + k v.

    Return this thread's share of the product of r with the new column.
    """
    total = ZERO
    for i in range(get_first_row(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, new)
        total += new * load_f32(r + 4 * i)
    return total


@device
def update_first(source, target, r, w, k, weight, number, key_dim):
    """Update a column of the state for one token: state = w * state + k v.

    Return this thread's share of the product of r with the old column plus k v times a weight.
    """
    total = ZERO
    for i in range(get_first_row(), key_dim, PARTS):
        old, new = load_f32(source + 64 * i), load_f32(k + 4 * i) * number
        store_f32(target + 64 * i, old * load_f32(w + 4 * i) + new)
        total += (old + load_f32(weight + 4 * i) * new) * load_f32(r + 4 * i)
    return total


@device
def update_delta(source, target, r, w, k, b, next_a, number, state_product, key_dim):
    """Update a column of the state for one token: state = w * state + k v + b * state_product.

    state_product: the product of a with the old column. Return this thread's shares of the products of r, and of the
    next token's a, with the new column.
    """
    of_query, of_next = ZERO, ZERO
    for i in range(get_first_row(), key_dim, PARTS):
        new = load_f32(source + 64 * i) * load_f32(w + 4 * i) + load_f32(k + 4 * i) * number
        new += load_f32(b + 4 * i) * state_product
        store_f32(target + 64 * i, new)
        of_query += new * load_f32(r + 4 * i)
        of_next += new * load_f32(next_a + 4 * i)
    return of_query, of_next


def make_wkv(rule):
    is_delta, is_first = rule == "delta", rule == "first"

    def wkv(
        sequences, sequence_count, offset, r, w, k, v, a, b, first, key_stride, y, stride, heads, key_dim, value_dim
    ):
        width = (value_dim + 15) // 16 * 16
        head, column = cuda.blockIdx.x * ACROSS // width, cuda.blockIdx.x * ACROSS % width + get_column_in_block()
        state = ((head * width + column - column % 16) * key_dim + column % 16) * 4
        key, value, state_product = head * key_dim * 4, (head * value_dim + column) * 4, ZERO
        for s in range(load_i64(sequence_count)):
            start, count = load_token_range(sequences, s)
            source, target = load_states(sequences, s, offset + state)
            if is_delta:
                state_product = sum_column(multiply_state(source, a + start * key_stride + key, key_dim))
            for t in range(start, start + count):
                at = t * key_stride + key
                number = load_f32(v + t * stride + value) if column < value_dim else ZERO
                if is_delta:
                    of_next = at + key_stride if t + 1 < start + count else at
                    query_reads, of_next_a = update_delta(
                        source, target, r + at, w + at, k + at, b + at, a + of_next, number, state_product, key_dim
                    )
                    state_product = sum_column(of_next_a)
                elif is_first:
                    query_reads = update_first(source, target, r + at, w + at, k + at, first + key, number, key_dim)
                else:
                    query_reads = update_gated(source, target, r + at, w + at, k + at, number, key_dim)
                query_reads = sum_column(query_reads)
                if get_first_row() == 0 and column < value_dim:
                    store_f32(y + t * stride + value, query_reads)
                source = target

    return wkv
