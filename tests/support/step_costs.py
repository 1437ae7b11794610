"""Step costs that make every draft worthwhile, whatever this machine measures."""

from localllm.generation.speculation.acceptance import StepCostModel


class Free(StepCostModel):
    """Costs with which every step is equally expensive, so that every draft is verified."""

    is_measured = True

    def estimate_cost(self, tokens: int) -> float:
        return 1.0

    def relate_seconds(self, seconds: float) -> float:
        return 0.0
