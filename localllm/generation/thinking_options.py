"""The values of the options for reasoning."""

from localllm.errors import UsageError
from localllm.generation.reasoning import CHOICES


def require_choice(think: str, budget: int | None) -> None:
    """Raise UsageError for invalid values."""
    if think not in CHOICES:
        raise UsageError(f"think should be {', '.join(CHOICES[:-1])} or {CHOICES[-1]}, not {think!r}")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise UsageError(f"think_budget should be a whole number, 0 or above, not {budget!r}")
