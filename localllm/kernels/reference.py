"""Every verb in plain NumPy, run at once: the oracle that the fast kernels are tested against.

What verbs mean is written in localllm.arch.verbs. Activations are float32 [tokens, columns].
"""

from typing import Any, NamedTuple

import numpy as np

from localllm.arch.verbs import EVERY_TOKEN
from localllm.errors import ModelError
from localllm.kernels.reference_choice import ChoiceReference, largest, unpacked
from localllm.kernels.reference_recurrent import RecurrentReference


def positions_of(span) -> np.ndarray:
    """By time, height and width, of its tokens: int64 [tokens, 3]."""
    place = span.position - span.ahead
    if span.seen is not None:
        return span.seen.turns_of(span.ids, place)
    return np.repeat(np.arange(place, place + len(span.ids))[:, None], 3, axis=1)


class ChosenExperts(NamedTuple):
    """Which experts tokens go to, int64 [tokens, used], with weights float32 [tokens, used]."""

    experts: np.ndarray
    weights: np.ndarray
    routing: Any


class Reference(ChoiceReference, RecurrentReference):
    """A builder (localllm.arch.verbs) whose verbs compute. One for each run."""

    reveals, windows = False, None

    def __init__(self, spans, matrices: dict[tuple[str, int], np.ndarray], context: int, observer=None):
        """spans: as Program.run takes them, their stores Remembered; context: the most tokens of a sequence.

        matrices: those dequantized so far, by name and first row; observer.add(name, x) is told what a matrix meets.
        Attributes: windows: of a run that is a picture, the number of each row's window. entered: what goes into the
        layers that are keys there already.
        """
        self.ids = np.concatenate([span.ids for span in spans])
        self.positions = np.concatenate([span.position + np.arange(len(span.ids)) for span in spans])
        self.kinds = np.concatenate([np.resize(span.kinds, len(span.ids)) for span in spans])
        self._ends = np.cumsum([len(span.ids) for span in spans])
        wanted = [np.arange(end - span.wanted, end) for span, end in zip(spans, self._ends, strict=True)]
        self.wanted = np.concatenate(wanted)
        self._spans, self._matrices, self._context, self._observer = spans, matrices, context, observer
        self.entered: dict[int, np.ndarray] = {}

    def matrix(self, weight) -> np.ndarray:
        """A weight in float32, whatever its format."""
        key = weight.name, weight.first_row
        if key not in self._matrices:
            self._matrices[key] = dequantize(weight.tensor)
        return self._matrices[key]

    def begin(self, embedded, parts=1):
        """Of a run that is one image, its rows."""
        (seen,) = {span.seen for span in self._spans}
        self._parts = None if seen is None else np.split(seen.rows_of(self.ids), parts, axis=1)
        return embedded() if self._parts is None else self._parts[0]

    def deepen(self, x, part):
        return x if self._parts is None else x + self._parts[part]

    def embed(self, weight, ids):
        return self.matrix(weight)[ids]

    def replace_ids(self, ids, table):
        return table[ids]

    def as_column(self, ids):
        return np.float32(ids[:, None] + 1)

    def embed_hashed(self, weight, tokens, hashing):
        ids = tokens[:, : len(hashing.factors)].astype(np.int64) - 1
        for place in range(1, ids.shape[1]):
            is_cut = (ids[:, place] < 0) | ((ids[:, place - 1] == hashing.end) & (place > 1))
            ids[is_cut, place] = hashing.end
        mixed = np.bitwise_xor.reduce(ids * np.array(hashing.factors), axis=1)
        return self.matrix(weight)[mixed % hashing.size + hashing.first]

    def embed_positions(self, weight, positions):
        return self.matrix(weight)[positions]

    def embed_kinds(self, weight, kinds):
        return self.matrix(weight)[kinds]

    def reveal(self, x):
        self.revealed = x
        return x

    def enter(self, x, layer):
        if layer in self.entered:
            self.entered[layer] = x
        return x

    def select(self, x, which):
        return x[which]

    def columns(self, x, first, end, period=None):
        period = period or x.shape[1]
        groups = x.shape[1] // period
        return x.reshape(len(x), groups, period)[:, :, first:end].reshape(len(x), groups * (end - first))

    def join(self, x, y, heads, shared=False):
        rows, in_x, in_y = len(x), x.shape[1] // heads, y.shape[1] // (1 if shared else heads)
        of_y = np.repeat(y[:, None], heads, axis=1) if shared else y.reshape(rows, heads, in_y)
        return np.concatenate((x.reshape(rows, heads, in_x), of_y), axis=2).reshape(rows, heads * (in_x + in_y))

    def head_linear(self, x, weight):
        matrices = self.matrix(weight)
        count, rows, columns = matrices.shape
        heads = x.reshape(len(x), count, columns)
        return np.einsum("thc,hrc->thr", heads, matrices, optimize=True).reshape(len(x), count * rows)

    def rms_norm(self, x, weight, epsilon, group=None):
        groups = in_groups(x, group)
        y = weighted(divided(groups, (groups**2).mean(axis=2, keepdims=True) + epsilon), weight)
        return y.astype(np.float32).reshape(x.shape)

    def layer_norm(self, x, weight, epsilon, group=None):
        groups = in_groups(x, group)
        groups = groups - groups.mean(axis=2, keepdims=True)
        y = weighted(divided(groups, (groups**2).mean(axis=2, keepdims=True) + epsilon), weight)
        y = y.reshape(x.shape) + (weight.bias.vector() if weight and weight.bias else 0)
        return y.astype(np.float32)

    def linear(self, x, weight):
        if self._observer and not weight.first_row:  # other rows of the matrix meet the same
            self._observer.add(weight.name, x)
        return with_bias(x @ self.matrix(weight).T, weight)

    def rope(self, x, rope, positions, factors=None):
        frequencies = rope.frequencies(factors.vector() if factors else None)
        angles = (self._turns(rope, positions) - rope.before)[:, None] * frequencies
        cos, sin = np.cos(angles) * rope.magnitude, np.sin(angles) * rope.magnitude
        y = x.reshape(len(x), -1, rope.head_dim).copy()
        rotated, half = y[:, :, : rope.dims], rope.dims // 2
        first, second = (
            (np.s_[..., 0::2], np.s_[..., 1::2]) if rope.interleaved else (np.s_[..., :half], np.s_[..., half:])
        )
        u, v = rotated[first].copy(), rotated[second].copy()
        rotated[first], rotated[second] = u * cos - v * sin, u * sin + v * cos
        return y.reshape(x.shape)

    def _turns(self, rope, positions):
        """By which positions pairs turn, [tokens, pairs or 1]."""
        if positions is not self.positions:
            return positions[:, None]
        turns = [positions_of(span) for span in self._spans]
        return np.concatenate(turns)[:, list(rope.axes) or [0]]

    def by_context(self, short, long, original):
        return long if self._context > original else short

    def ignore(self, *weights):
        """These stand in the file, but nothing needs them."""

    def attend(self, q, k, v, state, scores):
        results = []
        for span, end in zip(self._spans, self._ends, strict=True):
            rows = slice(end - len(span.ids), end)
            if k is not None:
                new = (x[rows].reshape(len(span.ids), state.kv_heads, -1) for x in (k, v) if x is not None)
                span.store.keep(state, span.position, *new)
            keys, *values = span.store.kept(state)
            values = values[0] if values else keys[:, :, : state.value_dim]
            queries = q[rows].reshape(len(span.ids), state.kv_heads, scores.heads // state.kv_heads, -1)
            s = (queries.transpose(1, 2, 0, 3) @ keys.transpose(1, 2, 0)[:, None]).transpose(2, 0, 1, 3)  # [t, h, g, k]
            s *= np.float32(scores.scale)
            s = self.softcap(s, scores.softcap) if scores.softcap else s
            distance = self.positions[rows, None] - np.arange(len(keys))
            if scores.slopes:
                s = s - np.float32(scores.slopes).reshape(state.kv_heads, -1, 1) * np.abs(distance)[:, None, None]
            if scores.biases is not None:
                reach = scores.biases.shape[1] // 2
                numbers = np.clip(-distance, -reach, reach) + reach
                s = s + scores.biases[:, numbers].reshape(state.kv_heads, -1, *numbers.shape).transpose(2, 0, 1, 3)
            window = self.positions[rows, None] % state.window + 1 if state.chunked and state.window else state.window
            ahead = EVERY_TOKEN if span.seen is not None and span.seen.is_whole else scores.ahead
            hidden = (distance < -ahead) | (distance >= (np.inf if window is None else window))
            hidden |= (np.arange(len(keys)) < span.encoded) != scores.crosses
            hidden |= np.arange(1, len(keys) + 1) % state.period != 0
            if scores.windowed:
                hidden |= self.windows[:, None] != self.windows
            hidden = hidden[:, None, None]
            sees: Any = True
            if scores.chosen is not None:  # of all heads alike, or of each group of them
                bits = unpacked(scores.chosen[rows].reshape(-1, -(-self._context // 32)), len(keys))
                bits = bits.reshape(len(span.ids), -1, 1, len(keys))
                hidden, sees = hidden | ~bits, bits.any(axis=-1, keepdims=True)
            np.copyto(s, -np.inf, where=hidden)
            nothing = -np.inf if scores.sinks is None else scores.sinks.vector().reshape(state.kv_heads, -1, 1)
            top = np.maximum(s.max(axis=-1, keepdims=True), nothing)
            s -= top
            weights = np.exp(s, out=s)
            total = weights.sum(axis=-1, keepdims=True) + np.exp(nothing - top)
            total = np.where(sees, total, np.float32(np.nan))  # where scores of choices were no numbers
            weights /= total
            made = weights.transpose(1, 2, 0, 3) @ values.transpose(1, 0, 2)[:, None]
            results.append(made.transpose(2, 0, 1, 3).reshape(len(span.ids), -1))
            if scores.logs:
                results[-1] = np.hstack((results[-1], (np.log(total) + top).reshape(len(span.ids), -1)))
        return np.concatenate(results).astype(np.float32)

    def keep(self, k, v, state):
        for span, end in zip(self._spans, self._ends, strict=True):
            new = (x[end - len(span.ids) : end].reshape(len(span.ids), state.kv_heads, -1) for x in (k, v))
            span.store.keep(state, span.position, *new)

    def pool(self, x, kind):
        ends = [int(end) for end in self._ends]
        texts = [x[end - len(span.ids) : end] for span, end in zip(self._spans, ends, strict=True)]
        rows = {"mean": lambda text: text.mean(axis=0, dtype=np.float64), "cls": lambda text: text[0]}
        return np.stack([rows.get(kind, lambda text: text[-1])(text) for text in texts]).astype(np.float32)

    def route(self, logits, routing, bias=None, table=None):
        scores = scores_of(logits, routing)
        ranks = scores + (bias.vector() if bias else 0) if bias or routing.groups > 1 else logits
        size = routing.experts // routing.groups
        if routing.groups > 1:
            best_two = np.sort(ranks.reshape(len(ranks), routing.groups, size))[:, :, -2:].sum(axis=2)
            kept = largest(best_two, routing.groups_used)
            is_kept = np.zeros(best_two.shape, bool)
            np.put_along_axis(is_kept, kept, True, axis=1)
            ranks = np.where(np.repeat(is_kept, size, axis=1), ranks, -np.inf)
        chosen = largest(ranks, routing.used) // routing.together if table is None else table.whole()[self.ids]
        weights = np.take_along_axis(scores, chosen, axis=1)
        if routing.normalized:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 2.0**-14)
        weights[~np.isfinite(logits).all(axis=1)] = np.nan
        return ChosenExperts(chosen, (weights * routing.scale).astype(np.float32), routing)

    def gather(self, x, choice):
        rows = np.repeat(x, choice.routing.used, axis=0)
        return rows * choice.weights.reshape(-1, 1) if choice.routing.weighs_inputs else rows

    def expert_linear(self, x, weight, choice):
        matrices, experts = self.matrix(weight), choice.experts.reshape(-1)
        y = np.empty((len(x), matrices.shape[1]), np.float32)
        for expert in np.unique(experts):
            y[experts == expert] = x[experts == expert] @ matrices[expert].T
        return y + self.matrix(weight.bias)[experts] if weight.bias else y

    def scatter(self, x, choice):
        rows = x.reshape(*choice.weights.shape, -1)
        return (rows if choice.routing.weighs_inputs else rows * choice.weights[:, :, None]).sum(axis=1)

    def sigmoid_gate(self, x, gate):
        return x * self.sigmoid(gate)

    def scale(self, x, factor):
        return x * np.float32(factor if isinstance(factor, float | int) else factor.number())

    def scale_columns(self, x, weight):
        return x * weight.flat().vector()

    def lerp(self, x, z, weight):
        return x + (z - x) * weight.flat().vector()

    def multiply_heads(self, x, gates):
        return (x.reshape(*gates.shape, x.shape[1] // gates.shape[1]) * gates[:, :, None]).reshape(x.shape)

    def softmax(self, x):
        with np.errstate(invalid="ignore"):
            return softmax(x + (x - x)).astype(np.float32)

    def sinkhorn(self, x, size, iterations, epsilon):
        with np.errstate(invalid="ignore"):
            y = softmax((x + (x - x).sum(axis=1, keepdims=True)).reshape(len(x) * size, size)) + epsilon
        y = y.reshape(len(x), size, size)
        y = y / (y.sum(axis=1, keepdims=True) + epsilon)
        for _ in range(iterations - 1):
            y = y / (y.sum(axis=2, keepdims=True) + epsilon)
            y = y / (y.sum(axis=1, keepdims=True) + epsilon)
        return y.swapaxes(1, 2).reshape(x.shape).astype(np.float32)

    def head_dots(self, x, z, heads):
        products = (x * z).reshape(len(x), heads, x.shape[1] // heads)
        return products.sum(axis=2, dtype=np.float64).astype(np.float32)

    def mix(self, x, weights, streams):
        rows, made, width = len(x), weights.shape[1] // streams, x.shape[1] // streams
        of_made = weights.reshape(rows, made, streams)
        return np.einsum("tms,tsw->tmw", of_made, x.reshape(rows, streams, width)).reshape(rows, made * width)

    def add_vector(self, x, vector):
        return x + (vector if isinstance(vector, np.ndarray) else vector.vector())

    def temper(self, x, positions, slope, length, offset=0):
        return x * (1 + slope * np.log((positions + offset) // length + 1))[:, None].astype(np.float32)


def scores_of(logits: np.ndarray, routing) -> np.ndarray:
    """What a router makes of them, float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        if routing.rooted:
            return np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
        return 1 / (1 + np.exp(-logits.astype(np.float64))) if routing.sigmoid else softmax(logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row, float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def in_groups(x: np.ndarray, group: int | None) -> np.ndarray:
    """Float64 [tokens, groups, columns of a group]; None: a row is one."""
    columns = group or x.shape[1]
    return x.reshape(len(x), x.shape[1] // columns, columns).astype(np.float64)


def divided(groups: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """By the roots of the squares."""
    with np.errstate(invalid="ignore"):
        return groups / np.sqrt(squares)


def with_bias(y: np.ndarray, weight) -> np.ndarray:
    """What a matrix makes of rows, with its scale and its bias, if it has them."""
    y = y * np.float32(weight.scale.number()) if weight.scale else y
    return y + weight.bias.vector() if weight.bias else y


def weighted(groups: np.ndarray, weight) -> np.ndarray:
    """Groups [tokens, groups, columns] times the numbers of a row, or those of a group, or nothing."""
    if weight is None:
        return groups
    vector = weight.vector()
    return groups * vector.reshape(-1 if len(vector) > groups.shape[2] else 1, groups.shape[2])


def dequantize(tensor) -> np.ndarray:
    """A tensor's weights as float32, in its shape. Raises ModelError for a format of which they are not known."""
    import gguf

    data = np.asarray(tensor.data)
    if tensor.format.name in ("Q1_0", "Q2_0"):  # which `gguf` 0.19 cannot
        return dequantized_bits(data, tensor.format.name).reshape(tensor.shape)
    try:
        values = gguf.dequantize(data, gguf.GGMLQuantizationType(tensor.format.id))
    except (NotImplementedError, ValueError):
        raise ModelError(f"tensor {tensor.name}: format {tensor.format.name} is not supported") from None
    return values.astype(np.float32).reshape(tensor.shape)


def dequantized_bits(data: np.ndarray, format: str) -> np.ndarray:
    """Blocks of Q1_0 or Q2_0, of 18 bytes each: float16 d and codes of one bit (2 code - 1) or two (code - 1)."""
    blocks = data.reshape(-1, 18)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little").astype(np.float32)
    return scales * (2 * bits - 1 if format == "Q1_0" else bits[:, 0::2] + 2 * bits[:, 1::2] - 1)
