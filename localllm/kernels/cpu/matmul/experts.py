"""Mixtures of experts: routing, products of the experts' matrices, and sorting rows by expert.

`route` chooses each token's experts. A pair is a token and one of its experts; `plan_experts` sorts the pairs by
expert, those of an expert in the order of the tokens, and gives each pair a row. The rows of an expert are contiguous,
padded to a multiple of EXPERT_ROWS. ROUTE and PLAN_EXPERTS in table.py list the options.

The kernel for one matrix multiplies an expert's rows. It gets a copy of the arguments, with the addresses of the
expert's matrix and rows. So an expert with few rows reads its matrix as in decode, and one with many unpacks each tile
once.
"""

from math import exp, inf, log1p, sqrt

from numba import float32

from localllm.kernels import simd
from localllm.kernels.cpu import CALL_BYTES, EXPERT_ROWS, PRECISE_TOKENS
from localllm.kernels.cpu.elementwise.rowwise import copy
from localllm.kernels.cpu.signature import device, kernel, load_argument, load_argument_f32
from localllm.kernels.table import (
    ADD_BY_EXPERT,
    EXPERT,
    EXPERTS_FLOAT,
    EXPERTS_QUANTIZED,
    FROM_HEADS,
    GATHER,
    LINEAR_FLOAT,
    LINEAR_QUANTIZED,
    PLAN_EXPERTS,
    ROUTE,
    SCATTER,
)

EXPERT_BYTES = 8 * len(EXPERT)
MINUS_INFINITY = float32(-inf)
LEAST_SUM = float32(6.103515625e-5)  # the smallest divisor of weights, as in llama.cpp


@device
def score_all(a, logits, scores):
    """Compute a token's scores: softmax, sigmoid, or square root of softplus.

    Return whether all logits are finite.
    """
    experts, sigmoid, rooted = (
        load_argument(a, ROUTE.experts),
        load_argument(a, ROUTE.sigmoid),
        load_argument(a, ROUTE.rooted),
    )
    top, total, finite = -inf, 0.0, True
    for e in range(experts):
        logit = simd.load_f32(logits + e * 4)
        finite = finite and abs(logit) < simd.INFINITY
        top = max(top, float(logit))
    for e in range(experts):
        logit = float(simd.load_f32(logits + e * 4))
        score = 1.0 / (1.0 + exp(-logit)) if sigmoid == 1 else exp(logit - top)
        score = sqrt(max(logit, 0.0) + log1p(exp(-abs(logit)))) if rooted == 1 else score
        simd.store_f32(scores + e * 4, float32(score))
        total += score
    if sigmoid == 0 and rooted == 0:
        for e in range(experts):
            simd.store_f32(scores + e * 4, float32(float(simd.load_f32(scores + e * 4)) / total))
    return finite


@device
def rank_all(a, logits, scores, ranks):
    """Compute the ranks that select experts: scores plus bias, or scores if there are groups, or logits.

    Logits rank more finely: the sigmoids of large logits are all 1.
    """
    bias, source = load_argument(a, ROUTE.bias), logits
    if bias != 0 or load_argument(a, ROUTE.groups) > 1:
        source = scores
    for e in range(load_argument(a, ROUTE.experts)):
        rank = simd.load_f32(source + e * 4)
        simd.store_f32(ranks + e * 4, rank + simd.load_f32(bias + e * 4) if bias != 0 else rank)


@device
def find_best(values, count):
    """Return the index of the largest value, the first of equal ones; 0 if none exceeds minus infinity."""
    best, largest = 0, MINUS_INFINITY
    for i in range(count):
        value = simd.load_f32(values + i * 4)
        if value > largest:
            best, largest = i, value
    return best


@device
def pop_best(values, count):
    """Return the index of the largest value, and set that value to minus infinity for the next call."""
    best = find_best(values, count)
    simd.store_f32(values + best * 4, MINUS_INFINITY)
    return best


@device
def rank_group(ranks, size):
    """Return the rank of a group of experts: the sum of its two best ranks."""
    best = find_best(ranks, size)
    second = MINUS_INFINITY
    for i in range(size):
        if i != best:
            second = max(second, simd.load_f32(ranks + i * 4))
    return simd.load_f32(ranks + best * 4) + second


@device
def mask_groups(a, ranks, groups):
    """Set the ranks of the experts of all but the best groups to minus infinity."""
    count = load_argument(a, ROUTE.groups)
    size = load_argument(a, ROUTE.experts) // count
    for g in range(count):
        simd.store_f32(groups + g * 4, rank_group(ranks + g * size * 4, size))
    for _ in range(load_argument(a, ROUTE.groups_used)):
        pop_best(groups, count)
    for e in range(size * count):
        if simd.load_f32(groups + e // size * 4) > MINUS_INFINITY:
            simd.store_f32(ranks + e * 4, MINUS_INFINITY)


@device
def choose_experts(a, scores, ranks, given_experts, chosen, weights):
    """Write a token's experts and their weights.

    The experts are those of the best ranks, or those listed at `given_experts`.
    """
    used, total, factor = load_argument(a, ROUTE.used), float32(0.0), load_argument_f32(a, ROUTE.scale)
    for i in range(used):
        if given_experts != 0:
            expert = simd.load_i64(given_experts + i * 8)
        else:
            expert = pop_best(ranks, load_argument(a, ROUTE.experts)) // load_argument(a, ROUTE.together)
        score = simd.load_f32(scores + expert * 4)
        total += score
        simd.store_i64(chosen + i * 8, expert)
        simd.store_f32(weights + i * 4, score)
    if load_argument(a, ROUTE.normalized) == 1:
        factor /= max(total, LEAST_SUM)
    for i in range(used):
        simd.store_f32(weights + i * 4, simd.load_f32(weights + i * 4) * factor)


@device
def write_nan_choice(a, chosen, weights):
    """Write NaN weights and arbitrary experts for a token that has a non-finite logit."""
    for i in range(load_argument(a, ROUTE.used)):
        simd.store_i64(chosen + i * 8, i)
        simd.store_f32(weights + i * 4, simd.NAN)


@kernel
def route(a, part, parts, thread):
    """Choose the experts of each token. Scratch memory: scores, ranks, ranks of groups."""
    tokens, used, experts = (
        simd.load_i64(load_argument(a, ROUTE.count)),
        load_argument(a, ROUTE.used),
        load_argument(a, ROUTE.experts),
    )
    scores = load_argument(a, ROUTE.scratch) + thread * load_argument(a, ROUTE.scratch_bytes)
    ranks = scores + experts * 4
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        chosen, weights = load_argument(a, ROUTE.chosen) + t * used * 8, load_argument(a, ROUTE.weights) + t * used * 4
        logits = load_argument(a, ROUTE.logits) + t * load_argument(a, ROUTE.stride)
        if not score_all(a, logits, scores):
            write_nan_choice(a, chosen, weights)
            continue
        rank_all(a, logits, scores, ranks)
        if load_argument(a, ROUTE.groups) > 1:
            mask_groups(a, ranks, ranks + experts * 4)
        table = load_argument(a, ROUTE.table)
        given_experts = table + simd.load_i64(load_argument(a, ROUTE.ids) + t * 8) * used * 8 if table != 0 else 0
        choose_experts(a, scores, ranks, given_experts, chosen, weights)


@device
def count_rows(a, pairs):
    next_rows = load_argument(a, PLAN_EXPERTS.next_rows)
    for e in range(load_argument(a, PLAN_EXPERTS.experts)):
        simd.store_i64(next_rows + e * 8, 0)
    for pair in range(pairs):
        expert = next_rows + simd.load_i64(load_argument(a, PLAN_EXPERTS.chosen) + pair * 8) * 8
        simd.store_i64(expert, simd.load_i64(expert) + 1)


@device
def round_up_rows(count):
    """Return the number of rows that products may write for an expert with `count` rows.

    It is padded, unless there is a single row.
    """
    return count if count == 1 else (count + EXPERT_ROWS - 1) // EXPERT_ROWS * EXPERT_ROWS


@device
def place_experts(a):
    """List the experts that have rows, and replace each count in next_rows by the index of the expert's first row."""
    active, first = load_argument(a, PLAN_EXPERTS.active), 0
    for e in range(load_argument(a, PLAN_EXPERTS.experts)):
        place = load_argument(a, PLAN_EXPERTS.next_rows) + e * 8
        count = simd.load_i64(place)
        if count > 0:
            simd.store_i64(active + 8 * EXPERT.number, e)
            simd.store_i64(active + 8 * EXPERT.first, first)
            simd.store_i64(active + 8 * EXPERT.count, count)
            simd.store_i64(place, first)
            active, first = active + EXPERT_BYTES, first + round_up_rows(count)
    simd.store_i64(load_argument(a, PLAN_EXPERTS.row_count), first)
    simd.store_i64(
        load_argument(a, PLAN_EXPERTS.active_count), (active - load_argument(a, PLAN_EXPERTS.active)) // EXPERT_BYTES
    )


@device
def fill_padding(a):
    """Assign to padding rows between experts the pair of the row before, so that every row is initialized."""
    pairs = load_argument(a, PLAN_EXPERTS.pairs)
    for i in range(simd.load_i64(load_argument(a, PLAN_EXPERTS.active_count))):
        expert = load_argument(a, PLAN_EXPERTS.active) + i * EXPERT_BYTES
        first, count = load_argument(expert, EXPERT.first), load_argument(expert, EXPERT.count)
        for row in range(first + count, first + round_up_rows(count)):
            simd.store_i64(pairs + row * 8, simd.load_i64(pairs + (row - 1) * 8))


@kernel
def plan_experts(a, part, parts, thread):
    """Assign a row to each pair, sorted by expert. A single part does all the work."""
    pairs = simd.load_i64(load_argument(a, PLAN_EXPERTS.count)) * load_argument(a, PLAN_EXPERTS.used)
    count_rows(a, pairs)
    place_experts(a)
    for pair in range(pairs):
        next_row = (
            load_argument(a, PLAN_EXPERTS.next_rows)
            + simd.load_i64(load_argument(a, PLAN_EXPERTS.chosen) + pair * 8) * 8
        )
        row = simd.load_i64(next_row)
        simd.store_i64(load_argument(a, PLAN_EXPERTS.rows) + pair * 8, row)
        simd.store_i64(load_argument(a, PLAN_EXPERTS.pairs) + row * 8, pair)
        simd.store_i64(next_row, row + 1)
    fill_padding(a)


UNLIMITED = 1 << 40  # more tokens than any run has


@device
def store_argument(arguments, place, value):
    simd.store_i64(arguments + place * 8, value)


def make_experts(product, own, most_is_address, finish=None):
    """Build the kernel for all experts from the kernel for one matrix.

    product, own: the declarations of both. most_is_address: whether the argument `most_precise` of `product` is an
    address; finish(arguments, call, expert, memory): sets further arguments in `call`, and may use `memory`, the
    scratch memory after them.
    """
    words = len(product)

    @device
    def prepare(a, call, expert):
        for i in range(words):
            store_argument(call, i, load_argument(a, i))
        for i in range(load_argument(a, own.by_row_count)):
            place, row_bytes = load_argument(a, own.by_row) + i * 16, load_argument(a, own.by_row) + i * 16 + 8
            moved = load_argument(call, simd.load_i64(place)) + load_argument(expert, EXPERT.first) * simd.load_i64(
                row_bytes
            )
            store_argument(call, simd.load_i64(place), moved)
        distance = load_argument(expert, EXPERT.number) * load_argument(a, own.expert_bytes)
        store_argument(call, product.weights, load_argument(a, own.weights) + distance)
        store_argument(call, product.count, expert + 8 * EXPERT.count)
        store_argument(call, product.scratch, load_argument(a, own.scratch) + CALL_BYTES)
        most = (
            simd.load_i64(load_argument(a, own.most_precise)) if most_is_address else load_argument(a, own.most_precise)
        )
        kernel_tokens = simd.load_i64(load_argument(a, own.kernel_tokens))
        most = UNLIMITED if kernel_tokens <= most else 0
        if most_is_address:
            store_argument(call, words, most)
            most = call + words * 8
        store_argument(call, product.most_precise, most)
        # In a short run an expert's token count does not select its kernel, so that tokens get the same bits as alone.
        store_argument(call, words + 1, 1 if kernel_tokens <= PRECISE_TOKENS else load_argument(expert, EXPERT.count))
        store_argument(call, product.kernel_tokens, call + (words + 1) * 8)
        if finish is not None:
            finish(a, call, expert, call + (words + 2) * 8)

    @kernel
    def experts(a, part, parts, thread):
        slices = load_argument(a, own.slices)
        units = simd.load_i64(load_argument(a, own.active_count)) * slices
        call = load_argument(a, own.scratch) + thread * load_argument(a, own.scratch_bytes)
        for unit in range(units * part // parts, units * (part + 1) // parts):
            prepare(a, call, load_argument(a, own.active) + unit // slices * EXPERT_BYTES)
            simd.call_kernel(load_argument(a, own.linear), call, unit % slices, slices, thread)

    return experts


experts_quantized = make_experts(LINEAR_QUANTIZED, EXPERTS_QUANTIZED, True)
experts_float = make_experts(LINEAR_FLOAT, EXPERTS_FLOAT, False)


@kernel
def gather(a, part, parts, thread):
    rows, weights = simd.load_i64(load_argument(a, GATHER.count)), load_argument(a, GATHER.weights)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        pair = simd.load_i64(load_argument(a, GATHER.pairs) + row * 8)
        token, place = pair // load_argument(a, GATHER.used), pair % load_argument(a, GATHER.used)
        x = (
            load_argument(a, GATHER.x)
            + token * load_argument(a, GATHER.x_stride)
            + place * load_argument(a, GATHER.part_bytes)
        )
        y, weight = load_argument(a, GATHER.y) + row * load_argument(a, GATHER.stride), simd.splat_f32x16(1.0)
        if weights != 0:
            weight = simd.splat_f32x16(simd.load_f32(weights + pair * 4))
        for i in range(0, load_argument(a, GATHER.columns) * 4, 64):
            simd.store_f32x16(y + i, simd.load_f32x16(x + i) * weight)


@kernel
def from_heads(a, part, parts, thread):
    used, columns = load_argument(a, FROM_HEADS.used), load_argument(a, FROM_HEADS.columns)
    pairs = simd.load_i64(load_argument(a, FROM_HEADS.count)) * used
    for pair in range(pairs * part // parts, pairs * (part + 1) // parts):
        x = load_argument(a, FROM_HEADS.x) + simd.load_i64(
            load_argument(a, FROM_HEADS.rows) + pair * 8
        ) * load_argument(a, FROM_HEADS.x_stride)
        y = (
            load_argument(a, FROM_HEADS.y)
            + pair // used * load_argument(a, FROM_HEADS.stride)
            + pair % used * columns * 4
        )
        copy(x, y, columns)


@kernel
def scatter(a, part, parts, thread):
    tokens, used = simd.load_i64(load_argument(a, SCATTER.count)), load_argument(a, SCATTER.used)
    weights = load_argument(a, SCATTER.weights)
    for t in range(tokens * part // parts, tokens * (part + 1) // parts):
        y = load_argument(a, SCATTER.y) + t * load_argument(a, SCATTER.stride)
        for i in range(0, load_argument(a, SCATTER.columns) * 4, 64):
            total = simd.zero_f32x16()
            for pair in range(t * used, (t + 1) * used):
                x = load_argument(a, SCATTER.x) + simd.load_i64(
                    load_argument(a, SCATTER.rows) + pair * 8
                ) * load_argument(a, SCATTER.x_stride)
                weight = simd.splat_f32x16(1.0)
                if weights != 0:
                    weight = simd.splat_f32x16(simd.load_f32(weights + pair * 4))
                total = simd.fma_f32x16(weight, simd.load_f32x16(x + i), total)
            simd.store_f32x16(y + i, total)


@kernel
def add_by_expert(a, part, parts, thread):
    rows, stride = simd.load_i64(load_argument(a, ADD_BY_EXPERT.count)), load_argument(a, ADD_BY_EXPERT.stride)
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        pair = simd.load_i64(load_argument(a, ADD_BY_EXPERT.pairs) + row * 8)
        expert = simd.load_i64(load_argument(a, ADD_BY_EXPERT.chosen) + pair * 8)
        x, y = load_argument(a, ADD_BY_EXPERT.x) + row * stride, load_argument(a, ADD_BY_EXPERT.y) + row * stride
        z = load_argument(a, ADD_BY_EXPERT.z) + expert * load_argument(a, ADD_BY_EXPERT.z_stride)
        for i in range(0, load_argument(a, ADD_BY_EXPERT.columns) * 4, 64):
            simd.store_f32x16(y + i, simd.load_f32x16(x + i) + simd.load_f32x16(z + i))
