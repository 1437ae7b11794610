"""Compare each verb's kernels, for CPU and GPU, with the formula that defines it."""

import inspect

import numpy as np
import pytest
from kernel_calls import caller, count, for_any_parts, normal, output, padded, written
from simulated import launch

from localllm.arch import verbs
from localllm.arch.rowwise_verbs import RowwiseVerbs
from localllm.engine.cpu.lowering import VERBS as OF_CPU
from localllm.engine.cuda.lowering import VERBS as OF_CARDS
from localllm.engine.lower.activation import ALL, Activation
from localllm.engine.operations.elementwise import Elementwise
from localllm.engine.operations.operation import Operation, lower
from localllm.engine.operations.registry import OPERATIONS, ReferenceBuilder
from localllm.engine.trace.recorder import Recorder
from localllm.kernels import cuda
from localllm.kernels.table import FORMULAS, KERNELS

ROWWISE = {name: KERNELS[name] for name in FORMULAS}
# Arguments of verbs with a formula, besides activations.
CASES = {
    "add": {},
    "multiply": {},
    "swiglu": {},
    "geglu": {},
    "reglu": {},
    "swiglu_limited": {"sharpness": 1.702, "limit": 7.0},
    "gelu": {},
    "gelu_erf": {},
    "relu_squared": {},
    "relu": {},
    "exponential": {},
    "add_scalar": {"number": 0.7},
    "xielu": {"alpha_p": 0.8, "alpha_n": 1.3, "beta": 0.5, "epsilon": -1e-6},
    "sigmoid": {},
    "clamp": {"limit": 1.5},
    "signed_root": {"least": 0.25},
    "softcap": {"cap": 2.5},
}
WITH_VECTORS = {"softplus", "scale", "scale_columns", "lerp"}  # these have their own records and tests
TOKENS, COLUMNS = 5, 20


class Formulas(RowwiseVerbs):
    """A builder that evaluates the formulas."""

    def rowwise(self, verb, formula, *inputs, **given):
        return formula(*inputs, **given)


@pytest.fixture(scope="module")
def call():
    return caller(list(CASES))


def test_every_rowwise_verb_is_tested():
    assert ROWWISE.keys() == CASES.keys() | WITH_VECTORS


NO_OPERATIONS = {  # verbs that record none, or those of others
    "embed_inputs", "add_deepstack", "tap_layer_input", "rowwise", "select_by_context", "ignore", "export_hidden",
    "head_linear", "previous", "mean",
}  # fmt: skip
UNSAID = {
    "to_heads",
    "from_heads",
    "every_head",
    "export_hidden",
    "external_input",
    "add_squares",
    "add_expert_squares",
}  # operations that no architecture asks for


def verbs_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def test_builder_recorder_and_reference_have_the_verbs_of_the_registry():
    verbs_said = verbs_of(verbs.Builder)
    assert verbs_said - NO_OPERATIONS == (OPERATIONS.keys() - UNSAID) | CASES.keys()
    for builder in (Recorder, ReferenceBuilder):
        assert verbs_said <= verbs_of(builder), builder
    for name in verbs_said:
        _, *expected = inspect.signature(getattr(verbs.Builder, name)).parameters
        for builder in (Recorder, ReferenceBuilder):
            _, *parameters = inspect.signature(getattr(builder, name)).parameters
            assert parameters == expected, (builder, name)


def test_every_operation_has_steps_on_every_target():
    for name, kind in OPERATIONS.items():
        if kind.lower is Operation.lower and name not in OF_CPU.keys() & OF_CARDS.keys():
            row = KERNELS[name]
            assert row.inputs is not None and row.cpu and row.cuda, name
            assert set(row.inputs) <= set(row.arguments._fields), name
    for name in FORMULAS:
        assert name in CASES or name in OPERATIONS, name


def test_every_grid_has_a_kernel():
    assert {row.grid for row in KERNELS.values() if row.cuda} <= cuda.GRIDS.keys()


def test_a_verb_without_a_formula_is_an_error_that_names_the_file():
    target = type("Target", (), {"verbs": OF_CPU})
    x = Activation(ALL, 4)

    class Gulp(Operation):
        VERB = "slurp_twice"

    for operation in (Gulp((x,), x), Elementwise((x,), x, "slurp_twice", {})):
        with pytest.raises(NotImplementedError, match=r"'slurp_twice' has no formula in localllm/kernels/formulas\.py"):
            lower(None, operation, target)


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_their_formula(call, name):
    """Check also that exactly the infinite inputs give infinite outputs."""
    row, given = ROWWISE[name], CASES[name]
    inputs = [3 * normal(TOKENS, COLUMNS, seed=place) for place in range(len(row.inputs))]
    inputs[0][:, :4] = 50, -50, 1e-3, -1e-3
    inputs[0][2, 4:7] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        expected = getattr(Formulas(), name)(*inputs, **given)
    finite = np.isfinite(expected)
    assert not finite[2, 4:7].any()
    assert finite.sum() == expected.size - 3

    def arguments(y):
        sources = [padded(x) for x in inputs]
        shape = {"count": count(TOKENS), "y": y, "stride": y.strides[0], "columns": COLUMNS}
        strides = {name: sources[-1].strides[0] for name in row.arguments._fields if name.endswith("_stride")}
        return dict(zip(row.inputs, sources, strict=True)) | shape | strides | given

    def on_cpu(parts):
        y = output(TOKENS, COLUMNS)
        call(name, parts, **arguments(y))
        return written(y, TOKENS, COLUMNS)

    def on_a_card():
        y = output(TOKENS, COLUMNS)
        launch(name, TOKENS, **arguments(y))
        return written(y, TOKENS, COLUMNS)

    with np.errstate(all="ignore"):
        for got in (for_any_parts(on_cpu), on_a_card()):
            np.testing.assert_array_equal(np.isfinite(got), finite)
            np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-5, atol=1e-6)


def test_formulas_take_the_arguments_of_their_verbs():
    for name, given in CASES.items():
        _, *taken = inspect.signature(getattr(RowwiseVerbs, name)).parameters
        assert taken[len(ROWWISE[name].inputs) :] == [*given]
