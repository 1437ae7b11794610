"""The routing of tokens to experts, as families declare it."""

from localllm.frozen import frozen


@frozen
class Routing:
    """A rule by which tokens choose experts: those with the highest scores, of the best groups.

    Scores are the softmax of the router's logits, or of each the sigmoid or the root of softplus. The weights of the
    chosen ones are their scores, made to add up to 1 if they are normalized, times the scale.
    """

    experts: int
    used: int  # by each token
    sigmoid: bool = False
    normalized: bool = True
    scale: float = 1.0
    groups: int = 1  # of as many experts each; a group is as good as the sum of its two best (DeepSeek-V3, 2024)
    groups_used: int = 1
    weighs_inputs: bool = False  # weights multiply what experts get instead of what they make of it
    rooted: bool = False  # whether scores are roots of softplus (DeepSeek-V4, 2026)
    together: int = 1  # so many experts in a row are one, whose score is that of the expert of its number (GroveMoE)

    @property
    def matrices(self) -> int:
        """The number of experts' matrices."""
        return self.experts // self.together
