"""Server metrics in Prometheus' text format. Source: https://prometheus.io/docs/instrumenting/exposition_formats/."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from threading import Lock

from localllm.generation.request import Request

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


DISK_METRICS = {  # name, type and help text of the statistics of weights larger than memory
    "read_bytes": ("weights_read_bytes_total", "counter", "Bytes of weights read from the disk."),
    "waited_s": ("weights_waited_seconds_total", "counter", "Time that runs waited for the disk."),
    "table_bytes": ("weights_table_bytes", "gauge", "Bytes of rows of embeddings that were read."),
    "returned_bytes": ("weights_returned_bytes", "gauge", "Bytes of weights given up for other programs."),
    "expert_hits": ("experts_in_memory_total", "counter", "Chosen experts that were in memory."),
    "expert_misses": ("experts_read_total", "counter", "Chosen experts that were not in memory."),
}


class Histogram:
    """A thread-safe histogram of durations; `SECONDS` are the bucket bounds."""

    def __init__(self) -> None:
        self._counts, self._sum, self._lock = [0] * (len(SECONDS) + 1), 0.0, Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect_left(SECONDS, seconds)] += 1
            self._sum += seconds

    def format_lines(self, name: str) -> Iterator[str]:
        with self._lock:
            counts, total = [*self._counts], self._sum
        below = 0
        for bound, count in zip((*SECONDS, "+Inf"), counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {total:.6f}"
        yield f"{name}_count {below}"


class Metrics:
    """The counters of one server.

    Attributes:
        first_token, between_tokens: seconds.  responses: HTTP responses by (path, status).
    """

    def __init__(self) -> None:
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.responses = Counter[tuple[str, int]]()
        self._prefilled = self._cached_tokens = self._generated = self._cancelled = self._finished = 0

    def record_finished(self, request: Request) -> None:
        """Count a request that has completed or failed."""
        self._finished += 1
        self._count(request)

    def record_cancelled(self, request: Request) -> None:
        self._cancelled += 1
        self._count(request)

    def _count(self, request: Request) -> None:
        if request.begun:
            self._prefilled += len(request.prompt) - request.cached
            self._cached_tokens += request.cached
            self._generated += sum(len(completion.tokens) for completion in request.answers)

    def format(self, running: int, waiting: int, limits: dict[str, float], disk: dict[str, float]) -> str:
        """Format all metrics.

        running, waiting: current count of completions and of requests.  limits: further gauges by name.  disk: as
        ModelPool.measure_disk returns it.
        """
        lines = list[str]()

        def add(name: str, kind: str, help: str, values: Iterator[str] | list[str]) -> None:
            lines.extend([f"# HELP localllm_{name} {help}", f"# TYPE localllm_{name} {kind}", *values])

        def add_value(name: str, kind: str, help: str, value: float) -> None:
            add(name, kind, help, [f"localllm_{name} {value:g}"])

        add(
            "http_requests_total", "counter", "HTTP requests by path and status.",
            [f'localllm_http_requests_total{{path="{path}",status="{status}"}} {count}'
             for (path, status), count in sorted(self.responses.items())],
        )  # fmt: skip
        add_value("answers_running", "gauge", "Completions being generated.", running)
        add_value("requests_waiting", "gauge", "Requests waiting in the queue.", waiting)
        add_value("requests_finished_total", "counter", "Requests completed or failed.", self._finished)
        add_value("requests_left_total", "counter", "Requests cancelled by a disconnect.", self._cancelled)
        add_value("prompt_tokens_read_total", "counter", "Prompt tokens computed.", self._prefilled)
        add_value(
            "prompt_tokens_cached_total", "counter", "Prompt tokens found in the prefix cache.", self._cached_tokens
        )
        add_value("tokens_written_total", "counter", "Tokens generated.", self._generated)
        for name, value in limits.items():
            add_value(name, "gauge", name.replace("_", " ").capitalize() + ".", value)
        for statistic, description in DISK_METRICS.items():
            if statistic in disk:
                add_value(*description, disk[statistic])
        for name, help, histogram in (
            ("first_token_seconds", "Time to first token.", self.first_token),
            ("between_tokens_seconds", "Time between tokens.", self.between_tokens),
        ):
            add(name, "histogram", help, histogram.format_lines(f"localllm_{name}"))
        return "\n".join(lines) + "\n"
