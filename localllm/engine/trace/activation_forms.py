"""A graph pass that converts activations once for all operations that need the same form."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from localllm.engine.operations.activation import Activation
from localllm.engine.operations.operation import ActivationForm, Operation

Forms = Mapping[str, bool]  # by the verb that converts: whether the form must be exact


def insert_activation_forms(operations: Iterable[Operation], forms_of: Callable[[Operation], Forms]) -> list[Operation]:
    """Insert the conversions of first inputs that forms_of(operation) names, once per activation and form.

    The converted forms become further inputs of the operation, in the order of forms_of.
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
