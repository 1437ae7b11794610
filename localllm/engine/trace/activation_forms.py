"""A pass over operations: what several of them need in another form, as integers or in tiles, is made once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from localllm.engine.trace.operations import Activation, Operation

Forms = Mapping[str, Mapping[str, Any]]  # by verb that makes it, what that is given


def with_forms(operations: Iterable[Operation], forms_of: Callable[[Operation], Forms]) -> list[Operation]:
    """The operations, before each what makes the forms of its first input that nobody has needed so far.

    They are inputs of the operation besides, in the order of forms_of.
    """
    made, result = dict[tuple[str, Activation], Activation](), list[Operation]()
    for operation in operations:
        forms = []
        for verb, given in forms_of(operation).items():
            x = operation.inputs[0]
            if (verb, x) not in made:
                made[verb, x] = Activation(x.rows, x.columns)
                result.append(Operation(verb, (x,), made[verb, x], given))
            forms.append(made[verb, x])
        result.append(replace(operation, inputs=(*operation.inputs, *forms)) if forms else operation)
    return result
