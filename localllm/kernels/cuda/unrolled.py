"""Tuples of values in a thread's registers, and functions that apply a function to all of them.

Registers have no addresses, so an array that a loop indexes would be in local memory, which is slow. In this module,
loops are unrolled by the compiler, and every index is a constant. Matrices are tuples in row-major order.
"""

import inspect
from functools import reduce

import numpy as np

from localllm.kernels.cuda.gpu import SIMULATED

if SIMULATED:

    def unroll(count, function, result="float32"):
        """Return a function (*arguments) -> tuple of function(i, *arguments) for each i below `count`.

        If an argument is a tuple of `count` values, call i gets its element i; others are passed unchanged. result: the
        type of the numbers in the returned tuple.
        """

        def word(*arguments):
            items = [a if isinstance(a, tuple) and len(a) == count else (a,) * count for a in arguments]
            return tuple(function(i, *item) for i, item in enumerate(zip(*items, strict=True)))

        return word

    def visit(count, function):
        """Return a function (*arguments) that calls function(i, *arguments) for each i below `count`."""
        return unroll(count, function)

    def fold(groups, function):
        """Return a function (x) -> the values of each group of indices, combined by `function`, two at a time."""
        return lambda x: tuple(reduce(function, (x[place] for place in group)) for group in groups)

    def make_products(columns):
        """Return a function (q, k) -> q k^T; q: [rows, columns], k: [others, columns], result: [others, rows]."""

        def products(q, k):
            return tuple(np.dot(np.reshape(k, (-1, columns)), np.reshape(q, (-1, columns)).T).reshape(-1).tolist())

        return products

    def add_outer(sums, weights, values):
        """Return sums + weights^T values; sums: [rows, columns], weights: [others, rows], values: [others, columns]."""
        columns = compute_columns(len(sums), len(weights), len(values))
        rows = len(sums) // columns
        return tuple(
            total + sum(weights[u + i // columns] * values[u // rows * columns + i % columns]
                        for u in range(0, len(weights), rows))
            for i, total in enumerate(sums)
        )  # fmt: skip

    def scale_rows(x, factors):
        """Multiply each row of x, [rows, columns], by its factor."""
        return tuple(number * factors[i * len(factors) // len(x)] for i, number in enumerate(x))

else:
    from numba import types
    from numba.cuda.extending import intrinsic

    def unroll(count, function, result="float32"):
        return make_calls(count, function, getattr(types, result))

    def visit(count, function):
        return make_calls(count, function, types.none)

    def make_calls(count, function, result):
        def typed(*arguments):
            is_item = [isinstance(kind, types.UniTuple) and kind.count == count for kind in arguments]
            argument_types = [kind.dtype if item else kind for kind, item in zip(arguments, is_item, strict=True)]

            def code(context, builder, signature, values):
                results = []
                for i in range(count):
                    pairs = zip(values, is_item, strict=True)
                    items = [builder.extract_value(value, i) if item else value for value, item in pairs]
                    index = context.get_constant(types.int64, i)
                    one = result(types.int64, *argument_types)
                    results.append(context.compile_internal(builder, function, one, [index, *items]))
                if result is types.none:
                    return context.get_dummy_value()
                return context.make_tuple(builder, signature.return_type, results)

            return (types.none if result is types.none else types.UniTuple(result, count))(*arguments), code

        return intrinsic(WORDS[len(inspect.signature(function).parameters) - 1](typed))

    # The parameters of an intrinsic must be named, so there is one wrapper for each number of arguments.
    WORDS = {
        1: lambda typed: lambda context, a: typed(a),
        2: lambda typed: lambda context, a, b: typed(a, b),
        3: lambda typed: lambda context, a, b, c: typed(a, b, c),
        4: lambda typed: lambda context, a, b, c, d: typed(a, b, c, d),
        5: lambda typed: lambda context, a, b, c, d, e: typed(a, b, c, d, e),
        6: lambda typed: lambda context, a, b, c, d, e, f: typed(a, b, c, d, e, f),
        7: lambda typed: lambda context, a, b, c, d, e, f, g: typed(a, b, c, d, e, f, g),
    }

    def fold(groups, function):
        @intrinsic
        def word(typing_context, x):
            def code(context, builder, signature, arguments):
                numbers, results = extract_items(builder, arguments[0]), []
                two = x.dtype(x.dtype, x.dtype)
                for first, *others in groups:
                    result = numbers[first]
                    for place in others:
                        result = context.compile_internal(builder, function, two, [result, numbers[place]])
                    results.append(result)
                return context.make_tuple(builder, signature.return_type, results)

            return types.UniTuple(x.dtype, len(groups))(x), code

        return word

    def extract_items(builder, value):
        return [builder.extract_value(value, i) for i in range(value.type.count)]

    def make_products(columns):
        @intrinsic
        def products(typing_context, q, k):
            def code(context, builder, signature, arguments):
                rows, others = extract_items(builder, arguments[0]), extract_items(builder, arguments[1])
                results = []
                for y in range(0, len(others), columns):
                    for x in range(0, len(rows), columns):
                        total = context.get_constant(types.float32, 0.0)
                        for i in range(columns):
                            total = builder.fma(rows[x + i], others[y + i], total)
                        results.append(total)
                return context.make_tuple(builder, signature.return_type, results)

            return types.UniTuple(types.float32, q.count // columns * (k.count // columns))(q, k), code

        return products

    @intrinsic
    def add_outer(typing_context, sums, weights, values):
        columns = compute_columns(sums.count, weights.count, values.count)
        rows = sums.count // columns

        def code(context, builder, signature, arguments):
            totals, w, v = (extract_items(builder, argument) for argument in arguments)
            for u in range(0, len(w), rows):
                for i in range(len(totals)):
                    value = v[u // rows * columns + i % columns]
                    totals[i] = builder.fma(w[u + i // columns], value, totals[i])
            return context.make_tuple(builder, signature.return_type, totals)

        return sums(sums, weights, values), code

    @intrinsic
    def scale_rows(typing_context, x, factors):
        def code(context, builder, signature, arguments):
            numbers, by = (extract_items(builder, argument) for argument in arguments)
            scaled = [builder.fmul(number, by[i * len(by) // len(numbers)]) for i, number in enumerate(numbers)]
            return context.make_tuple(builder, signature.return_type, scaled)

        return x(x, factors), code


def compute_columns(sums, weights, values):
    """Compute `columns` from the sizes of matrices [rows, columns], [others, rows] and [others, columns]."""
    return round((sums * values / weights) ** 0.5)
