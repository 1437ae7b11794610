"""The table of kernels.

Each row has arguments, the modules for CPUs and for GPUs, and the grid on GPUs. A kernel gets the address of an array
of int64. A row's arguments have a name for each index of that array: `ADD.x` is 1, so a kernel reads `argument(a,
ADD.x)`, and `in_order("add", values)` builds the array from values by name. A float32 is passed as its bits. This
module does not import Numba.

Names that have the same meaning in every row:

- count: the address of the number of tokens, an int64
- x, y: addresses of the input and of the result, float32 [tokens, columns] unless stated otherwise; rows are padded to
  16 columns
- stride, x_stride, y_stride: bytes from one token's row to the next. A kernel touches the columns and their padding
  only, not the rest of the stride
- columns: number of values in a row
- scratch, scratch_bytes: temporary memory; each thread has scratch_bytes
- an argument "or 0" is an address that may be 0, for none
- kernel_tokens: the address of the token count that selects a kernel's method, an int64; it may differ from the number
  of tokens in the run, see localllm/engine/runs.py

A comment of the form "y = ..." defines the result of the row's kernel. The rows of formulas are in
localllm/kernels/formulas.py. The vocabulary is defined in localllm/kernels/__init__.py.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from localllm.kernels.declaration import KERNELS, declare_arguments, declare_kernel
from localllm.kernels.formulas import FORMULAS as FORMULAS

PAGE = 64  # positions in a page of the KV cache
MAX_ADAPTERS = 16  # of a model: the scales of a token fill a cache line


# y = x / sqrt(mean(x^2) + epsilon) * weight, the mean of each `group` columns.
RMS_NORM = declare_kernel(
    "rms_norm", "count x weight y stride columns group epsilon", "elementwise.rowwise", "by_norm", "x", in_place=True
)
# y = (x - mean) / sqrt(variance + epsilon) * weight + bias, for each `group` columns.
LAYER_NORM = declare_kernel(
    "layer_norm",
    "count x weight bias y stride columns group epsilon",
    "elementwise.rowwise",
    "by_norm",
    "x",
    in_place=True,
)
# y = x * sigmoid(gate of the row), gate f32 [rows, 1].
SIGMOID_GATE = declare_kernel(
    "sigmoid_gate", "count x gate gate_stride y stride columns", "elementwise.formulas", "by_four", "x gate"
)
# y = e^x / the sum of them, of each row.
SOFTMAX = declare_kernel("softmax", "count x y stride columns", "elementwise.heads", "by_token", "x", in_place=True)
# y = a matrix of `size` rows whose rows and columns add up to 1, transposed.
SINKHORN = declare_kernel(
    "sinkhorn", "count x size iterations epsilon y stride columns", "elementwise.heads", "by_token", "x", in_place=True
)
# y = each of the heads' columns of x times its gate, f32 [rows, heads].
MULTIPLY_HEADS = declare_kernel(
    "multiply_heads",
    "count x gates gates_stride heads y stride columns",
    "elementwise.heads",
    "by_entry",
    "x gates",
    in_place=True,
)
declare_kernel("run", "", "tape_runner")
declare_kernel("work", "", "tape_runner")
# y f32 [tokens, heads] = the sum of x * z over the head_dim columns of each head.
HEAD_DOTS = declare_kernel(
    "head_dots", "count x x_stride z heads head_dim y stride", "elementwise.heads", "by_head", "x z"
)
# y f32 [tokens, output streams, width] = the sum over the input streams of weight * x; x f32 [tokens, streams, width],
# weights f32 [tokens, output streams, streams]; columns: output streams * width.
MIX_STREAMS = declare_kernel(
    "mix_streams",
    "count x x_stride streams width weights weights_stride y stride columns",
    "elementwise.heads",
    "by_entry",
    "x weights",
)
# x[t] = row ids[t] of the embedding matrix, whose rows have `row_bytes` bytes each; ids int64.
EMBED = declare_kernel(
    "embed", "count weights row_bytes columns ids x stride", "matmul.matmul_float", "matmul.weights by_row"
)
# y[t] = table[ids[t]], all int64.
REPLACE_IDS = declare_kernel("replace_ids", "count ids table y", "elementwise.rowwise", "by_token")
# y[t] = ids[t] + 1, float32 [tokens, 1]; ids int64.
AS_COLUMN = declare_kernel("as_column", "count ids y stride", "elementwise.rowwise", "by_token", "")
# y[t] = first + (the exclusive or over i of factors[i] * ids[t, i]) % size. x f32 [tokens, length or more]: ids plus 1,
# of the token and of those before it, the latest first; 0: no token. From the first predecessor that is missing or
# `end` on, all count as `end`. factors int64 [length], y int64.
HASH = declare_kernel("hash", "count x stride factors length size first end y", "elementwise.rowwise", "by_token")
# y[i] = x[rows[i]]; rows int64.
SELECT = declare_kernel("select", "count x rows y stride columns", "elementwise.rowwise", "by_four", "x")
# y[i] = one row for the rows of x of sequence i of the run: their mean (kind 0), the first (1) or the last (2).
POOL = declare_kernel("pool", "count sequences x y stride columns kind", "elementwise.rowwise", "by_four", "x")
# y f32 [tokens, columns] = columns of x: columns / groups consecutive ones of each of `groups` periods of `period`
# columns, beginning with column `first` of the period.
SLICE_COLUMNS = declare_kernel(
    "slice_columns", "count x x_stride first groups period y stride columns", "elementwise.rowwise", "by_entry", "x"
)
# y f32 [tokens, heads, x_columns + z_columns] = each head's columns of x, then those of z. shared 1: z has no heads,
# and every head of y gets the same z_columns.
CONCAT_HEADS = declare_kernel(
    "concat_heads",
    "count x x_stride x_columns z z_stride z_columns shared heads y stride",
    "elementwise.rowwise",
    "by_head",
    "x z",
)
# CUDA: total = x + z, y = RMS_NORM of whole rows of total; total may be x.
ADD_RMS_NORM = declare_kernel(
    "add_rms_norm", "count x z weight total y stride columns epsilon", "", "elementwise.rowwise by_norm"
)
# CUDA: y = ROPE of RMS_NORM of each head of x; weight f32 [heads, head_dim]; y may be x.
RMS_NORM_ROPE = declare_kernel(
    "rms_norm_rope",
    "count x weight epsilon y stride heads head_dim table pairs step apart",
    "",
    "elementwise.rowwise by_norm",
)
# y = x * (1 + slope * log(floor((position + offset) / length) + 1)); positions int64.
SCALE_BY_POSITION = declare_kernel(
    "scale_by_position",
    "count x positions slope length offset y stride columns",
    "elementwise.formulas",
    "by_four",
    "x",
)
# y = y + factor * scale * x W, the update of a low-rank adapter (LoRA): x f32 [tokens, rank], weights [rank, columns],
# in the format that the kernel's name ends with, rows of row_bytes padded to whole vectors of 16. scales f32 [tokens of
# the run, MAX_ADAPTERS]: the adapter's scale is at index `adapter` of a token's row. pairs or 0: row t is of token
# pairs[t] / used; rows or 0: and that one is token rows[t]. scratch: 12 rows of x, padded to 16 columns.
ADD_LOW_RANK = declare_kernel(
    "add_low_rank",
    "count scales adapter factor pairs used rows x x_stride rank weights row_bytes y stride columns scratch"
    " scratch_bytes",
    "matmul.low_rank",
    "by_entry",
)
# A matrix product, and then ADD_LOW_RANK to its result, for `slice_rows` rows of the matrix at a time, so that the
# update reads the result from the cache. product, update: addresses of the kernel's address and its arguments;
# product_words: number of the product's arguments; y_at, scratch_at: indices of its y and scratch; rows: rows of the
# matrix; b_bytes: of an element of the update's weights; product_scratch: offset of the product's scratch memory.
ADAPTED_LINEAR = declare_kernel(
    "adapted_linear",
    "count product update product_words y_at scratch_at rows slice_rows b_bytes scratch scratch_bytes product_scratch",
    "matmul.low_rank",
)
# y = y + factor * scale * x, whose scale is found as for ADD_LOW_RANK.
ADD_SCALED = declare_kernel(
    "add_scaled",
    "count scales adapter factor pairs used rows x x_stride y stride columns",
    "matmul.low_rank",
    "by_entry",
)
# y = x, rounded to BF16.
ROUND_BF16 = declare_kernel("round_bf16", "count x stride y y_stride columns", "elementwise.rowwise")
# table f32 [tokens, 2, pairs]: `factor` times cosine and sine of (position - before) * frequencies (f64 [pairs]);
# positions int64.
ANGLES = declare_kernel(
    "angles", "count positions before frequencies pairs table factor", "elementwise.rowwise", "by_row"
)
# y [tokens, heads, head_dim] = x with `pairs` pairs of elements of each head rotated. Pair k is elements k * step and
# k * step + apart: step 2 and apart 1 for interleaved pairs, step 1 and apart `pairs` for split halves. y may be x;
# table: the result of ANGLES.
ROPE = declare_kernel(
    "rope", "count x y stride heads head_dim table pairs step apart", "elementwise.rowwise", "by_head"
)
# y = x without padding, float32 [tokens, columns]; the argument y is the address of y's address. flaws: address of an
# int64 that is increased if a value is not finite.
LOGITS = declare_kernel("logits", "count x stride columns y flaws", "elementwise.rowwise", "by_entry")
# x as integers, see quantize.py:
# - high, low int8 [tokens, columns]: the two planes; words int16 [tokens, columns] or 0: both planes in one integer,
#   for CPUs that multiply 16-bit words (gemm_int16.py)
# - scales f32 [tokens, columns / 16], each twice, since 32 columns share one
# - sums f32 [tokens, columns / 16] of both planes (sums_*) and of the high plane (high_sums_*); *_32: over 32 columns,
#   each twice; *_16: over 16 columns
# - excess int32 [tokens, columns / 32], or int16 [tokens, columns / 16] where words are multiplied
# most_precise: address of the value of kernel_tokens up to which every 32 columns have a scale of their own.
QUANTIZE = declare_kernel(
    "quantize",
    "count x stride columns high low words scales sums_32 sums_16 high_sums_32 high_sums_16 excess most_precise"
    " kernel_tokens",
    "matmul.quantize",
)
# y = W x; W [rows, columns] in blocks, x in the form of QUANTIZE. sums, high_sums: those over as many columns as a
# sub-block of the format has. most_precise: address of the value of kernel_tokens up to which both planes are
# multiplied. variants int64: addresses of the kernel variants; few_tokens, few_fast: see kernel_variants.py.
LINEAR_QUANTIZED = declare_kernel(
    "linear_quantized",
    "count weights row_bytes rows columns high low scales sums high_sums y y_stride most_precise scratch scratch_bytes"
    " excess variants few_tokens few_fast words kernel_tokens",
    "matmul.matmul_quantized",
)
for name in ("linear_one", "linear_few", "linear_few_fast", "linear_precise", "linear_fast"):
    declare_kernel(name, LINEAR_QUANTIZED, "matmul.matmul_quantized")
# x as 16-bit integers, see gemm_f16_words.py. A row of y: int16 [columns], then scales f32 [columns / 32].
QUANTIZE_WORDS = declare_kernel("quantize_words", "count x stride y y_stride columns", "matmul.gemm_f16_words")
# y = W x in float32. halves, or 0: x in the form of ROUND_BF16 if W is BF16, of QUANTIZE_WORDS if W is F16.
# most_precise: value of kernel_tokens above which these are multiplied instead of x.
LINEAR_FLOAT = declare_kernel(
    "linear_float",
    "count weights row_bytes rows columns x x_stride y y_stride scratch scratch_bytes halves halves_stride most_precise"
    " kernel_tokens",
    "matmul.matmul_float",
)
# tiles = 32 rows of W, `columns` columns from index `column` on, as BF16 tiles (amx/pack.py). weights: address of the
# first row; last: index of the last row that exists, which also fills the rows after it; exact 1: write the low plane,
# too; row: memory for one row in float32.
UNPACK = declare_kernel("unpack_groups", "weights row_bytes last column columns exact tiles row", "amx.pack")
declare_kernel("unpack_rows", UNPACK, "amx.pack")
# panels = x as BF16 tiles, in panels of 16 tokens (amx/pack.py); nothing is written if kernel_tokens are fewer than
# `least`. most_exact: address of the value of kernel_tokens up to which the low plane is written, too. active, or 0:
# address of the EXPERTs whose rows x has, each of which begins a new panel; active_count: address of their count.
PACK = declare_kernel(
    "pack",
    "count x stride columns panels slab_bytes most_exact least active active_count scratch scratch_bytes kernel_tokens",
    "amx.pack",
)
# The further arguments of a product in AMX tiles. few: address of the kernel for fewer than `least` kernel_tokens,
# which gets the same arguments; unpack: address of the kernel that unpacks W; panels, slab_bytes: x in the form of
# PACK; most_exact: address of the value of kernel_tokens up to which both planes are multiplied.
TILE_ARGUMENTS = " few unpack panels slab_bytes most_exact least"
LINEAR_TILES_QUANTIZED = declare_kernel(
    "linear_tiles_quantized", " ".join(LINEAR_QUANTIZED._fields) + TILE_ARGUMENTS, "amx.linear"
)
LINEAR_TILES_FLOAT = declare_kernel("linear_tiles_float", " ".join(LINEAR_FLOAT._fields) + TILE_ARGUMENTS, "amx.linear")
# A record per sequence of a run, for kernels that use the KV cache or recurrent states. first: its first token in the
# run; count: its tokens in the run; length: its tokens after the run; table: address of its page table, int64; state,
# next_state: addresses of its recurrent states before and after the run, which may be equal; encoded: its tokens that
# belong to an encoder; kernel_tokens: the value itself, for this sequence.
SEQUENCE = declare_arguments("first count length table state next_state encoded kernel_tokens")
# y = x, each `block` columns (a power of 2) times an orthonormal Hadamard matrix; y may be x.
HADAMARD = declare_kernel("hadamard", "count x y stride columns block", "elementwise.rowwise", "by_matrix")
# Copy the heads of x, keys or values, to the cache slots of their tokens (store), or from there to x (recall). owners
# int64 [tokens]: the index of each token's sequence; base: address of the cache's first slot.
STORE = declare_kernel(
    "store",
    "count positions owners sequences x stride base head_stride token_bytes heads head_dim",
    "attention.cache",
    "by_head",
)
declare_kernel("recall", STORE, "attention.cache", "by_head")
# The work of attention in a run, planned once for all layers of the same shape: UNITs, their count, and a SPLIT per
# token. window: number of latest keys that a token sees, 0 for all; chunked 1: instead, positions are divided into
# chunks of `window` tokens, and a token sees its own chunk; lookahead: number of later keys that it sees.
# cross_attention 1: tokens see the sequence's first `encoded` keys only; 0: they see all but those.
PLAN = declare_kernel(
    "plan",
    "sequences sequence_count heads kv_heads window chunked lookahead cross_attention units unit_count splits",
    "attention.plan",
)
# A unit of attention: `rows` rows (row = token * group + query head in its group) and the keys from position `begin` to
# `end`, except those before `lowest`. split: the index of the section, if a context is split; few 1: the rows read the
# cache directly (attention/products.py).
UNIT = declare_arguments("table kv_head first_row rows lowest begin end split few")
# The number of sections that a token's context is split into, and the slot of its partial results.
SPLIT = declare_arguments("count slot")
# y = softmax(q k^T * scale) v, see attention/attend.py. A softcap other than 0 replaces each score by softcap *
# tanh(score / softcap).
# - slopes, or 0: f32 [query heads]; slope * distance is subtracted from a score (ALiBi)
# - sinks, or 0: f32 [query heads], the score of an extra key whose value is zero
# - biases, or 0: f32 [query heads, 16 + 2 * reach + 1 + 16], added to scores. Element 16 + reach + d is for a key d
#   positions after the query; the first 17 elements are equal, and so are the last 17
# - chosen, or 0: a bit for each key that a token sees, chosen_stride bytes per token, choice_stride per key-value head
# - period: only the last key of every `period` counts; 1: all
# - logs 1: after the heads of a row of y, the logarithm of each head's sum of exponentials is stored, too
# - partial f32 [slots, query heads, sections of a context, 32 + value_dim padded to 16]
ATTEND = declare_kernel(
    "attend",
    "count positions q q_stride y y_stride units unit_count splits keys values key_head_stride value_head_stride"
    " key_bytes value_bytes heads kv_heads key_dim value_dim scale softcap window chunked period lookahead"
    " cross_attention slopes biases reach sinks logs chosen chosen_stride choice_stride partial scratch scratch_bytes",
    "attention.attend",
)
declare_kernel("attend_tiles", ATTEND, "amx.attention")
declare_kernel("merge", ATTEND, "attention.attend")
# CUDA: ATTEND for few tokens, see cuda/attention/attend_few.py. A context is split into up to `parts` parts; the query
# heads of a group are processed in `bundles` bundles, each by a thread block. partial f32 [tokens, heads, parts,
# partial_bytes / 4]: the largest score, the sum of the weights, 2 unused elements, then the values.
ATTEND_FEW = declare_kernel(
    "attend_few",
    "count positions owners sequences q q_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked period lookahead slopes chosen chosen_stride choice_stride bundles"
    " parts partial partial_bytes",
    "",
    "attention.attend_few attend_few",
)
# CUDA: y = the merged partial results of ATTEND_FEW, including the heads' sinks.
MERGE_FEW = declare_kernel(
    "merge_few",
    "count positions owners sequences heads value_dim window chunked lookahead sinks logs chosen chosen_stride"
    " choice_stride kv_heads parts partial partial_bytes y y_stride",
    "",
    "attention.attend_few by_head",
)
# CUDA: ATTEND for many tokens, see cuda/attention/attend_many.py.
ATTEND_MANY = declare_kernel(
    "attend_many",
    "sequences sequence_count q q_stride y y_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked lookahead slopes sinks",
    "",
    "attention.attend_many attend_many",
)
# Sparse attention: y = for each token a row of bits, one per key up to its own, set for the `most` blocks of `block`
# keys with the largest scores. The score is the sum over heads of weight * max(q k, 0), k being the block's last key;
# weights f32 [tokens, heads]; the keys have a single head.
SELECT_KEYS = declare_kernel(
    "select_keys",
    "count positions owners sequences q q_stride weights weights_stride keys key_bytes key_dim heads most block y"
    " y_stride scratch scratch_bytes",
    "attention.select_keys",
    "some_tokens",
)
# Sparse attention for each head separately: the `most` blocks with the largest q k of any of their keys; the last
# `local` blocks are always among them. The bits of a head follow those of the previous head after choice_stride bytes.
SELECT_KEY_BLOCKS = declare_kernel(
    "select_key_blocks",
    "count positions owners sequences q q_stride keys key_bytes key_dim heads most block local y y_stride choice_stride"
    " scratch scratch_bytes",
    "attention.select_keys",
    "some_tokens",
)
# Recurrent layers. offset: the layer's offset, in bytes, in the memory at SEQUENCE.state and SEQUENCE.next_state.
# y[t] = s, or s * sigmoid(s) if silu is 1, with s = bias + the sum over taps of weights[tap] * x[t - taps + 1 + tap];
# weights f32 [taps, columns padded to 16]. The state, f32 [taps - 1, columns padded to 16], is the x of the last tokens
# before the run.
CONVOLVE = declare_kernel(
    "convolve",
    "sequences sequence_count offset taps weights bias silu x y stride columns",
    "recurrent",
    "by_column_and_tokens",
)
# y[t] = the sum over taps of p[tap] * v[t - taps + 1 + tap], p being the softmax over the taps with tokens of gates[t -
# taps + 1 + tap] + places[tap]. x f32 [tokens, 2 * stretches * columns]: the v of each stretch, then its gates; taps
# are divided evenly among the stretches, and a tap uses the columns of its stretch. places f32 [taps, columns padded to
# 16]: biases by position. The state, f32 [taps - 1, 2 * stretches * columns padded to 16], is the x of the last tokens
# before the run.
GATED_MEAN = declare_kernel(
    "gated_mean",
    "sequences sequence_count offset taps stretches places x x_stride y stride columns",
    "recurrent",
    "by_column_and_tokens",
)
# Mamba: for each column and token h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x; state h and rates f32
# [columns / 16, state_size, 16]; b and c f32 [tokens, state_size].
SELECTIVE_SCAN = declare_kernel(
    "selective_scan",
    "sequences sequence_count offset x dt b c state_stride rates skip y stride columns state_size",
    "recurrent",
    "by_state",
)
# For each head and token h = e^(dt * rate) * h + k d, y = q h + skip * v, with d = v * strength (Mamba 2), or by the
# delta rule d = (v - k h) * strength with h after its decay. dt, strength f32 [tokens, heads]; rates, skip f32 [heads];
# head i uses query and key head i / repeat % key_heads. State h f32 [heads, value_dim / 16, key_dim, 16].
HEAD_SCAN = declare_kernel(
    "head_scan",
    "sequences sequence_count offset q k key_stride v y stride dt strength head_stride rates skip heads key_heads"
    " repeat key_dim value_dim",
    "recurrent",
    "by_state",
)
# For each head and token h = diag(w) h + k v^T + b (a h), y = r h; r, w, k, a, b f32 [tokens, heads * key_dim].
# wkv-gated and wkv-first have no a and b; in wkv-first y = r (h + diag(first) k v^T) with h before this token, first
# f32 [heads * key_dim]. State h as in HEAD_SCAN.
WKV = declare_kernel(
    "wkv",
    "sequences sequence_count offset r w k v a b first key_stride y stride heads key_dim value_dim",
    "recurrent",
    "by_state",
)
# sums f32 [columns padded to 16] += x^2 over the tokens.
ADD_SQUARES = declare_kernel("add_squares", "count x stride columns sums", "elementwise.rowwise", "by_column")
# For each expert that PLAN_EXPERTS lists: sums f32 [experts, columns padded to 16] += x^2 over its rows, counts int64
# [experts] += the number of its rows; sums_stride: bytes from one expert's sums to the next.
ADD_EXPERT_SQUARES = declare_kernel(
    "add_expert_squares",
    "active active_count x stride columns sums sums_stride counts",
    "elementwise.rowwise",
    "by_column",
)
# Mixture of experts: chosen int64 [tokens, used] = the experts of each token, weights f32 [tokens, used] = their
# weights.
# - logits f32 [tokens, experts]. Scores are their softmax, or sigmoid, or (rooted) the square root of their softplus
# - normalized 1: the weights of a token add up to `scale`; 0: a weight is score * scale
# - bias, or 0: f32 [experts], added to the scores for the choice, not for the weights
# - groups, groups_used: experts are divided into groups, and only those of the best groups can be chosen
# - together: number of consecutive logits that belong to one expert
# - table, or 0: int64 [vocab, used], the experts by token id (ids int64 [tokens]), used instead of a choice
ROUTE = declare_kernel(
    "route",
    "count logits stride experts used sigmoid rooted normalized scale groups groups_used together bias ids table chosen"
    " weights scratch scratch_bytes",
    "matmul.experts",
    "warp_by_row",
)
# An expert that has rows in this run: its index, its first row, and the number of its rows.
EXPERT = declare_arguments("number first count")
# Sorts pairs of a token and one of its experts (pair = token * used + index in chosen) by expert; each pair gets a row.
# active: the EXPERTs that have rows; active_count: their count; rows int64 [pairs]: the row of each pair; pairs int64
# [rows]: the pair of each row; row_count: the number of rows, including padding between experts; next_rows int64
# [experts]: temporary memory.
PLAN_EXPERTS = declare_kernel(
    "plan_experts",
    "count chosen used experts next_rows active active_count rows pairs row_count",
    "matmul.experts",
    "once",
)
# y[row] = x[token] of the row's pair, times the pair's weight unless weights is 0. count: address of the number of
# rows; part_bytes: distance, in a row of x, of the columns for a token's first expert, its second one, and so on; 0:
# all get the same columns.
GATHER = declare_kernel(
    "gather", "count pairs used x x_stride weights part_bytes y stride columns", "matmul.experts", "by_entry"
)
# y[token] = x[row] of each of the token's pairs, `columns` columns each, one after the other.
FROM_HEADS = declare_kernel("from_heads", "count rows used x x_stride y stride columns", "matmul.experts", "by_pair")
# y[token] = the sum over the token's pairs of x[row], times the pair's weight unless weights is 0.
SCATTER = declare_kernel("scatter", "count rows used x x_stride weights y stride columns", "matmul.experts", "by_four")
# y[row] = x[row] + z[expert of the row's pair]; count: address of the number of rows.
ADD_BY_EXPERT = declare_kernel(
    "add_by_expert", "count pairs chosen x z z_stride y stride columns", "matmul.experts", "by_four"
)
# y[row] = W[expert of the row] x[row]: the arguments of a product with one matrix, for expert 0 and row 0, and
# - linear: address of the kernel for one matrix
# - by_row int64 [by_row_count, 2]: for each argument of `linear` that is the address of row 0, its index and the bytes
#   from row to row
# - active, active_count: the experts that have rows, from PLAN_EXPERTS; expert_bytes: bytes of an expert's matrix
# - slices: number of parts that each product is divided into
EXPERT_ARGUMENTS = " linear by_row by_row_count active active_count expert_bytes slices"
EXPERTS_QUANTIZED = declare_kernel(
    "experts_quantized", " ".join(LINEAR_QUANTIZED._fields) + EXPERT_ARGUMENTS, "matmul.experts"
)
EXPERTS_FLOAT = declare_kernel("experts_float", " ".join(LINEAR_FLOAT._fields) + EXPERT_ARGUMENTS, "matmul.experts")
EXPERTS_TILES_QUANTIZED = declare_kernel(
    "experts_tiles_quantized", " ".join(LINEAR_TILES_QUANTIZED._fields) + EXPERT_ARGUMENTS, "amx.linear"
)
EXPERTS_TILES_FLOAT = declare_kernel(
    "experts_tiles_float", " ".join(LINEAR_TILES_FLOAT._fields) + EXPERT_ARGUMENTS, "amx.linear"
)
# CUDA: convert quantized weights to planes, see cuda/matmul/planes.py. blocks: weights `first` to `last` of a matrix,
# whole blocks as in the file; planes: address of the whole converted matrix.
TO_PLANES = declare_kernel("to_planes", "blocks first last columns planes row_bytes", "", "matmul.weights by_unit")
# CUDA: x as integers, see cuda/matmul/quantize.py: codes int8 [tokens, 4, columns / 32, 16], scales f32 [tokens,
# columns / 32], sums f32 [tokens, columns / 16].
QUANTIZE_PLANES = declare_kernel(
    "quantize_planes", "count x stride columns codes scales sums", "", "matmul.quantize by_activations"
)
# CUDA: RMS_NORM of whole rows, or SWIGLU, and then QUANTIZE_PLANES of y. y may be an input.
NORM_QUANTIZE = declare_kernel(
    "norm_quantize", " ".join(RMS_NORM._fields) + " codes scales sums", "", "matmul.quantize by_row"
)
SWIGLU_QUANTIZE = declare_kernel(
    "swiglu_quantize",
    " ".join(KERNELS["swiglu"].arguments._fields) + " codes scales sums",
    "",
    "matmul.quantize by_activations",
)
# CUDA: y = W x, x in the form of QUANTIZE_PLANES. Unless active_count is 0, each expert that PLAN_EXPERTS lists is
# multiplied by its rows of x; experts: the number of experts, whose matrices are expert_bytes apart.
LINEAR_PLANES = declare_kernel(
    "linear_planes",
    "count weights row_bytes rows columns codes scales sums y y_stride active active_count expert_bytes experts",
    "",
    "matmul.linear by_two_rows",
)
# CUDA: LINEAR_PLANES for weights in F32, F16 or BF16 and x in float32.
LINEAR_PLAIN = declare_kernel(
    "linear_plain",
    "count weights row_bytes rows columns x x_stride y y_stride active active_count expert_bytes experts",
    "",
    "matmul.linear by_warp",
)
# CUDA: y f16 [rows, columns] = `rows` rows of W from row `first` on.
UNPACK_MATRIX = declare_kernel(
    "unpack", "weights row_bytes columns first rows y", "", "matmul.weights by_unpacked_unit"
)
# Reads `size` bytes at `memory`; results: 64 bytes for each part, the exclusive or of the bytes that it reads.
STREAM = declare_kernel("stream", "memory size results", "peak")
# Multiplies in registers, `rounds` times; memory: PEAK_BYTES for each part.
PEAK = declare_kernel("multiply_peak", "memory rounds", "peak")
declare_kernel("multiply_peak_tiles", PEAK, "peak")
# CUDA: y = x / scale in float16, scales f32 [tokens]; and y = y * scale.
HALVE = declare_kernel("halve", "count x stride columns y y_stride scales", "", "matmul.quantize by_row")
SCALE_ROWS = declare_kernel("scale_rows", "count y stride columns scales", "", "matmul.quantize by_row")
# CUDA: x = high + low, both BF16.
SPLIT_BF16 = declare_kernel("split_bf16", "count x stride columns high low y_stride", "", "matmul.quantize by_row")
# CUDA: copy `words` int64 from host memory to GPU memory.
FETCH = declare_kernel("fetch", "source target words", "", "elementwise.rowwise words")


def load_kernel(target: str, name: str) -> Any:
    """Return the function of a kernel for a target, "cpu" or "cuda".

    Its module has a function of that name. A name that ends with a format after a hyphen, such as embed-Q8_0, or with
    types of keys and values, such as attend-Q8_0-Q4_0, is built by make_NAME, or by `make` where a module has one
    kernel.
    """
    kind, _, format_name = name.partition("-")
    module = import_module(f"localllm.kernels.{target}.{getattr(KERNELS[kind], target)}")
    if kind in FORMULAS:
        return module.make(kind)
    if not format_name:
        return getattr(module, kind)
    return getattr(module, f"make_{kind}" if hasattr(module, f"make_{kind}") else "make")(format_name)


def order_arguments(kernel: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the values in the order of a kernel's arguments.

    Raises TypeError if a name is missing or unknown.
    """
    names = KERNELS[kernel.partition("-")[0]].arguments._fields
    if len(names) != len(values):
        raise TypeError(f"{kernel}: expected {', '.join(names)}; found {', '.join(values)}")
    try:
        return [values[name] for name in names]
    except KeyError as error:
        raise TypeError(f"{kernel}: {error} is missing") from None


def describe_missing(verb: str) -> str:
    """Return an error message that names the files to change for a verb without kernels."""
    return (
        f"the verb {verb!r} has no formula in localllm/kernels/formulas.py, no row in localllm/kernels/table.py, no"
        " operation in localllm/engine/operations that says its steps, and no function in the table of the target: it"
        " needs one of them"
    )
