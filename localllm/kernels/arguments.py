"""The arguments of every kernel, by name: the engine fills them in, kernels and tests read them.

A kernel gets the address of an array of int64. A declaration has a name for each index of that array: `ADD.x` is 1, so
a kernel reads `argument(a, ADD.x)`, and `in_order("add", values)` makes the array from values by name. A float32 is
passed as its bits. This module does not import Numba.

Names that mean the same in every declaration:

- count: the address of the number of tokens, an int64
- x, y: addresses of the input and of the result, float32 [tokens, columns] unless stated otherwise; rows are padded to
  16 columns
- stride, x_stride, y_stride: bytes from one token's row to the next. A kernel touches the columns and their padding
  only, not what the stride has beyond them
- columns: numbers in a row
- scratch, scratch_bytes: temporary memory; each thread has scratch_bytes
- an argument "or 0" is an address that may be 0, for none
- kernel_tokens: the address of the number of tokens by which a kernel chooses how it computes, an int64; it may differ
  from the number of tokens in the run, see localllm/engine/run.py

A comment of the form "y = ..." says what the kernel of that declaration computes. The words are defined in
localllm/kernels/__init__.py.
"""

from collections.abc import Mapping
from typing import Any

from localllm.kernels.declaration import arguments
from localllm.kernels.verbs import ROWWISE

PAGE = 64  # positions in a page of the KV cache


# Row-wise operations, see localllm.kernels.verbs.
RMS_NORM = ROWWISE["rms_norm"].arguments
LAYER_NORM = ROWWISE["layer_norm"].arguments
ADD = ROWWISE["add"].arguments
MULTIPLY = ROWWISE["multiply"].arguments
SWIGLU = ROWWISE["swiglu"].arguments
GEGLU = ROWWISE["geglu"].arguments
SWIGLU_LIMITED = ROWWISE["swiglu_limited"].arguments
GELU = ROWWISE["gelu"].arguments
RELU_SQUARED = ROWWISE["relu_squared"].arguments
SIGMOID = ROWWISE["sigmoid"].arguments
SOFTPLUS = ROWWISE["softplus"].arguments
SCALE = ROWWISE["scale"].arguments
CLAMP = ROWWISE["clamp"].arguments
SOFTCAP = ROWWISE["softcap"].arguments
SIGMOID_GATE = ROWWISE["sigmoid_gate"].arguments
LERP = ROWWISE["lerp"].arguments
MULTIPLY_HEADS = ROWWISE["multiply_heads"].arguments
SOFTMAX = ROWWISE["softmax"].arguments
SINKHORN = ROWWISE["sinkhorn"].arguments
# y f32 [tokens, heads] = the sum of x * z over the head_dim columns of each head.
HEAD_DOTS = arguments("count x x_stride z heads head_dim y stride")
# y f32 [tokens, output streams, width] = the sum over the input streams of weight * x; x f32 [tokens, streams, width],
# weights f32 [tokens, output streams, streams]; columns: output streams * width.
MIX_STREAMS = arguments("count x x_stride streams width weights weights_stride y stride columns")
# x[t] = row ids[t] of the embedding matrix, whose rows have `row_bytes` bytes each; ids int64.
EMBED = arguments("count weights row_bytes columns ids x stride")
# y[t] = table[ids[t]], all int64.
REPLACE_IDS = arguments("count ids table y")
# y[t] = ids[t] + 1, float32 [tokens, 1]; ids int64.
AS_COLUMN = arguments("count ids y stride")
# y[t] = first + (the exclusive or over i of factors[i] * ids[t, i]) % size. x f32 [tokens, length or more]: ids plus 1,
# of the token and of those before it, the latest first; 0: no token. From the first predecessor that is missing or
# `end` on, all count as `end`. factors int64 [length], y int64.
HASH = arguments("count x stride factors length size first end y")
# y[i] = x[rows[i]]; rows int64.
SELECT = arguments("count x rows y stride columns")
# y[i] = one row for the rows of x of sequence i of the run: their mean (kind 0), the first (1) or the last (2).
POOL = arguments("count sequences x y stride columns kind")
# y f32 [tokens, columns] = columns of x: columns / groups consecutive ones of each of `groups` periods of `period`
# columns, beginning with number `first` of the period.
SLICE_COLUMNS = arguments("count x x_stride first groups period y stride columns")
# y f32 [tokens, heads, x_columns + z_columns] = each head's columns of x, then those of z. shared 1: z has no heads,
# and every head of y gets the same z_columns.
CONCAT_HEADS = arguments("count x x_stride x_columns z z_stride z_columns shared heads y stride")
# CUDA: total = x + z, y = RMS_NORM of whole rows of total; total may be x.
ADD_RMS_NORM = arguments("count x z weight total y stride columns epsilon")
# CUDA: y = ROPE of RMS_NORM of each head of x; weight f32 [heads, head_dim]; y may be x.
RMS_NORM_ROPE = arguments("count x weight epsilon y stride heads head_dim table pairs step apart")
# y = x * (1 + slope * log(floor((position + offset) / length) + 1)); positions int64.
SCALE_BY_POSITION = arguments("count x positions slope length offset y stride columns")
# y = x, rounded to BF16.
ROUND_BF16 = arguments("count x stride y y_stride columns")
# table f32 [tokens, 2, pairs]: `factor` times cosine and sine of (position - before) * frequencies (f64 [pairs]);
# positions int64.
ANGLES = arguments("count positions before frequencies pairs table factor")
# y [tokens, heads, head_dim] = x with `pairs` pairs of numbers of each head rotated. Pair k is numbers k * step and k *
# step + apart: step 2 and apart 1 for interleaved pairs, step 1 and apart `pairs` for split halves. y may be x; table:
# the result of ANGLES.
ROPE = arguments("count x y stride heads head_dim table pairs step apart")
# y = x without padding, float32 [tokens, columns]; the argument y is the address of y's address. flaws: address of an
# int64 that is increased if a number is not finite.
LOGITS = arguments("count x stride columns y flaws")
# x as integers, see quantize.py:
# - high, low int8 [tokens, columns]: the two planes; words int16 [tokens, columns] or 0: both planes in one number, for
#   CPUs that multiply 16-bit words (avx2_dots.py)
# - scales f32 [tokens, columns / 16], each twice, since 32 columns share one
# - sums f32 [tokens, columns / 16] of both planes (sums_*) and of the high plane (high_sums_*); *_32: over 32 columns,
#   each twice; *_16: over 16 columns
# - excess int32 [tokens, columns / 32], or int16 [tokens, columns / 16] where words are multiplied
# most_precise: address of the number of kernel_tokens up to which every 32 columns have a scale of their own.
QUANTIZE = arguments(
    "count x stride columns high low words scales sums_32 sums_16 high_sums_32 high_sums_16 excess most_precise"
    " kernel_tokens"
)
# y = W x; W [rows, columns] in blocks, x as QUANTIZE makes it. sums, high_sums: those over as many columns as a
# sub-block of the format has. most_precise: address of the number of kernel_tokens up to which both planes are
# multiplied. variants int64: addresses of the kernel variants; few_tokens, few_fast: see kernel_variants.py.
LINEAR_QUANTIZED = arguments(
    "count weights row_bytes rows columns high low scales sums high_sums y y_stride most_precise scratch scratch_bytes"
    " excess variants few_tokens few_fast words kernel_tokens"
)
# x as 16-bit integers, see gemm_f16_words.py. A row of y: int16 [columns], then scales f32 [columns / 32].
QUANTIZE_WORDS = arguments("count x stride y y_stride columns")
# y = W x in float32. halves, or 0: x as ROUND_BF16 makes it if W is BF16, as QUANTIZE_WORDS makes it if W is F16.
# most_precise: number of kernel_tokens above which these are multiplied instead of x.
LINEAR_FLOAT = arguments(
    "count weights row_bytes rows columns x x_stride y y_stride scratch scratch_bytes halves halves_stride most_precise"
    " kernel_tokens"
)
# tiles = 32 rows of W, `columns` columns from number `column` on, as BF16 tiles (amx/slab.py). weights: address of the
# first row; last: number of the last row that exists, which also fills the rows after it; exact 1: write the low plane,
# too; row: memory for one row in float32.
UNPACK = arguments("weights row_bytes last column columns exact tiles row")
# panels = x as BF16 tiles, in panels of 16 tokens (amx/pack.py); nothing is written if kernel_tokens are fewer than
# `least`. most_exact: address of the number of kernel_tokens up to which the low plane is written, too. active, or 0:
# address of the EXPERTs whose rows x has, each of which begins a new panel; active_count: address of their number.
PACK = arguments(
    "count x stride columns panels slab_bytes most_exact least active active_count scratch scratch_bytes kernel_tokens"
)
# The further arguments of a product in AMX tiles. few: address of the kernel for fewer than `least` kernel_tokens,
# which gets the same arguments; unpack: address of the kernel that unpacks W; panels, slab_bytes: x as PACK makes it;
# most_exact: address of the number of kernel_tokens up to which both planes are multiplied.
OF_TILES = " few unpack panels slab_bytes most_exact least"
LINEAR_TILES_QUANTIZED = arguments(" ".join(LINEAR_QUANTIZED._fields) + OF_TILES)
LINEAR_TILES_FLOAT = arguments(" ".join(LINEAR_FLOAT._fields) + OF_TILES)
# A record per sequence of a run, for kernels that use the KV cache or recurrent states. first: its first token in the
# run; count: its tokens in the run; length: its tokens after the run; table: address of its page table, int64; state,
# next_state: addresses of its recurrent states before and after the run, which may be equal; encoded: its tokens that
# an encoder has read; kernel_tokens: the number itself, for this sequence.
SEQUENCE = arguments("first count length table state next_state encoded kernel_tokens")
# y = x, each `block` columns (a power of 2) times an orthonormal Hadamard matrix; y may be x.
HADAMARD = arguments("count x y stride columns block")
# Copy the heads of x, keys or values, to the cache slots of their tokens (store), or from there to x (recall). owners
# int64 [tokens]: the number of each token's sequence; base: address of the cache's first slot.
STORE = arguments("count positions owners sequences x stride base head_stride token_bytes heads head_dim")
# The work of attention in a run, made once for all layers of the same shape: UNITs, their number, and a SPLIT per
# token. window: how many latest keys a token sees, 0 for all; chunked 1: instead, positions are divided into chunks of
# `window` tokens, and a token sees its own chunk; lookahead: how many later keys it sees. cross_attention 1: tokens see
# the sequence's first `encoded` keys only; 0: they see all but those.
PLAN = arguments(
    "sequences sequence_count heads kv_heads window chunked lookahead cross_attention units unit_count splits"
)
# A unit of attention: `rows` rows (row = token * group + query head in its group) and the keys from position `begin` to
# `end`, except those before `lowest`. split: the number of the part, if a context is split; few 1: the rows read the
# cache directly (attention/few.py).
UNIT = arguments("table kv_head first_row rows lowest begin end split few")
# The number of parts that a token's context is split into, and the slot of its partial results.
SPLIT = arguments("count slot")
# y = softmax(q k^T * scale) v, see attention/attend.py. A softcap other than 0 replaces each score by softcap *
# tanh(score / softcap).
# - slopes, or 0: f32 [query heads]; slope * distance is subtracted from a score (ALiBi)
# - sinks, or 0: f32 [query heads], the score of an extra key whose value is zero
# - biases, or 0: f32 [query heads, 16 + 2 * reach + 1 + 16], added to scores. Number 16 + reach + d is for a key d
#   positions after the query; the first 17 numbers are equal, and so are the last 17
# - chosen, or 0: a bit for each key that a token sees, chosen_stride bytes per token, choice_stride per key-value head
# - period: only the last key of every `period` counts; 1: all
# - logs 1: after the heads of a row of y, the logarithm of each head's sum of exponentials is stored, too
# - partial f32 [slots, query heads, parts of a context, 32 + value_dim padded to 16]
ATTEND = arguments(
    "count positions q q_stride y y_stride units unit_count splits keys values key_head_stride value_head_stride"
    " key_bytes value_bytes heads kv_heads key_dim value_dim scale softcap window chunked period lookahead"
    " cross_attention slopes biases reach sinks logs chosen chosen_stride choice_stride partial scratch scratch_bytes"
)
# CUDA: ATTEND for few tokens, see cuda/attention/attend_few.py. A context is split into up to `parts` parts; the query
# heads of a group are processed in `bundles` bundles, each by a thread block. partial f32 [tokens, heads, parts,
# partial_bytes / 4]: the largest score, the sum of the weights, 2 unused numbers, then the values.
ATTEND_FEW = arguments(
    "count positions owners sequences q q_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked period lookahead slopes chosen chosen_stride choice_stride bundles"
    " parts partial partial_bytes"
)
# CUDA: y = the merged partial results of ATTEND_FEW, including the heads' sinks.
MERGE_FEW = arguments(
    "count positions owners sequences heads value_dim window chunked lookahead sinks logs chosen chosen_stride"
    " choice_stride kv_heads parts partial partial_bytes y y_stride"
)
# CUDA: ATTEND for many tokens, see cuda/attention/attend_many.py.
ATTEND_MANY = arguments(
    "sequences sequence_count q q_stride y y_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked lookahead slopes sinks"
)
# Sparse attention: y = for each token a row of bits, one per key up to its own, set for the `most` blocks of `block`
# keys with the largest scores. The score is the sum over heads of weight * max(q k, 0), k being the block's last key;
# weights f32 [tokens, heads]; the keys have a single head.
SELECT_KEYS = arguments(
    "count positions owners sequences q q_stride weights weights_stride keys key_bytes key_dim heads most block y"
    " y_stride scratch scratch_bytes"
)
# Sparse attention for each head separately: the `most` blocks with the largest q k of any of their keys; the last
# `local` blocks are always among them. The bits of a head follow those of the previous head after choice_stride bytes.
SELECT_KEY_BLOCKS = arguments(
    "count positions owners sequences q q_stride keys key_bytes key_dim heads most block local y y_stride choice_stride"
    " scratch scratch_bytes"
)
# Recurrent layers. offset: the layer's offset, in bytes, in the memory at SEQUENCE.state and SEQUENCE.next_state.
# y[t] = s, or s * sigmoid(s) if silu is 1, with s = bias + the sum over taps of weights[tap] * x[t - taps + 1 + tap];
# weights f32 [taps, columns padded to 16]. The state, f32 [taps - 1, columns padded to 16], is the x of the last tokens
# before the run.
CONVOLVE = arguments("sequences sequence_count offset taps weights bias silu x y stride columns")
# y[t] = the sum over taps of p[tap] * v[t - taps + 1 + tap], p being the softmax over the taps with tokens of gates[t -
# taps + 1 + tap] + places[tap]. x f32 [tokens, 2 * stretches * columns]: the v of each stretch, then its gates; taps
# are divided evenly among the stretches, and a tap uses the columns of its stretch. places f32 [taps, columns padded to
# 16]. The state, f32 [taps - 1, 2 * stretches * columns padded to 16], is the x of the last tokens before the run.
GATED_MEAN = arguments("sequences sequence_count offset taps stretches places x x_stride y stride columns")
# Mamba: for each column and token h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x; state h and rates f32
# [columns / 16, state_size, 16]; b and c f32 [tokens, state_size].
SELECTIVE_SCAN = arguments(
    "sequences sequence_count offset x dt b c state_stride rates skip y stride columns state_size"
)
# For each head and token h = e^(dt * rate) * h + k d, y = q h + skip * v, with d = v * strength (Mamba 2), or by the
# delta rule d = (v - k h) * strength with h after its decay. dt, strength f32 [tokens, heads]; rates, skip f32 [heads];
# head i uses query and key head i / repeat % key_heads. State h f32 [heads, value_dim / 16, key_dim, 16].
HEAD_SCAN = arguments(
    "sequences sequence_count offset q k key_stride v y stride dt strength head_stride rates skip heads key_heads"
    " repeat key_dim value_dim"
)
# For each head and token h = diag(w) h + k v^T + b (a h), y = r h; r, w, k, a, b f32 [tokens, heads * key_dim].
# wkv-gated and wkv-first have no a and b; in wkv-first y = r (h + diag(first) k v^T) with h before this token, first
# f32 [heads * key_dim]. State h as in HEAD_SCAN.
WKV = arguments("sequences sequence_count offset r w k v a b first key_stride y stride heads key_dim value_dim")
# sums f32 [columns padded to 16] += x^2 over the tokens.
ADD_SQUARES = arguments("count x stride columns sums")
# For each expert that PLAN_EXPERTS lists: sums f32 [experts, columns padded to 16] += x^2 over its rows, counts int64
# [experts] += the number of its rows; sums_stride: bytes from one expert's sums to the next.
ADD_EXPERT_SQUARES = arguments("active active_count x stride columns sums sums_stride counts")
# Mixture of experts: chosen int64 [tokens, used] = the experts of each token, weights f32 [tokens, used] = their
# weights.
# - logits f32 [tokens, experts]. Scores are their softmax, or sigmoid, or (rooted) the square root of their softplus
# - normalized 1: the weights of a token add up to `scale`; 0: a weight is score * scale
# - bias, or 0: f32 [experts], added to the scores for the choice, not for the weights
# - groups, groups_used: experts are divided into groups, and only those of the best groups can be chosen
# - together: so many consecutive logits belong to one expert
# - table, or 0: int64 [vocab, used], the experts by token id (ids int64 [tokens]), used instead of a choice
ROUTE = arguments(
    "count logits stride experts used sigmoid rooted normalized scale groups groups_used together bias ids table chosen"
    " weights scratch scratch_bytes"
)
# An expert that has rows in this run: its number, its first row, and the number of its rows.
EXPERT = arguments("number first count")
# Sorts pairs of a token and one of its experts (pair = token * used + index in chosen) by expert; each pair gets a row.
# active: the EXPERTs that have rows; active_count: their number; rows int64 [pairs]: the row of each pair; pairs int64
# [rows]: the pair of each row; row_count: the number of rows, including padding between experts; next_rows int64
# [experts]: temporary memory.
PLAN_EXPERTS = arguments("count chosen used experts next_rows active active_count rows pairs row_count")
# y[row] = x[token] of the row's pair, times the pair's weight unless weights is 0. count: address of the number of
# rows; part_bytes: distance, in a row of x, of the columns for a token's first expert, its second one, and so on; 0:
# all get the same columns.
GATHER = arguments("count pairs used x x_stride weights part_bytes y stride columns")
# y[token] = x[row] of each of the token's pairs, `columns` columns each, one after the other.
FROM_HEADS = arguments("count rows used x x_stride y stride columns")
# y[token] = the sum over the token's pairs of x[row], times the pair's weight unless weights is 0.
SCATTER = arguments("count rows used x x_stride weights y stride columns")
# y[row] = x[row] + z[expert of the row's pair]; count: address of the number of rows.
ADD_BY_EXPERT = arguments("count pairs chosen x z z_stride y stride columns")
# y[row] = W[expert of the row] x[row]: the arguments of a product with one matrix, for expert 0 and row 0, and
# - linear: address of the kernel for one matrix
# - by_row int64 [by_row_count, 2]: for each argument of `linear` that is the address of row 0, its index and the bytes
#   from row to row
# - active, active_count: the experts that have rows, from PLAN_EXPERTS; expert_bytes: bytes of an expert's matrix
# - slices: in how many parts each product is computed
OF_EXPERTS = " linear by_row by_row_count active active_count expert_bytes slices"
EXPERTS_QUANTIZED = arguments(" ".join(LINEAR_QUANTIZED._fields) + OF_EXPERTS)
EXPERTS_FLOAT = arguments(" ".join(LINEAR_FLOAT._fields) + OF_EXPERTS)
EXPERTS_TILES_QUANTIZED = arguments(" ".join(LINEAR_TILES_QUANTIZED._fields) + OF_EXPERTS)
EXPERTS_TILES_FLOAT = arguments(" ".join(LINEAR_TILES_FLOAT._fields) + OF_EXPERTS)
# CUDA: convert quantized weights to planes, see cuda/matmul/planes.py. blocks: weights number `first` to `last` of a
# matrix, whole blocks as in the file; planes: address of the whole converted matrix.
TO_PLANES = arguments("blocks first last columns planes row_bytes")
# CUDA: x as integers, see cuda/matmul/quantize.py: codes int8 [tokens, 4, columns / 32, 16], scales f32 [tokens,
# columns / 32], sums f32 [tokens, columns / 16].
QUANTIZE_PLANES = arguments("count x stride columns codes scales sums")
# CUDA: RMS_NORM of whole rows, or SWIGLU, and then QUANTIZE_PLANES of y. y may be an input.
NORM_QUANTIZE = arguments(" ".join(RMS_NORM._fields) + " codes scales sums")
SWIGLU_QUANTIZE = arguments(" ".join(SWIGLU._fields) + " codes scales sums")
# CUDA: y = W x, x as QUANTIZE_PLANES makes it. Unless active_count is 0, each expert that PLAN_EXPERTS lists is
# multiplied with its rows of x; experts: the number of experts, whose matrices are expert_bytes apart.
LINEAR_PLANES = arguments(
    "count weights row_bytes rows columns codes scales sums y y_stride active active_count expert_bytes experts"
)
# CUDA: LINEAR_PLANES for weights in F32, F16 or BF16 and x in float32.
LINEAR_PLAIN = arguments(
    "count weights row_bytes rows columns x x_stride y y_stride active active_count expert_bytes experts"
)
# CUDA: y f16 [rows, columns] = `rows` rows of W from number `first` on.
UNPACK_MATRIX = arguments("weights row_bytes columns first rows y")
# Reads `size` bytes at `memory`; results: 64 bytes for each part, the exclusive or of all that it has read.
STREAM = arguments("memory size results")
# Multiplies in registers, `rounds` times; memory: PEAK_BYTES for each part.
PEAK = arguments("memory rounds")
# CUDA: y = x / scale in float16, scales f32 [tokens]; and y = y * scale.
HALVE = arguments("count x stride columns y y_stride scales")
SCALE_ROWS = arguments("count y stride columns scales")
# CUDA: x = high + low, both BF16.
SPLIT_BF16 = arguments("count x stride columns high low y_stride")
# CUDA: copy `words` int64 from host memory to GPU memory.
FETCH = arguments("source target words")

KERNELS: dict[str, Any] = {
    **{name: verb.arguments for name, verb in ROWWISE.items()},
    "fetch": FETCH,
    "halve": HALVE,
    "scale_rows": SCALE_ROWS,
    "split_bf16": SPLIT_BF16,
    "embed": EMBED,
    "replace_ids": REPLACE_IDS,
    "as_column": AS_COLUMN,
    "hash": HASH,
    "select": SELECT,
    "pool": POOL,
    "slice_columns": SLICE_COLUMNS,
    "concat_heads": CONCAT_HEADS,
    "add_rms_norm": ADD_RMS_NORM,
    "rms_norm_rope": RMS_NORM_ROPE,
    "scale_by_position": SCALE_BY_POSITION,
    "round_bf16": ROUND_BF16,
    "quantize_words": QUANTIZE_WORDS,
    "angles": ANGLES,
    "rope": ROPE,
    "logits": LOGITS,
    "quantize": QUANTIZE,
    "linear_quantized": LINEAR_QUANTIZED,
    "linear_float": LINEAR_FLOAT,
    "unpack_groups": UNPACK,
    "unpack_rows": UNPACK,
    "pack": PACK,
    "linear_tiles_quantized": LINEAR_TILES_QUANTIZED,
    "linear_tiles_float": LINEAR_TILES_FLOAT,
    "store": STORE,
    "recall": STORE,
    "hadamard": HADAMARD,
    "select_keys": SELECT_KEYS,
    "select_key_blocks": SELECT_KEY_BLOCKS,
    "plan": PLAN,
    "attend": ATTEND,
    "attend_tiles": ATTEND,
    "merge": ATTEND,
    "attend_few": ATTEND_FEW,
    "merge_few": MERGE_FEW,
    "attend_many": ATTEND_MANY,
    "route": ROUTE,
    "plan_experts": PLAN_EXPERTS,
    "gather": GATHER,
    "scatter": SCATTER,
    "from_heads": FROM_HEADS,
    "add_by_expert": ADD_BY_EXPERT,
    "experts_quantized": EXPERTS_QUANTIZED,
    "experts_float": EXPERTS_FLOAT,
    "experts_tiles_quantized": EXPERTS_TILES_QUANTIZED,
    "experts_tiles_float": EXPERTS_TILES_FLOAT,
    "convolve": CONVOLVE,
    "gated_mean": GATED_MEAN,
    "selective_scan": SELECTIVE_SCAN,
    "head_scan": HEAD_SCAN,
    "wkv": WKV,
    "head_dots": HEAD_DOTS,
    "mix_streams": MIX_STREAMS,
    "add_squares": ADD_SQUARES,
    "add_expert_squares": ADD_EXPERT_SQUARES,
    "stream": STREAM,
    "multiply_peak": PEAK,
    "multiply_peak_tiles": PEAK,
    "to_planes": TO_PLANES,
    "quantize_planes": QUANTIZE_PLANES,
    "norm_quantize": NORM_QUANTIZE,
    "swiglu_quantize": SWIGLU_QUANTIZE,
    "linear_planes": LINEAR_PLANES,
    "linear_plain": LINEAR_PLAIN,
    "unpack": UNPACK_MATRIX,
}


def in_order(kernel: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the values in the order of a kernel's arguments.

    kernel: its name, which may end with a format, as in embed-Q8_0; values: by argument name. Raises TypeError if a
    name is missing or unknown.
    """
    names = KERNELS[kernel.partition("-")[0]]._fields
    if len(names) != len(values):
        raise TypeError(f"{kernel}: expected {', '.join(names)}; found {', '.join(values)}")
    try:
        return [values[name] for name in names]
    except KeyError as error:
        raise TypeError(f"{kernel}: {error} is missing") from None
