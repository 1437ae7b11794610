"""The plan of a run's attention: a list of units of work, built once for all layers of the same shape.

A unit is some query rows of one sequence, one key-value head, and a range of keys: see UNIT, SPLIT and PLAN in
table.py. With few tokens a sequence has few units, so its context is split, too, into sections of 256 keys.

A sequence's result does not depend on others in the run, if at most SPLIT_TOKENS tokens need a split context. A token
gets the same bits alone and together with others of its sequence: SEQUENCE.kernel_tokens, not their count, selects the
kernel of all rows. If kernel_tokens is at most FEW_TOKENS, contexts are split, at multiples of a length that depends on
the token's position only.
"""

from localllm.kernels.cpu import ATTEND_ROWS, FEW_TOKENS, MAX_SPLITS, SPLIT_TOKENS
from localllm.kernels.cpu.signature import device, kernel, load_argument
from localllm.kernels.simd import store_i64
from localllm.kernels.table import PAGE, PLAN, SEQUENCE, SPLIT, UNIT

FEW_ROWS = 24  # up to this many rows, reading the cache directly (products.py) is faster
UNSPLIT = 1 << 40  # keys of a section, for a context that is not split
UNIT_BYTES, SEQUENCE_BYTES, SPLIT_BYTES = 8 * len(UNIT), 8 * len(SEQUENCE), 8 * len(SPLIT)


@device
def find_first_visible(position, window, chunked):
    """Return the position of the first key that a token sees; window 0: no window."""
    if window == 0:
        return 0
    return position // window * window if chunked == 1 else max(position + 1 - window, 0)


@device
def find_visible_begin(a, sequence):
    """Return the first position that a sequence's tokens may see.

    In cross-attention this is 0, otherwise the length of the encoder's output.
    """
    return 0 if load_argument(a, PLAN.cross_attention) == 1 else load_argument(sequence, SEQUENCE.encoded)


@device
def find_visible_end(a, sequence):
    """Return the position after the last one that a sequence's tokens may see.

    In cross-attention this is the length of the encoder's output, otherwise that of the sequence.
    """
    return load_argument(sequence, SEQUENCE.encoded if load_argument(a, PLAN.cross_attention) == 1 else SEQUENCE.length)


@device
def find_first_key(a, sequence, position):
    """Return the position of the first key that a token sees, rounded down to a multiple of 16."""
    first = find_first_visible(position, load_argument(a, PLAN.window), load_argument(a, PLAN.chunked))
    return max(first, find_visible_begin(a, sequence)) // 16 * 16


@device
def add_unit(unit, table, kv_head, first_row, rows, lowest, begin, end, split, few):
    store_i64(unit + 8 * UNIT.table, table)
    store_i64(unit + 8 * UNIT.kv_head, kv_head)
    store_i64(unit + 8 * UNIT.first_row, first_row)
    store_i64(unit + 8 * UNIT.rows, rows)
    store_i64(unit + 8 * UNIT.lowest, lowest)
    store_i64(unit + 8 * UNIT.begin, begin)
    store_i64(unit + 8 * UNIT.end, end)
    store_i64(unit + 8 * UNIT.split, split)
    store_i64(unit + 8 * UNIT.few, few)
    return unit + UNIT_BYTES


@device
def compute_unit_rows(count, group):
    """Return the maximum number of rows of a work unit, each a query head of a token.

    count: kernel_tokens; group: query heads per key-value head. For few tokens a unit has whole tokens, so that each
    token uses the kernel that it would use alone.
    """
    if count > FEW_TOKENS or group > ATTEND_ROWS:
        return ATTEND_ROWS
    return max(FEW_ROWS // group, 1) * group


@device
def compute_section_keys(a, sequence, position):
    """Return how many keys one section of the context has, for the token at a position.

    This depends only on the first key and the end, not on the run.
    """
    lowest = find_first_key(a, sequence, position)
    end = min(position + 1 + load_argument(a, PLAN.lookahead), find_visible_end(a, sequence))
    most = 256 * (MAX_SPLITS - 1)  # from any first key, these keys lie in at most MOST_SPLITS sections of 256
    return max((end - lowest + most - 1) // most, 1) * 256


@device
def add_tokens(a, sequence, unit, first, count, start, splits, span):
    """Write the work units of a sequence's tokens; return the address after them.

    a: the arguments; unit: address of the first one; first: the first token's index in the run; start: its position;
    splits: number of sections of the context; span: number of keys in a section.
    """
    group = load_argument(a, PLAN.heads) // load_argument(a, PLAN.kv_heads)
    rows, at_once = count * group, compute_unit_rows(load_argument(sequence, SEQUENCE.kernel_tokens), group)
    lowest, first_seen = find_first_key(a, sequence, start) // span * span, find_visible_begin(a, sequence)
    few, table = 1 if at_once <= FEW_ROWS else 0, load_argument(sequence, SEQUENCE.table)
    for kv_head in range(load_argument(a, PLAN.kv_heads)):
        for row in range(0, rows, at_once):
            unit_rows = min(at_once, rows - row)
            begin, last = find_first_key(a, sequence, start + row // group), start + (row + unit_rows - 1) // group
            if few == 0:
                begin = begin // PAGE * PAGE  # AMX adds up 32 keys at a time, and these must not depend on the unit
            end = min(last + 1 + load_argument(a, PLAN.lookahead), find_visible_end(a, sequence))
            for split in range(splits):
                lower, upper = max(begin, lowest + split * span), min(end, lowest + (split + 1) * span)
                head_row = first * group + row
                unit = add_unit(unit, table, kv_head, head_row, unit_rows, first_seen, lower, upper, split, few)
    return unit


@device
def write_splits(a, first, count, splits, slot):
    """Write the SPLIT of `count` tokens from index `first` on; return the next free slot."""
    for token in range(first, first + count):
        place = load_argument(a, PLAN.splits) + token * SPLIT_BYTES
        store_i64(place + 8 * SPLIT.count, splits)
        store_i64(place + 8 * SPLIT.slot, slot)
        slot += 1 if splits > 1 else 0
    return slot


@kernel
def plan(a, part, parts, thread):
    """Write all units of a run. A single part does all the work."""
    unit, slot = load_argument(a, PLAN.units), 0
    for i in range(load_argument(load_argument(a, PLAN.sequence_count), 0)):
        sequence = load_argument(a, PLAN.sequences) + i * SEQUENCE_BYTES
        first, count = load_argument(sequence, SEQUENCE.first), load_argument(sequence, SEQUENCE.count)
        start, kernel_tokens = (
            load_argument(sequence, SEQUENCE.length) - count,
            load_argument(sequence, SEQUENCE.kernel_tokens),
        )
        if kernel_tokens > FEW_TOKENS or slot + count > SPLIT_TOKENS:
            slot = write_splits(a, first, count, 1, slot)
            unit = add_tokens(a, sequence, unit, first, count, start, 1, UNSPLIT)
            continue
        done = 0
        while done < count:  # tokens whose contexts have sections of the same length
            span, end = compute_section_keys(a, sequence, start + done), done + 1
            while end < count and compute_section_keys(a, sequence, start + end) == span:
                end += 1
            lowest = find_first_key(a, sequence, start + done)
            seen = min(start + end + load_argument(a, PLAN.lookahead), find_visible_end(a, sequence))
            splits = (seen - 1) // span - lowest // span + 1
            slot = write_splits(a, first + done, end - done, splits, slot)
            unit = add_tokens(a, sequence, unit, first + done, end - done, start + done, splits, span)
            done = end
    store_i64(load_argument(a, PLAN.unit_count), (unit - load_argument(a, PLAN.units)) // UNIT_BYTES)
