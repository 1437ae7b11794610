"""CPU kernels of recurrent layers: convolutions, Mamba, Mamba 2, the delta rule and RWKV.

Each sequence of a run has a state, which the engine keeps between runs: SEQUENCE.state before the run, next_state after
it; both may be the same memory. The layout of a state of columns is [columns / 16][...][16], so that a vector holds one
value of each of 16 columns. Formulas and arguments are in localllm/kernels/table.py.
"""

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.table import CONVOLVE, GATED_MEAN, HEAD_SCAN, SELECTIVE_SCAN, SEQUENCE, WKV

SEQUENCE_BYTES = 8 * len(SEQUENCE)


@device
def load_token_range(sequence):
    """Return the index of a sequence's first token in the run, and the number of its tokens."""
    return load_argument(sequence, SEQUENCE.first), load_argument(sequence, SEQUENCE.count)


@device
def load_states(sequence, offset):
    """Return two addresses of a sequence's state: before the run, to read, and after it, to write."""
    return load_argument(sequence, SEQUENCE.state) + offset, load_argument(sequence, SEQUENCE.next_state) + offset


# ---- causal convolution, separately for each column (depthwise). The state is a window: the x of the last taps - 1
# tokens before the run.


@device
def find_row(x, stride, window, row_bytes, taps, t):
    """Return the address of the x of token t of the run; tokens before the run are in the window."""
    return x + t * stride if t >= 0 else window + (t + taps - 1) * row_bytes


@device
def convolve_token(a, x, window, t, y, first, last):
    """Compute y for token t; first, last: offsets in bytes of the columns to compute."""
    taps, weights, stride = (
        load_argument(a, CONVOLVE.taps),
        load_argument(a, CONVOLVE.weights),
        load_argument(a, CONVOLVE.stride),
    )
    row_bytes, silu = (load_argument(a, CONVOLVE.columns) + 15) // 16 * 64, load_argument(a, CONVOLVE.silu)
    for i in range(first, last, 64):
        total = simd.load_f32x16(load_argument(a, CONVOLVE.bias) + i)
        for tap in range(taps):
            row = find_row(x, stride, window, row_bytes, taps, t - taps + 1 + tap)
            total = simd.fma_f32x16(simd.load_f32x16(weights + tap * row_bytes + i), simd.load_f32x16(row + i), total)
        simd.store_f32x16(y + i, total * simd.sigmoid_f32x16(total) if silu == 1 else total)


@device
def slide_window(a, x, count, window, target, first, last):
    """Write the window after `count` more tokens, in order, so that `target` may be the old one.

    first, last: offsets in bytes of the columns.
    """
    taps, row_bytes = load_argument(a, CONVOLVE.taps), (load_argument(a, CONVOLVE.columns) + 15) // 16 * 64
    for row in range(taps - 1):
        source = find_row(x, load_argument(a, CONVOLVE.stride), window, row_bytes, taps, count - taps + 1 + row)
        for i in range(first, last, 64):
            simd.store_f32x16(target + row * row_bytes + i, simd.load_f32x16(source + i))


@kernel
def convolve(a, part, parts, thread):
    width, stride = (load_argument(a, CONVOLVE.columns) + 15) // 16, load_argument(a, CONVOLVE.stride)
    first, last = width * part // parts * 64, width * (part + 1) // parts * 64
    for s in range(simd.load_i64(load_argument(a, CONVOLVE.sequence_count))):
        sequence = load_argument(a, CONVOLVE.sequences) + s * SEQUENCE_BYTES
        token, count = load_token_range(sequence)
        window, target = load_states(sequence, load_argument(a, CONVOLVE.offset))
        x, y = load_argument(a, CONVOLVE.x) + token * stride, load_argument(a, CONVOLVE.y) + token * stride
        for t in range(count):
            convolve_token(a, x, window, t, y + t * stride, first, last)
        slide_window(a, x, count, window, target, first, last)


# ---- the mean of the last few tokens, weighted by the softmax of their gates, separately for each column. The state is
# a window, too, of values and gates. GATED_MEAN in table.py defines taps, stretches and places.

LOWEST = float32(-3e38)


@device
def load_gates(a, row, tap, i, lanes):
    """Return a tap's gates of `lanes` columns: those of the token's row plus the tap's own."""
    columns, places = load_argument(a, GATED_MEAN.columns), load_argument(a, GATED_MEAN.places)
    of_place = places + tap * ((columns + 15) // 16 * 64) + i * 4
    gates = row + load_argument(a, GATED_MEAN.stretches) * columns * 4
    return simd.load_lanes_f32x16(gates + i * 4, lanes) + simd.load_lanes_f32x16(of_place, lanes)


@device
def find_tap_row(a, x, window, row_bytes, t, tap):
    taps, stride = load_argument(a, GATED_MEAN.taps), load_argument(a, GATED_MEAN.x_stride)
    row = find_row(x, stride, window, row_bytes, taps, t - taps + 1 + tap)
    return row + tap * load_argument(a, GATED_MEAN.stretches) // taps * load_argument(a, GATED_MEAN.columns) * 4


@device
def compute_mean(a, x, window, row_bytes, t, position, y, first, last):
    """Compute y for token t at `position`. Taps before the beginning of the sequence do not count."""
    taps = load_argument(a, GATED_MEAN.taps)
    for i in range(first, last, 16):
        lanes, top = min(16, last - i), simd.splat_f32x16(LOWEST)
        for tap in range(max(taps - 1 - position, 0), taps):
            top = simd.max_f32x16(top, load_gates(a, find_tap_row(a, x, window, row_bytes, t, tap), tap, i, lanes))
        total, mean = simd.zero_f32x16(), simd.zero_f32x16()
        for tap in range(max(taps - 1 - position, 0), taps):
            row = find_tap_row(a, x, window, row_bytes, t, tap)
            gate = load_gates(a, row, tap, i, lanes)
            weight = simd.exp_f32x16(gate - top) + (gate - gate)  # NaN if the gate is not finite
            total, mean = total + weight, simd.fma_f32x16(weight, simd.load_lanes_f32x16(row + i * 4, lanes), mean)
        simd.store_lanes_f32x16(y + i * 4, mean * simd.reciprocal_f32x16(total), lanes)


@device
def slide_gates(a, x, count, window, target, row_bytes, first, last):
    taps, stride = load_argument(a, GATED_MEAN.taps), load_argument(a, GATED_MEAN.x_stride)
    columns, sides = load_argument(a, GATED_MEAN.columns), 2 * load_argument(a, GATED_MEAN.stretches)
    for row in range(taps - 1):
        source = find_row(x, stride, window, row_bytes, taps, count - taps + 1 + row)
        for i in range(first, last, 16):
            lanes = min(16, last - i)
            for side in range(sides):
                at = (side * columns + i) * 4
                simd.store_lanes_f32x16(
                    target + row * row_bytes + at, simd.load_lanes_f32x16(source + at, lanes), lanes
                )


@kernel
def gated_mean(a, part, parts, thread):
    columns, stride = load_argument(a, GATED_MEAN.columns), load_argument(a, GATED_MEAN.stride)
    blocks, row_bytes = (columns + 15) // 16, (2 * load_argument(a, GATED_MEAN.stretches) * columns + 15) // 16 * 64
    first, last = blocks * part // parts * 16, min(blocks * (part + 1) // parts * 16, columns)
    for s in range(simd.load_i64(load_argument(a, GATED_MEAN.sequence_count))):
        sequence = load_argument(a, GATED_MEAN.sequences) + s * SEQUENCE_BYTES
        token, count = load_token_range(sequence)
        window, target = load_states(sequence, load_argument(a, GATED_MEAN.offset))
        x = load_argument(a, GATED_MEAN.x) + token * load_argument(a, GATED_MEAN.x_stride)
        start = load_argument(sequence, SEQUENCE.length) - count
        for t in range(count):
            y = load_argument(a, GATED_MEAN.y) + (token + t) * stride
            compute_mean(a, x, window, row_bytes, t, start + t, y, first, last)
        slide_gates(a, x, count, window, target, row_bytes, first, last)


# ---- the recurrence of Mamba (Gu and Dao 2023): every column has its own state, [state_size], and decay rates. 16
# columns make a vector. Their states, 1 KB for a state_size of 16, stay in the L1 cache for all tokens.


@device
def advance_columns(source, target, rates, dt, input, b, c, y, state_size):
    """Apply a token to the states of 16 columns; return y plus their product with c; input: dt * x."""
    for n in range(state_size):
        decayed = simd.exp_f32x16(dt * simd.load_f32x16(rates + n * 64)) * simd.load_f32x16(source + n * 64)
        state = simd.fma_f32x16(input, simd.splat_f32x16(simd.load_f32(b + n * 4)), decayed)
        simd.store_f32x16(target + n * 64, state)
        y = simd.fma_f32x16(state, simd.splat_f32x16(simd.load_f32(c + n * 4)), y)
    return y


@device
def scan_columns(a, sequence, column):
    first, count = load_token_range(sequence)
    stride, state_size = load_argument(a, SELECTIVE_SCAN.stride), load_argument(a, SELECTIVE_SCAN.state_size)
    state = column * state_size * 4
    source, target = load_states(sequence, load_argument(a, SELECTIVE_SCAN.offset) + state)
    skip = simd.load_f32x16(load_argument(a, SELECTIVE_SCAN.skip) + column * 4)
    for t in range(first, first + count):
        at, of_state = t * stride + column * 4, t * load_argument(a, SELECTIVE_SCAN.state_stride)
        x = simd.load_f32x16(load_argument(a, SELECTIVE_SCAN.x) + at)
        dt = simd.load_f32x16(load_argument(a, SELECTIVE_SCAN.dt) + at)
        b, c = load_argument(a, SELECTIVE_SCAN.b) + of_state, load_argument(a, SELECTIVE_SCAN.c) + of_state
        rates = load_argument(a, SELECTIVE_SCAN.rates) + state
        y = advance_columns(source, target, rates, dt, dt * x, b, c, skip * x, state_size)
        simd.store_f32x16(load_argument(a, SELECTIVE_SCAN.y) + at, y)
        source = target


@kernel
def selective_scan(a, part, parts, thread):
    width = (load_argument(a, SELECTIVE_SCAN.columns) + 15) // 16
    for i in range(width * part // parts, width * (part + 1) // parts):
        for s in range(simd.load_i64(load_argument(a, SELECTIVE_SCAN.sequence_count))):
            scan_columns(a, load_argument(a, SELECTIVE_SCAN.sequences) + s * SEQUENCE_BYTES, i * 16)


# ---- recurrences whose state is a matrix for each head, [key_dim, value_dim]: keys write to it, queries read from it.
#
# Mamba 2 (Dao and Gu 2024) adds key times value; the gated delta rule (Yang et al. 2024) first subtracts what the key
# would read. The columns of a state are independent of each other. 16 of them are a block, [key_dim][16], 8 KB for 128
# dimensions, which stays in the L1 cache for all tokens of a run. A token reads and writes a block once, even with the
# delta rule: the next key's product is summed up in the same pass.
#
# This takes 3 or 4 multiplications for each element of the state and token. The chunked form of the same papers, matrix
# products over 64 tokens, takes 2.5 or 4.5, so it would gain nothing on a CPU without matrix units.


@device
def load_splat(address):
    return simd.splat_f32x16(simd.load_f32(address))


@device
def multiply_state(block, k, key_dim):
    """Multiply a key by a block of the state: f32x16."""
    even, odd = simd.zero_f32x16(), simd.zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        even = simd.fma_f32x16(simd.load_f32x16(block + i * 64), load_splat(k + i * 4), even)
        odd = simd.fma_f32x16(simd.load_f32x16(block + i * 64 + 64), load_splat(k + i * 4 + 4), odd)
    if key_dim % 2 == 1:
        even = simd.fma_f32x16(simd.load_f32x16(block + (key_dim - 1) * 64), load_splat(k + (key_dim - 1) * 4), even)
    return even + odd


@device
def update_row(source, target, i, decay, d, k):
    """Update row i of a block: row * decay + k[i] * d; return the new row."""
    row = simd.fma_f32x16(load_splat(k + i * 4), d, simd.load_f32x16(source + i * 64) * decay)
    simd.store_f32x16(target + i * 64, row)
    return row


@device
def advance(source, target, decay, d, k, q, key_dim):
    """Update a block of the state for one token; return the query times the new block."""
    even, odd = simd.zero_f32x16(), simd.zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        even = simd.fma_f32x16(update_row(source, target, i, decay, d, k), load_splat(q + i * 4), even)
        odd = simd.fma_f32x16(update_row(source, target, i + 1, decay, d, k), load_splat(q + i * 4 + 4), odd)
    if key_dim % 2 == 1:
        i = key_dim - 1
        even = simd.fma_f32x16(update_row(source, target, i, decay, d, k), load_splat(q + i * 4), even)
    return even + odd


@device
def advance_and_read(source, target, decay, d, k, q, next_k, key_dim):
    """Update a block of the state for one token, and multiply it by the query and the next key.

    Return both products.
    """
    even, odd, even_next, odd_next = simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16()
    for i in range(0, key_dim - 1, 2):
        row, other = update_row(source, target, i, decay, d, k), update_row(source, target, i + 1, decay, d, k)
        even = simd.fma_f32x16(row, load_splat(q + i * 4), even)
        odd = simd.fma_f32x16(other, load_splat(q + i * 4 + 4), odd)
        even_next = simd.fma_f32x16(row, load_splat(next_k + i * 4), even_next)
        odd_next = simd.fma_f32x16(other, load_splat(next_k + i * 4 + 4), odd_next)
    if key_dim % 2 == 1:
        i = key_dim - 1
        row = update_row(source, target, i, decay, d, k)
        even = simd.fma_f32x16(row, load_splat(q + i * 4), even)
        even_next = simd.fma_f32x16(row, load_splat(next_k + i * 4), even_next)
    return even + odd, even_next + odd_next


@device
def scan_plain(a, first, count, source, target, head, key, value, lanes):
    """Process all tokens of a sequence for a block, without the delta rule.

    key, value: offsets in bytes in the tokens' rows; lanes: columns of the block that exist.
    """
    key_dim = load_argument(a, HEAD_SCAN.key_dim)
    rate, skip = (
        load_splat(load_argument(a, HEAD_SCAN.rates) + head * 4),
        load_splat(load_argument(a, HEAD_SCAN.skip) + head * 4),
    )
    for t in range(first, first + count):
        at, of_head = (
            t * load_argument(a, HEAD_SCAN.stride) + value,
            t * load_argument(a, HEAD_SCAN.head_stride) + head * 4,
        )
        of_key = t * load_argument(a, HEAD_SCAN.key_stride) + key
        q, k = load_argument(a, HEAD_SCAN.q) + of_key, load_argument(a, HEAD_SCAN.k) + of_key
        v = simd.load_lanes_f32x16(load_argument(a, HEAD_SCAN.v) + at, lanes)
        decay = simd.exp_f32x16(rate * load_splat(load_argument(a, HEAD_SCAN.dt) + of_head))
        d = v * load_splat(load_argument(a, HEAD_SCAN.strength) + of_head)
        y = advance(source, target, decay, d, k, q, key_dim)
        simd.store_lanes_f32x16(load_argument(a, HEAD_SCAN.y) + at, simd.fma_f32x16(skip, v, y), lanes)
        source = target


@device
def scan_delta(a, first, count, source, target, head, key, value, lanes):
    key_dim, key_stride = load_argument(a, HEAD_SCAN.key_dim), load_argument(a, HEAD_SCAN.key_stride)
    rate = load_splat(load_argument(a, HEAD_SCAN.rates) + head * 4)
    key_reads = multiply_state(source, load_argument(a, HEAD_SCAN.k) + first * key_stride + key, key_dim)
    for t in range(first, first + count):
        at, of_head = (
            t * load_argument(a, HEAD_SCAN.stride) + value,
            t * load_argument(a, HEAD_SCAN.head_stride) + head * 4,
        )
        q, k = (
            load_argument(a, HEAD_SCAN.q) + t * key_stride + key,
            load_argument(a, HEAD_SCAN.k) + t * key_stride + key,
        )
        next_k = k + key_stride if t + 1 < first + count else k
        v = simd.load_lanes_f32x16(load_argument(a, HEAD_SCAN.v) + at, lanes)
        decay = simd.exp_f32x16(rate * load_splat(load_argument(a, HEAD_SCAN.dt) + of_head))
        d = (v - decay * key_reads) * load_splat(load_argument(a, HEAD_SCAN.strength) + of_head)
        y, key_reads = advance_and_read(source, target, decay, d, k, q, next_k, key_dim)
        simd.store_lanes_f32x16(load_argument(a, HEAD_SCAN.y) + at, y, lanes)
        source = target


def make_head_scan(rule):
    scan = {"plain": scan_plain, "delta": scan_delta}[rule]

    @kernel
    def head_scan(a, part, parts, thread):
        key_dim, value_dim = load_argument(a, HEAD_SCAN.key_dim), load_argument(a, HEAD_SCAN.value_dim)
        blocks = (value_dim + 15) // 16
        total = load_argument(a, HEAD_SCAN.heads) * blocks
        for i in range(total * part // parts, total * (part + 1) // parts):
            head, column = i // blocks, i % blocks * 16
            key = head // load_argument(a, HEAD_SCAN.repeat) % load_argument(a, HEAD_SCAN.key_heads) * key_dim * 4
            value, lanes = (head * value_dim + column) * 4, min(16, value_dim - column)
            for s in range(simd.load_i64(load_argument(a, HEAD_SCAN.sequence_count))):
                sequence = load_argument(a, HEAD_SCAN.sequences) + s * SEQUENCE_BYTES
                first, count = load_token_range(sequence)
                source, target = load_states(sequence, load_argument(a, HEAD_SCAN.offset) + i * key_dim * 64)
                scan(a, first, count, source, target, head, key, value, lanes)

    return head_scan


# ---- recurrences with a decay for each row of a head's state, which depends on the token. Three rules: "gated", linear
# attention with such gates (Yang et al. 2023); "first", RWKV-6 (Peng et al. 2024), in which a token's own key and value
# have extra weights in its output; "delta", RWKV-7 (Peng et al. 2025), whose state also gets b times its product with
# another vector, a. The delta rule of Kimi (2025) is a special case of RWKV-7's. The formulas are at WKV in table.py.


@device
def update_gated(source, target, of_token, v, state_product, y, read_next):
    """Update one row of a block for one token.

    of_token: addresses of the token's values for this row in r, w, k, and in two more vectors that other rules use.
    Return y plus r times the new row, and read_next unchanged.
    """
    r, w, k, _, _ = of_token
    row = simd.fma_f32x16(simd.load_f32x16(source), load_splat(w), load_splat(k) * v)
    simd.store_f32x16(target, row)
    return simd.fma_f32x16(row, load_splat(r), y), read_next


@device
def update_first(source, target, of_token, v, state_product, y, read_next):
    """Update one row for one token; y uses the old row, and k v with an extra weight (see update_gated)."""
    r, w, k, weight, _ = of_token
    old, new = simd.load_f32x16(source), load_splat(k) * v
    simd.store_f32x16(target, simd.fma_f32x16(old, load_splat(w), new))
    return simd.fma_f32x16(simd.fma_f32x16(load_splat(weight), new, old), load_splat(r), y), read_next


@device
def update_delta(source, target, of_token, v, state_product, y, read_next):
    """Update one row for one token, adding b times state_product (see update_gated).

    state_product: the product of a and the old state. Return y plus r times the new row, and read_next plus the next
    token's a times the new row.
    """
    r, w, k, b, next_a = of_token
    row = simd.fma_f32x16(
        load_splat(b), state_product, simd.fma_f32x16(simd.load_f32x16(source), load_splat(w), load_splat(k) * v)
    )
    simd.store_f32x16(target, row)
    return simd.fma_f32x16(row, load_splat(r), y), simd.fma_f32x16(row, load_splat(next_a), read_next)


@device
def offset_addresses(of_token, by):
    r, w, k, b, next_a = of_token
    return r + by, w + by, k + by, b + by, next_a + by


def make_scan(rule):
    @device
    def advance(source, target, of_token, v, state_product, key_dim):
        """Apply a token to a block; return the new block's products with r and with the next token's a."""
        even, odd, even_next, odd_next = simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16(), simd.zero_f32x16()
        for i in range(0, key_dim - 1, 2):
            at = i * 64
            even, even_next = rule(
                source + at, target + at, offset_addresses(of_token, i * 4), v, state_product, even, even_next
            )
            at, rows = at + 64, offset_addresses(of_token, i * 4 + 4)
            odd, odd_next = rule(source + at, target + at, rows, v, state_product, odd, odd_next)
        if key_dim % 2 == 1:
            at, rows = (key_dim - 1) * 64, offset_addresses(of_token, (key_dim - 1) * 4)
            even, even_next = rule(source + at, target + at, rows, v, state_product, even, even_next)
        return even + odd, even_next + odd_next

    @device
    def scan(a, start, count, source, target, key, value, lanes):
        key_dim, key_stride = load_argument(a, WKV.key_dim), load_argument(a, WKV.key_stride)
        state_product = simd.zero_f32x16()
        if rule is update_delta:
            state_product = multiply_state(source, load_argument(a, WKV.a) + start * key_stride + key, key_dim)
        for t in range(start, start + count):
            of_key, at = t * key_stride + key, t * load_argument(a, WKV.stride) + value
            r, w, k = (
                load_argument(a, WKV.r) + of_key,
                load_argument(a, WKV.w) + of_key,
                load_argument(a, WKV.k) + of_key,
            )
            other, next_a = k, k
            if rule is update_delta:
                of_next = of_key + key_stride if t + 1 < start + count else of_key
                other, next_a = load_argument(a, WKV.b) + of_key, load_argument(a, WKV.a) + of_next
            if rule is update_first:
                other = load_argument(a, WKV.first) + key
            v = simd.load_lanes_f32x16(load_argument(a, WKV.v) + at, lanes)
            y, state_product = advance(source, target, (r, w, k, other, next_a), v, state_product, key_dim)
            simd.store_lanes_f32x16(load_argument(a, WKV.y) + at, y, lanes)
            source = target

    return scan


def make_wkv(rule):
    scan = make_scan({"gated": update_gated, "first": update_first, "delta": update_delta}[rule])

    @kernel
    def wkv(a, part, parts, thread):
        key_dim, value_dim = load_argument(a, WKV.key_dim), load_argument(a, WKV.value_dim)
        blocks = (value_dim + 15) // 16
        total = load_argument(a, WKV.heads) * blocks
        for i in range(total * part // parts, total * (part + 1) // parts):
            head, column = i // blocks, i % blocks * 16
            value, lanes = (head * value_dim + column) * 4, min(16, value_dim - column)
            for s in range(simd.load_i64(load_argument(a, WKV.sequence_count))):
                sequence = load_argument(a, WKV.sequences) + s * SEQUENCE_BYTES
                start, count = load_token_range(sequence)
                source, target = load_states(sequence, load_argument(a, WKV.offset) + i * key_dim * 64)
                scan(a, start, count, source, target, head * key_dim * 4, value, lanes)

    return wkv
