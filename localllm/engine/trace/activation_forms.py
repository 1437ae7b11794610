"""A pass over operations: what several of them need in another form, as integers or in tiles, is made once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from localllm.engine.operations.activation import Activation
from localllm.engine.operations.operation import ActivationForm, Operation

Forms = Mapping[str, bool]  # by the verb that makes it, whether it is exact


def insert_activation_forms(operations: Iterable[Operation], forms_of: Callable[[Operation], Forms]) -> list[Operation]:
    """Put before each operation what makes the forms of its first input that nobody has needed so far.

    They are inputs of the operation besides, in the order of forms_of.
    """
    made, result = dict[tuple[str, Activation], Activation](), list[Operation]()
    for operation in operations:
        forms = []
        for verb, exact in forms_of(operation).items():
            x = operation.inputs[0]
            if (verb, x) not in made:
                made[verb, x] = Activation(x.rows, x.columns)
                result.append(ActivationForm((x,), made[verb, x], verb, exact))
            forms.append(made[verb, x])
        result.append(replace(operation, inputs=(*operation.inputs, *forms)) if forms else operation)
    return result
