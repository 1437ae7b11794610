"""The rule that routes tokens to experts, as families declare it."""

from localllm.frozen import frozen


@frozen
class Routing:
    """A rule that routes a token to the experts with the highest scores in the best groups.

    Scores are the softmax of the router's logits, or the sigmoid or the root of softplus of each. The weight of a used
    expert is its score, divided by the sum of all used ones' if `normalized`, times `scale`.
    """

    experts: int
    used: int  # by each token
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1  # of equal size; a group's score is the sum of its two highest (DeepSeek-V3, 2024)
    groups_used: int = 1
    weighs_inputs: bool = False  # weights multiply the experts' inputs instead of their outputs
    rooted: bool = False  # scores are roots of softplus (DeepSeek-V4, 2026)
    together: int = 1  # so many consecutive experts share matrices; group i has expert i's score (GroveMoE)

    @property
    def matrices(self) -> int:
        """The number of experts' matrices."""
        return self.experts // self.together
