"""What the server counts, in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from threading import Lock

from localllm.generation.request import Request

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How long something took, in steps of `SECONDS`. Any thread may add."""

    def __init__(self) -> None:
        self._counts, self._sum, self._lock = [0] * (len(SECONDS) + 1), 0.0, Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(SECONDS, seconds)] += 1
            self._sum += seconds

    def lines(self, name: str) -> Iterator[str]:
        with self._lock:
            counts, total = [*self._counts], self._sum
        below = 0
        for bound, count in zip((*SECONDS, "+Inf"), counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {total:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """Counts of one server.

    Attributes:
        first_token, between_tokens: seconds.  answered: HTTP answers by (path, status).
    """

    def __init__(self) -> None:
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.answered = Counter[tuple[str, int]]()
        self._read = self._cached = self._written = self._left = self._finished = 0

    def finished(self, request: Request) -> None:
        """All answers to a request are there, or none will come."""
        self._finished += 1
        self._count(request)

    def left(self, request: Request) -> None:
        """Its client went away."""
        self._left += 1
        self._count(request)

    def _count(self, request: Request) -> None:
        if request.begun:
            self._read += len(request.prompt) - request.cached
            self._cached += request.cached
            self._written += sum(len(answering.tokens) for answering in request.answers)

    def text(self, running: int, waiting: int, limits: dict[str, float]) -> str:
        """running, waiting: answers and requests now.  limits: what else there is to tell, by name, with its value."""
        lines = list[str]()

        def tell(name: str, kind: str, help: str, values: Iterator[str] | list[str]) -> None:
            lines.extend([f"# HELP localllm_{name} {help}", f"# TYPE localllm_{name} {kind}", *values])

        def number(name: str, kind: str, help: str, value: float) -> None:
            tell(name, kind, help, [f"localllm_{name} {value:g}"])

        tell(
            "http_requests_total", "counter", "HTTP requests by path and status.",
            [f'localllm_http_requests_total{{path="{path}",status="{status}"}} {count}'
             for (path, status), count in sorted(self.answered.items())],
        )  # fmt: skip
        number("answers_running", "gauge", "Answers in the making.", running)
        number("requests_waiting", "gauge", "Requests that have not begun.", waiting)
        number("requests_finished_total", "counter", "Requests that were answered, or failed.", self._finished)
        number("requests_left_total", "counter", "Requests whose client went away.", self._left)
        number("prompt_tokens_read_total", "counter", "Tokens of prompts that were computed.", self._read)
        number("prompt_tokens_cached_total", "counter", "Tokens of prompts that had been read before.", self._cached)
        number("tokens_written_total", "counter", "Tokens of answers.", self._written)
        for name, value in limits.items():
            number(name, "gauge", name.replace("_", " ").capitalize() + ".", value)
        for name, help, histogram in (
            ("first_token_seconds", "From the request to the first token.", self.first_token),
            ("between_tokens_seconds", "From one token of an answer to the next.", self.between_tokens),
        ):
            tell(name, "histogram", help, histogram.lines(f"localllm_{name}"))
        return "\n".join(lines) + "\n"
