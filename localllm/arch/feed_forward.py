"""The feed-forward networks of families: gated ones, ungated ones, and mixtures of experts.

Source of the mixtures: Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2021.
"""

from collections.abc import Callable, Sequence

from localllm.arch.metadata import HyperparameterReader, format_value
from localllm.arch.verbs import Activation, Builder, Choice, Routing
from localllm.arch.weights import Weight, Weights, stack_matrices


def apply_gated_feed_forward(
    b: Builder, w: Weights, x: Activation, gate: Callable[[Activation, Activation], Activation]
) -> Activation:
    """Apply a gated network (Shazeer 2020) with an activation such as b.swiglu.

    The gate's matrix may be the upper half of ffn_up.
    """
    is_fused = w.get("ffn_gate") is None and w.ffn_up.shape[0] != w.ffn_down.shape[-1]
    of_gate, up = w.ffn_up.split_halves() if is_fused else (w.ffn_gate, w.ffn_up)
    return b.linear(gate(b.linear(x, of_gate), b.linear(x, up)), w.ffn_down)


def apply_ungated_feed_forward(
    b: Builder, w: Weights, x: Activation, activation: Callable[[Activation], Activation]
) -> Activation:
    """Apply two matrices with an activation between them, such as b.gelu."""
    return b.linear(activation(b.linear(x, w.ffn_up)), w.ffn_down)


Gate = Callable[[Activation, Activation], Activation]  # such as b.swiglu

# Score functions of routers, by their ids in expert_gating_func.
FUNCTIONS = SOFTMAX, SIGMOID, SOFTMAX_OF_SELECTED, ROOT_OF_SOFTPLUS = 1, 2, 3, 4


def read_routing(
    fields: HyperparameterReader,
    function: int = SOFTMAX,
    normalized: bool = True,
    scale: float = 1.0,
    weighs_inputs: bool = False,
) -> Routing | None:
    """Read the expert_* keys; return None for a model without experts.

    function, normalized, scale, weighs_inputs: how the family computes the experts' weights. Raises ModelError, also
    for a file that asks for another computation.
    """
    experts = fields.read_count("expert_count", 0)
    if not experts:
        return None
    choices = {
        "expert_gating_func": (fields.read_count("expert_gating_func", 0) or function, function),
        "expert_weights_norm": (fields.read_flag("expert_weights_norm", normalized), normalized),
        "expert_weights_scale": (fields.read_number("expert_weights_scale", 0.0) or scale, scale),
    }
    for key, (value, supported) in choices.items():
        if value != supported or function not in FUNCTIONS:
            raise fields.make_error(f"{fields.format_key(key)} {format_value(value)} is not supported")
    normalized = normalized or function == SOFTMAX_OF_SELECTED  # equal to the normalized softmax of all
    active, groups, groups_used = read_expert_counts(fields, experts)
    rooted = function == ROOT_OF_SOFTPLUS
    return Routing(experts, active, function == SIGMOID, normalized, scale, groups, groups_used, weighs_inputs, rooted)


def read_file_routing(fields: HyperparameterReader, function: int | None = None) -> Routing | None:
    """Read the expert_* keys, among them the score function and its scale. Raises ModelError.

    function: the score function of a file without the key; None if the key is required.
    """
    function_id = fields.read_count("expert_gating_func", 0) or function
    if fields.read_count("expert_count", 0) and function_id not in (SOFTMAX, SIGMOID):
        raise fields.make_value_error("expert_gating_func", f"{SOFTMAX} or {SIGMOID}")
    normalized = fields.read_flag("expert_weights_norm", False)
    return read_routing(
        fields, function_id or SOFTMAX, normalized, fields.read_number("expert_weights_scale", 0.0) or 1.0
    )


def read_expert_counts(fields: HyperparameterReader, experts: int) -> tuple[int, int, int]:
    """Return the counts of experts per token, groups of experts, and groups per token. Raises ModelError."""
    active, groups = fields.read_count("expert_used_count"), fields.read_count("expert_group_count", 0) or 1
    groups_used = fields.read_count("expert_group_used_count", groups if groups > 1 else 0) or groups
    if active > experts:
        raise fields.make_error(f"expert_used_count {active} must be at most expert_count {experts}")
    if experts % groups or (groups > 1 and experts // groups < 2) or groups_used > groups:
        raise fields.make_error(
            f"expert_count {experts}, expert_group_count {groups} and expert_group_used_count {groups_used} are "
            "inconsistent"
        )
    if active > experts // groups * groups_used:
        raise fields.make_error(
            f"expert_group_used_count {groups_used} of {groups} is too small for {active} used experts"
        )
    return active, groups, groups_used


def apply_feed_forward_or_experts(
    b: Builder,
    w: Weights,
    routing: Routing | None,
    x: Activation,
    gate: Gate,
    beside: Callable[[Builder, Weights, Activation, Gate], Activation] | None = None,
) -> Activation:
    """Apply a feed-forward network, or the experts in layers with a router.

    beside: the shared expert, which is added to the experts.
    """
    if routing is None or not (w.get("ffn_gate_inp", by_layer=True) or w.get("ffn_down_exps", by_layer=True)):
        return apply_gated_feed_forward(b, w, x, gate)
    y = apply_mixture_of_experts(b, w, routing, x, gate)
    return b.add(y, beside(b, w, x, gate)) if beside else y


def apply_mixture_of_experts(b: Builder, w: Weights, routing: Routing, x: Activation, gate: Gate) -> Activation:
    """Apply each token's experts, and sum their weighted outputs."""
    bias = w.get_bias("exp_probs_b") or w.get_exact("exp_probs_b")  # the second name is that of Hunyuan 3
    if bias and bias.shape[:-1] == (1,):  # in files of ERNIE 4.5
        bias = bias.flatten()
    choice = b.route(b.linear(x, w.ffn_gate_inp), routing, bias)
    return apply_experts(b, collect_expert_matrices(b, w, routing.experts), choice, x, gate)


def apply_experts(b: Builder, stacks: Sequence[Weight], choice: Choice, x: Activation, gate: Gate) -> Activation:
    """Compute the unweighted outputs of each token's experts, a row for each token and expert.

    stacks: the experts' matrices, from collect_expert_matrices.
    """
    of_gate, up, down = stacks
    rows = b.gather(x, choice)
    y = gate(b.expert_linear(rows, of_gate, choice), b.expert_linear(rows, up, choice))
    return b.scatter(b.expert_linear(y, down, choice), choice)


def collect_expert_matrices(b: Builder, w: Weights, experts: int) -> list[Weight]:
    """Return the experts' gate, up and down matrices, each a stack [experts, rows, columns].

    Gate and up may be fused in the file, and files of 2023 have one tensor per expert.
    """
    if fused := w.get("ffn_gate_up_exps"):
        return [*fused.split_halves(), w.ffn_down_exps]
    if not w.get("ffn_up.0"):
        return [w.ffn_gate_exps, w.ffn_up_exps, w.ffn_down_exps]
    apart = [[w.require(f"ffn_{part}.{expert}") for expert in range(experts)] for part in ("gate", "up", "down")]
    b.ignore(*(matrix for part in apart for matrix in part))
    return [stack_matrices(part) for part in apart]


def apply_shared_expert(b: Builder, w: Weights, x: Activation, gate: Gate) -> Activation:
    """Apply the shared expert, which every token uses."""
    return b.linear(gate(b.linear(x, w.ffn_gate_shexp), b.linear(x, w.ffn_up_shexp)), w.ffn_down_shexp)


def apply_gated_shared_expert(b: Builder, w: Weights, x: Activation, gate: Gate) -> Activation:
    """Apply the shared expert, and multiply its output by the sigmoid of a gate."""
    return b.sigmoid_gate(apply_shared_expert(b, w, x, gate), b.linear(x, w.ffn_gate_inp_shexp.to_row()))
