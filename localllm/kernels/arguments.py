"""The arguments of every kernel, by name: targets fill them in, kernels and tests read them.

A kernel gets the address of an array of int64. A declaration is a tuple of named places in that array: `ADD.x` is 1, so
a kernel reads `argument(a, ADD.x)`, and `in_order("add", values)` makes the array from values by name. This module does
not import Numba.

Words that mean the same everywhere: `count` is the address of the number of tokens (an int64); a `stride` is bytes from
token to token; `columns` counts numbers; activations are float32 rows, padded to 16 columns, and no kernel touches what
a stride has beyond; `scratch` is memory of `scratch_bytes` for each thread.
"""

from collections.abc import Mapping
from typing import Any

from localllm.kernels.declaration import arguments
from localllm.kernels.verbs import ROWWISE

PAGE = 64  # places of a page of the KV cache


# Verbs that treat rows one by one, see localllm.kernels.verbs.
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
# y f32 [tokens, columns / width streams] = for each of them the sum over the streams of x, times their weights.
MIX_STREAMS = arguments("count x x_stride streams width weights weights_stride y stride columns")
# Rows of the embedding matrix, `row_bytes` each: x[t] = row ids[t]; ids int64.
EMBED = arguments("count weights row_bytes columns ids x stride")
# y[t] = table[ids[t]], all int64.
REPLACE_IDS = arguments("count ids table y")
# y[t] = ids[t] + 1, float32 [tokens, 1]; ids int64.
AS_COLUMN = arguments("count ids y stride")
# y[t] = first + (the exclusive or of factors[i] * ids[t, i]) % size; x f32 [tokens, length or more], ids and 1, those
# behind one that is 0 or `end` being `end`; factors int64 [length], y int64.
HASH = arguments("count x stride factors length size first end y")
# y[i] = x[rows[i]]; rows int64.
SELECT = arguments("count x rows y stride columns")
# y[i] = the rows of x of the run's i-th sequence as one: kind 0 their mean, 1 the first, 2 the last.
POOL = arguments("count sequences x y stride columns kind")
# y = `columns` columns of x, in equal groups: of each `period` columns those from number `first` on.
SLICE_COLUMNS = arguments("count x x_stride first groups period y stride columns")
# y = for each head its x_columns of x, then its z_columns of z, or all of z if z is shared.
CONCAT_HEADS = arguments("count x x_stride x_columns z z_stride z_columns shared heads y stride")
# On a card: total = x + z, y = RMS_NORM of total, of whole rows; total may be x.
ADD_RMS_NORM = arguments("count x z weight total y stride columns epsilon")
# On a card: y = ROPE of RMS_NORM of each head of x; weight f32 [heads, head_dim]; y may be x.
RMS_NORM_ROPE = arguments("count x weight epsilon y stride heads head_dim table pairs step apart")
# y = x * (1 + slope * log(floor((position + offset) / length) + 1)); positions int64.
SCALE_BY_POSITION = arguments("count x positions slope length offset y stride columns")
# y = x in BF16.
ROUND_BF16 = arguments("count x stride y y_stride columns")
# table f32 [tokens, 2, pairs]: `factor` times cosine and sine of (position - before) * frequencies (f64 [pairs]);
# positions int64.
ANGLES = arguments("count positions before frequencies pairs table factor")
# y [tokens, heads, head_dim] = x with pairs turned in each head: numbers k * step and k * step + apart (2 and 1 for
# interleaved pairs, 1 and `pairs` for split halves). y may be x; table: of ANGLES.
ROPE = arguments("count x y stride heads head_dim table pairs step apart")
# y = x without padding, float32 [rows, columns], `y` being the address of its address; int64 `flaws` is raised by 1 or
# more if not all numbers are finite.
LOGITS = arguments("count x stride columns y flaws")
# x as integers, see quantize.py: high, low int8 [tokens, columns]; words int16 [tokens, columns], both of them, or 0
# where they are not multiplied (avx2_dots.py); scales, sums of both planes and of the high one, f32
# [tokens, columns / 16], of 32 columns twice each, or of 16; excess int32 [tokens, columns / 32], or int16 for each 16
# columns. most_precise: address of the most tokens of which no more than 32 columns share a scale.
QUANTIZE = arguments(
    "count x stride columns high low words scales sums_32 sums_16 high_sums_32 high_sums_16 excess most_precise"
)
# y = W x, W in blocks [rows, columns], x as QUANTIZE makes it, sums of the format's sub-blocks; most_precise: address
# of the most tokens for which both planes are multiplied; pieces: addresses of the kernels that do it, int64, and what
# else cpu/pieces.py needs to choose one.
LINEAR_QUANTIZED = arguments(
    "count weights row_bytes rows columns high low scales sums high_sums y y_stride most_precise scratch scratch_bytes"
    " excess pieces few_tokens words"
)
# x in words of 16 bits, see gemm_f16_words.py: y int16 [columns] and scales f32 [columns / 32], one behind the other.
QUANTIZE_WORDS = arguments("count x stride y y_stride columns")
# y = W x in float32; halves: x as ROUND_BF16 or QUANTIZE_WORDS makes it, as the format of W wants it, or 0;
# most_precise: the most tokens for float32 where they are there.
LINEAR_FLOAT = arguments(
    "count weights row_bytes rows columns x x_stride y y_stride scratch scratch_bytes halves halves_stride most_precise"
)
# A slab of 32 rows of weights as BF16 tiles, see amx_tiles.py: `weights` is where the first row begins, `last` the last
# row that there is, whose copies stand for those behind; columns from number `column` on; exact: whether also the low
# plane. `row`: memory for a row's numbers in float32.
UNPACK = arguments("weights row_bytes last column columns exact tiles row")
# x as BF16 tiles in panels of 16 tokens, unless there are fewer than `least`, with the low plane for up to `most_exact`
# (an address) tokens. active: 0, or the EXPERTs whose rows these are, active_count (an address), each by itself.
PACK = arguments("count x stride columns panels slab_bytes most_exact least active active_count scratch scratch_bytes")
# What a product in tiles takes behind the arguments of `few`, the kernel for fewer than `least` tokens: x as PACK makes
# it, `unpack`, the kernel that unpacks W, and the address of the most tokens for which both planes are multiplied.
OF_TILES = " few unpack panels slab_bytes most_exact least"
LINEAR_TILES_QUANTIZED = arguments(" ".join(LINEAR_QUANTIZED._fields) + OF_TILES)
LINEAR_TILES_FLOAT = arguments(" ".join(LINEAR_FLOAT._fields) + OF_TILES)
# The header of a run, for the kernels that meet the KV cache. Of each sequence that takes part, int64: its first token
# in the run, how many it has there, how many it has altogether after it, the address of its table of pages, int64, and
# those of what recurrent layers keep of it: before the run, and where it goes then, which may be the same.
SEQUENCE = arguments("first count length table state next_state encoded")
# y = x, each `block` columns (a power of 2) times an orthonormal Hadamard matrix; y may be x.
HADAMARD = arguments("count x y stride columns block")
# Heads of x to their tokens' places (`recall`: and back); owners int64 [tokens]: number of the sequence; keys or values
# begin at `base`.
STORE = arguments("count positions owners sequences x stride base head_stride token_bytes heads head_dim")
# What attention has to do in this run, for all layers that are alike: UNITs, their number, and for each token SPLIT.
# A window is of the last tokens, or the last chunk of that many tokens if it is chunked; the `lookahead` next tokens
# are visible, too. A sequence's first `encoded` tokens were read by an encoder: cross-attention sees only these, other
# attention none of them.
PLAN = arguments(
    "sequences sequence_count heads kv_heads window chunked lookahead cross_attention units unit_count splits"
)
# Some rows (token * group + query head in group) and a range of keys, those before `lowest` hidden. Of a split range,
# `split` is the part.
UNIT = arguments("table kv_head first_row rows lowest begin end split")
# In how many parts a token's context is split, and which of the partial results are its.
SPLIT = arguments("count slot")
# softmax(q k^T * scale) v, scores going through softcap * tanh(score / softcap) if softcap is not 0; see attention.py.
# slopes: 0, or f32 [query heads], times the distance of a key subtracted from its score. sinks: 0, or f32
# [query heads], scores for nothing.
# biases: 0, or f32 [query heads, 16 + 2 * reach + 1 + 16] added to scores, by how far a key is behind the query (number
# 16 + reach is the query's own place); the first and the last 17 of a head are equal.
# chosen: 0, or a row of bits for each token: which keys count; those of a key-value head are choice_stride behind those
# of the one before.
# period: only the last key of each so many counts. logs: whether behind a row's heads stand logarithms of their sums.
# partial f32 [slots, query heads, parts of a context, 32 + value_dim padded to 16].
ATTEND = arguments(
    "count positions q q_stride y y_stride units unit_count splits keys values key_head_stride value_head_stride"
    " key_bytes value_bytes heads kv_heads key_dim value_dim scale softcap window chunked period lookahead"
    " cross_attention slopes biases reach sinks logs chosen chosen_stride choice_stride partial scratch scratch_bytes"
)
# The same on a card, for few tokens: see cuda/attend_few.py. A token's context is cut in up to `parts` parts; a group's
# query heads are dealt with in `bundles`, one block each. partial f32 [tokens, heads, parts, partial_bytes / 4]: the
# largest score and the sum of the weights, 4 numbers, then the values.
ATTEND_FEW = arguments(
    "count positions owners sequences q q_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked period lookahead slopes chosen chosen_stride choice_stride bundles"
    " parts partial partial_bytes"
)
# y = the parts put together, and the heads' sinks.
MERGE_FEW = arguments(
    "count positions owners sequences heads value_dim window chunked lookahead sinks logs chosen chosen_stride"
    " choice_stride kv_heads parts partial partial_bytes y y_stride"
)
# The same on a card, for many tokens: see cuda/attend_many.py.
ATTEND_MANY = arguments(
    "sequences sequence_count q q_stride y y_stride keys values key_head_stride value_head_stride key_bytes value_bytes"
    " heads kv_heads scale softcap window chunked lookahead slopes sinks"
)
# Of each token the `most` blocks of keys up to its own with the largest sums over heads of weight * max(q k, 0), k the
# last of the block: y, a row of bits for each; weights f32 [tokens, heads]; keys of a single head.
SELECT_KEYS = arguments(
    "count positions owners sequences q q_stride weights weights_stride keys key_bytes key_dim heads most block y"
    " y_stride scratch scratch_bytes"
)
# The same of each head: the `most` blocks with the largest q k, the last `local` always; bits of a head are
# choice_stride behind those of the one before.
SELECT_KEY_BLOCKS = arguments(
    "count positions owners sequences q q_stride keys key_bytes key_dim heads most block local y y_stride choice_stride"
    " scratch scratch_bytes"
)
# Recurrent layers: `offset` is theirs within SEQUENCE.state and SEQUENCE.next_state, in bytes.
# y[t] = bias + the sum over taps of weights[tap] * x[t - taps + 1 + tap], times its sigmoid if `silu`; weights f32
# [taps, columns padded to 16]; the state f32 [taps - 1, columns padded to 16] has the tokens before the run.
CONVOLVE = arguments("sequences sequence_count offset taps weights bias silu x y stride columns")
# y[t] = the sum over taps of p[tap] * x[t - taps + 1 + tap], p the softmax of gates[t - taps + 1 + tap] + places[tap];
# x f32 [tokens, 2 * stretches * columns], the gates behind, of tokens that there are; each stretch of the taps has its
# columns. places f32 [taps, columns padded to 16]; the state f32 [taps - 1, 2 * stretches * columns padded to 16].
GATED_MEAN = arguments("sequences sequence_count offset taps stretches places x x_stride y stride columns")
# Mamba's: for each column h = e^(dt * rates) * h + dt * x * b, y = h c + skip * x; state h and rates f32 [columns / 16,
# state_size, 16]; b and c f32 [tokens, state_size].
SELECTIVE_SCAN = arguments(
    "sequences sequence_count offset x dt b c state_stride rates skip y stride columns state_size"
)
# For each head h = e^(dt * rate) * h + k d, y = q h + skip * v, with d = v * strength, or for the delta rule
# d = (v - k h) * strength, h decayed; dt, strength f32 [tokens, heads]; rates, skip f32 [heads]; head i has the keys of
# head i / repeat % key_heads. State h f32 [heads, value_dim / 16, key_dim, 16].
HEAD_SCAN = arguments(
    "sequences sequence_count offset q k key_stride v y stride dt strength head_stride rates skip heads key_heads"
    " repeat key_dim value_dim"
)
# For each head h = diag(w) h + k v^T + b (a h), y = r h; r, w, k, a, b f32 [tokens, heads * key_dim]. wkv-gated has no
# a and b; nor wkv-first, where y = r (h + diag(first) k v^T) of the old h, first f32 [heads * key_dim]. State h as in
# HEAD_SCAN.
WKV = arguments("sequences sequence_count offset r w k v a b first key_stride y stride heads key_dim value_dim")
# sums f32 [columns padded to 16] += x^2 over the tokens.
ADD_SQUARES = arguments("count x stride columns sums")
# sums f32 [experts, columns padded to 16], sums_stride bytes from one to the next, += x^2 over the rows of each of the
# experts of PLAN_EXPERTS; counts int64 [experts] += how many rows it has.
ADD_EXPERT_SQUARES = arguments("active active_count x stride columns sums sums_stride counts")
# Of each token the `used` experts that it goes to, chosen int64 [tokens, used], and their weights f32 [tokens, used];
# logits f32 [tokens, experts]; bias: 0, or f32 [experts], added to the scores when experts are chosen. Of several
# groups of experts the `groups_used` best take part. Each `together` experts in a row are one. table: 0, or which ones
# tokens go to by their ids, int64 [vocab, used].
ROUTE = arguments(
    "count logits stride experts used sigmoid rooted normalized scale groups groups_used together bias ids table chosen"
    " weights scratch scratch_bytes"
)
# What an expert has to do in this run: its number, its first row, and how many rows it has.
EXPERT = arguments("number first count")
# Rows in the order of the experts: EXPERTs that have rows, and how many they are; for each pair (token * used + place
# among the chosen) its row, for each row its pair, int64; the number of rows, with those between the experts.
# next_rows: int64 [experts], to work with.
PLAN_EXPERTS = arguments("count chosen used experts next_rows active active_count rows pairs row_count")
# y[row] = x[token] of the row's pair, times the pair's weight unless weights is 0; count: of rows. The places among a
# token's chosen get columns that are part_bytes apart.
GATHER = arguments("count pairs used x x_stride weights part_bytes y stride columns")
# y[token] = x[row] of all its pairs, `columns` each, side by side.
FROM_HEADS = arguments("count rows used x x_stride y stride columns")
# y[token] = the sum of x[row] over a token's pairs, each times its weight unless weights is 0.
SCATTER = arguments("count rows used x x_stride weights y stride columns")
# y[row] = x[row] + z[expert of the row's pair]; count: of rows.
ADD_BY_EXPERT = arguments("count pairs chosen x z z_stride y stride columns")
# y[row] = W[expert of the row] x[row]: what a product of one matrix takes, of the first expert and row 0, and `linear`,
# the kernel that does it for one; by_row int64 [by_row_count, 2], places in its arguments that are addresses of rows,
# and the bytes from row to row; run_count: address of the number of tokens, which decides about the precision; the
# experts of PLAN_EXPERTS; bytes from expert to expert; slices: in how many parts a matrix is cut.
OF_EXPERTS = " linear by_row by_row_count run_count active active_count expert_bytes slices"
EXPERTS_QUANTIZED = arguments(" ".join(LINEAR_QUANTIZED._fields) + OF_EXPERTS)
EXPERTS_FLOAT = arguments(" ".join(LINEAR_FLOAT._fields) + OF_EXPERTS)
EXPERTS_TILES_QUANTIZED = arguments(" ".join(LINEAR_TILES_QUANTIZED._fields) + OF_EXPERTS)
EXPERTS_TILES_FLOAT = arguments(" ".join(LINEAR_TILES_FLOAT._fields) + OF_EXPERTS)
# CUDA: quantized weights in planes, see cuda/planes.py. Weights number `first` to `last` of a matrix, whole blocks as
# in the file, to their places in its rows.
TO_PLANES = arguments("blocks first last columns planes row_bytes")
# x as integers, see cuda/quantize.py: codes int8 [tokens, 4, columns / 32, 16], scales f32 [tokens, columns / 32], sums
# f32 [tokens, columns / 16].
QUANTIZE_PLANES = arguments("count x stride columns codes scales sums")
# The same of what is made on the way: RMS_NORM of whole rows, SWIGLU. y may be what it is made of.
NORM_QUANTIZE = arguments(" ".join(RMS_NORM._fields) + " codes scales sums")
SWIGLU_QUANTIZE = arguments(" ".join(SWIGLU._fields) + " codes scales sums")
# y = W x, x as QUANTIZE_PLANES makes it; or, unless active_count is 0, of the experts of PLAN_EXPERTS each with its
# rows. experts: how many there are, expert_bytes apart.
LINEAR_PLANES = arguments(
    "count weights row_bytes rows columns codes scales sums y y_stride active active_count expert_bytes experts"
)
# The same of weights that are plain numbers, x in float32.
LINEAR_PLAIN = arguments(
    "count weights row_bytes rows columns x x_stride y y_stride active active_count expert_bytes experts"
)
# y f16 [rows, columns] = `rows` rows of W from number `first` on.
UNPACK_MATRIX = arguments("weights row_bytes columns first rows y")
# The exclusive or of all 64-byte words of a part of the memory, of `size` bytes; results: 64 bytes a part.
STREAM = arguments("memory size results")
# Products in registers; memory: PEAK_BYTES for each part.
PEAK = arguments("memory rounds")
# On a card: y = x / scale in float16, scales float32 [tokens]; and y = y * scale.
HALVE = arguments("count x stride columns y y_stride scales")
SCALE_ROWS = arguments("count y stride columns scales")
# On a card: x = high + low, both BF16.
SPLIT_BF16 = arguments("count x stride columns high low y_stride")
# On a card: int64 words from memory of the host to the card's own.
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
    """Return the values in the order of the kernel's array.

    `kernel` may name a format, too, as in embed-Q8_0.

    Raises TypeError for a name that is missing or too many.
    """
    names = KERNELS[kernel.partition("-")[0]]._fields
    if len(names) != len(values):
        raise TypeError(f"{kernel}: expected {', '.join(names)}; found {', '.join(values)}")
    try:
        return [values[name] for name in names]
    except KeyError as error:
        raise TypeError(f"{kernel}: {error} is missing") from None
