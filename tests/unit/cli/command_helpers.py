"""Helpers for tests of commands."""

from types import SimpleNamespace
from typing import Any


def answer(**more: Any) -> Any:
    fields = {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 3, "prefill_s": 0.5, "ttft_s": 0.6,
    "decode_s": 0.25,
            "text": "t", "thinking": "", "finish_reason": "stop", "dropped": 0, "skipped": 0, "seed": 7,
            "drafted": 6,
            "accepted": 2}  # fmt: skip
    return SimpleNamespace(**fields | more)
