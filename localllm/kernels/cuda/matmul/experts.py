"""Mixtures of experts: routing as in cpu/matmul/experts.py, and copies of rows in both orders.

The orders are those of tokens and of experts. `route` has a warp for each token. `plan_experts` is a single block, each
of whose threads searches the pairs (token, one of its experts) of one expert, in the order of the tokens. So an
expert's rows are the same each time.
"""

import math

from numba import cuda, float32, int32, int64

from localllm.kernels.cuda import MAX_EXPERTS, gpu
from localllm.kernels.cuda.elementwise.formulas import compute_first_column
from localllm.kernels.cuda.gpu import BLOCK  # a size of shared memory must be a constant of this module
from localllm.kernels.table import EXPERT

ZERO, ONE, NAN = float32(0), float32(1), float32(math.nan)
MINUS_INFINITY = float32(-math.inf)
MIN_SUM = float32(6.103515625e-5)  # the minimum divisor of weights, as in llama.cpp
NUMBER, FIRST, COUNT, EXPERT_BYTES = 8 * EXPERT.number, 8 * EXPERT.first, 8 * EXPERT.count, 8 * len(EXPERT)


@gpu.device
def compute_root_of_softplus(x):
    return float32(math.sqrt(max(x, ZERO) + gpu.log1p(gpu.exp(-abs(x)))))


@gpu.device
def score_all(logits, experts, is_sigmoid, is_rooted, scores):
    """Compute a token's scores: softmax, sigmoid, or square root of softplus."""
    top, total = MINUS_INFINITY, ZERO
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        top = max(top, gpu.load_f32(logits + 4 * e))
    top = gpu.warp_max(top)
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        logit = gpu.load_f32(logits + 4 * e)
        scores[e] = ONE / (ONE + gpu.exp(-logit)) if is_sigmoid == 1 else gpu.exp(logit - top)
        scores[e] = compute_root_of_softplus(logit) if is_rooted == 1 else scores[e]
        total += scores[e]
    if is_sigmoid == 0 and is_rooted == 0:
        total = gpu.warp_sum(total)
        for e in range(gpu.get_lane(), experts, gpu.WARP):
            scores[e] /= total


@gpu.device
def rank_all(logits, experts, bias, groups, scores, ranks):
    """Compute the ranks by which experts are selected.

    They are scores plus bias if there is a bias, scores if there are groups, otherwise logits.
    """
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        ranks[e] = scores[e] if bias != 0 or groups > 1 else gpu.load_f32(logits + 4 * e)
        if bias != 0:
            ranks[e] += gpu.load_f32(bias + 4 * e)


@gpu.device
def mask_groups(experts, groups, groups_used, ranks, values):
    """Set the ranks of experts outside the best groups to minus infinity.

    Groups are compared by the sum of their two best ranks.
    """
    size = experts // groups
    for g in range(gpu.get_lane(), groups, gpu.WARP):
        best, second = MINUS_INFINITY, MINUS_INFINITY
        for e in range(g * size, (g + 1) * size):
            second = max(second, min(best, ranks[e]))
            best = max(best, ranks[e])
        values[g] = best + second
    gpu.synchronize_warp()
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        value, better = values[e // size], 0
        for g in range(groups):
            if values[g] > value or (values[g] == value and g < e // size):
                better += 1
        if better >= groups_used:
            ranks[e] = MINUS_INFINITY


@gpu.device
def pop_best(ranks, experts):
    """Return the index of the largest rank to all lanes, and set that rank to minus infinity.

    Of equal ranks, it is the first.
    """
    largest, best = MINUS_INFINITY, int64(0)
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        if ranks[e] > largest:
            largest, best = ranks[e], int64(e)
    mask = gpu.WARP // 2
    while mask > 0:
        other, place = gpu.load_from_lane(largest, mask), int64(gpu.load_from_lane(float32(best), mask))
        if other > largest or (other == largest and place < best):
            largest, best = other, place
        mask //= 2
    if best % gpu.WARP == gpu.get_lane():  # only this lane reads it
        ranks[best] = MINUS_INFINITY
    return best


def route(
    count, logits, stride, experts, used, sigmoid, rooted, normalized, scale, groups, groups_used, together, bias, ids,
    table, chosen, weights, scratch, scratch_bytes,
):  # fmt: skip
    """Select the experts of each token, and compute their weights, which are NaN if a logit is not finite."""
    token = cuda.blockIdx.x
    if token >= gpu.load_i64(count):
        return
    scores = cuda.shared.array(MAX_EXPERTS, float32)  # the simulator needs each on a line of its own
    ranks = cuda.shared.array(MAX_EXPERTS, float32)
    values = cuda.shared.array(MAX_EXPERTS, float32)
    logits, chosen, weights = logits + token * stride, chosen + 8 * token * used, weights + 4 * token * used
    zeros = ZERO
    for e in range(gpu.get_lane(), experts, gpu.WARP):
        zeros += gpu.load_f32(logits + 4 * e) * ZERO  # NaN if one is not finite
    if gpu.warp_sum(zeros) != ZERO:
        for i in range(gpu.get_lane(), used, gpu.WARP):
            gpu.store_i64(chosen + 8 * i, i)
            gpu.store_f32(weights + 4 * i, NAN)
        return
    score_all(logits, experts, sigmoid, rooted, scores)
    rank_all(logits, experts, bias, groups, scores, ranks)
    gpu.synchronize_warp()
    if groups > 1:
        mask_groups(experts, groups, groups_used, ranks, values)
    total, factor = ZERO, gpu.decode_f32(scale)
    for i in range(used):
        if table != 0:
            expert = gpu.load_i64(table + 8 * (gpu.load_i64(ids + 8 * token) * used + i))
        else:
            expert = pop_best(ranks, experts) // together
        total += scores[expert]
        if gpu.get_lane() == 0:
            gpu.store_i64(chosen + 8 * i, expert)
            gpu.store_f32(weights + 4 * i, scores[expert])
    if normalized == 1:
        factor /= max(total, MIN_SUM)
    if gpu.get_lane() == 0:
        for i in range(used):
            gpu.store_f32(weights + 4 * i, gpu.load_f32(weights + 4 * i) * factor)


@gpu.device
def load_pairs(chosen, first, total, numbers):
    """Load the experts of the next pairs to shared memory; return the number of pairs.

    first: index of the first pair.
    """
    pair = first + cuda.threadIdx.x
    cuda.syncthreads()  # until the previous experts have been read
    numbers[cuda.threadIdx.x] = int32(gpu.load_i64(chosen + 8 * pair)) if pair < total else int32(-1)
    cuda.syncthreads()
    return min(gpu.BLOCK, total - first)


def plan_experts(count, chosen, used, experts, next_rows, active, active_count, rows, pairs, row_count):
    """Assign a row to each pair, sorted by expert, with a thread for each expert."""
    numbers = cuda.shared.array(BLOCK, int32)
    total, next_row, next_place = gpu.load_i64(count) * used, int64(0), int64(0)
    for base in range(0, experts, gpu.BLOCK):
        expert, own_count = base + cuda.threadIdx.x, int32(0)
        for start in range(0, total, gpu.BLOCK):
            for i in range(load_pairs(chosen, start, total, numbers)):
                own_count += int32(numbers[i] == expert)
        cuda.syncthreads()
        numbers[cuda.threadIdx.x] = own_count
        cuda.syncthreads()
        row, place = next_row, next_place
        for i in range(gpu.BLOCK):
            next_row, next_place = next_row + numbers[i], next_place + (numbers[i] > 0)
            if i < cuda.threadIdx.x:
                row, place = next_row, next_place
        if own_count > 0:
            gpu.store_i64(active + place * EXPERT_BYTES + NUMBER, expert)
            gpu.store_i64(active + place * EXPERT_BYTES + FIRST, row)
            gpu.store_i64(active + place * EXPERT_BYTES + COUNT, int64(own_count))
        for start in range(0, total, gpu.BLOCK):
            for i in range(load_pairs(chosen, start, total, numbers)):
                if numbers[i] == expert:
                    gpu.store_i64(rows + 8 * (start + i), row)
                    gpu.store_i64(pairs + 8 * row, start + i)
                    row += 1
    if cuda.threadIdx.x == 0:
        gpu.store_i64(row_count, next_row)
        gpu.store_i64(active_count, next_place)


def gather(count, pairs, used, x, x_stride, weights, part_bytes, y, stride, columns):
    row, column = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if row < gpu.load_i64(count) and column < columns:
        pair = gpu.load_i64(pairs + 8 * row)
        source = x + pair // used * x_stride + pair % used * part_bytes
        weight = gpu.load_f32(weights + 4 * pair) if weights != 0 else ONE
        gpu.store_f32(y + row * stride + 4 * column, gpu.load_f32(source + 4 * column) * weight)


def from_heads(count, rows, used, x, x_stride, y, stride, columns):
    token, place = cuda.blockIdx.x, cuda.blockIdx.y
    if token >= gpu.load_i64(count):
        return
    source = x + gpu.load_i64(rows + 8 * (token * used + place)) * x_stride
    target = y + token * stride + 4 * place * columns
    for column in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        gpu.store_f32(target + 4 * column, gpu.load_f32(source + 4 * column))


def scatter(count, rows, used, x, x_stride, weights, y, stride, columns):
    token, column = cuda.blockIdx.x, compute_first_column()
    if token < gpu.load_i64(count) and column < columns:
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        for pair in range(token * used, (token + 1) * used):
            weight = gpu.load_f32(weights + 4 * pair) if weights != 0 else ONE
            e, f, g, h = gpu.load_4f32(x + gpu.load_i64(rows + 8 * pair) * x_stride + 4 * column)
            a, b, c, d = a + e * weight, b + f * weight, c + g * weight, d + h * weight
        gpu.store_4f32(y + token * stride + 4 * column, a, b, c, d)


def add_by_expert(count, pairs, chosen, x, z, z_stride, y, stride, columns):
    row, column = cuda.blockIdx.x, compute_first_column()
    if row < gpu.load_i64(count) and column < columns:
        expert, at = gpu.load_i64(chosen + 8 * gpu.load_i64(pairs + 8 * row)), row * stride + 4 * column
        a, b, c, d = gpu.load_4f32(x + at)
        e, f, g, h = gpu.load_4f32(z + expert * z_stride + 4 * column)
        gpu.store_4f32(y + at, a + e, b + f, c + g, d + h)
