"""Run `localllm map` on a cluster: Ray Data hands records to actors, one per node.

Ray starts the actors, distributes work, repeats what a lost node was doing, and collects the results. The model file
has to exist under the same path on every node, and localllm has to be installed; the file is mapped, so actors on one
node share its memory.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from localllm.errors import LocalllmError, UsageError
from localllm.services.map import MapJob, Mapping, Result
from localllm.services.records import Record

MOST = 64  # records that an actor gets at a time: they end together, and a lost node has lost them
LEAST = 16


class Actor:
    """A worker that answers records on one node."""

    def __init__(self, job: MapJob):
        from localllm.api import open_model

        self._job = job
        self._model = open_model(
            job.path, job.threads, job.context, job.kv_type, chat_template=job.chat_template, mmproj=job.mmproj
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Answer a batch of numbers and JSON records; return numbers and JSON results."""
        records = [Record(**json.loads(text)) for text in batch["record"]]
        numbers = {id(record): number for record, number in zip(records, batch["number"].tolist(), strict=True)}
        made = list(Mapping(self._model, self._job, records))
        return {
            "number": [numbers[id(record)] for record, _ in made],
            "result": [json.dumps(result) for _, result in made],
        }


class RayMapping:
    """A mapping on a Ray cluster; address "": the running one, or a new one on this computer.

    Attributes:
        written, done: tokens of answers, and records, so far.
    """

    def __init__(self, job: MapJob, records: list[Record], address: str = ""):
        """Connect to the cluster.

        Raises UsageError if Ray is not installed, LocalllmError if there is no cluster.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start tells nobody
        try:
            import ray
            from ray.data import DataContext
        except ImportError:
            raise UsageError("Ray is not installed: pip install 'localllm[ray]'") from None
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        DataContext.get_current().enable_progress_bars = False
        self.written = self.done = 0
        self._job, self._records, self._ray, self._stopped = job, records, ray, False
        if not ray.is_initialized():
            try:
                ray.init(address or None, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise LocalllmError(f"no Ray cluster: {one_line(error)}") from None

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        for row in self._rows():
            result = json.loads(row["result"])
            self.done += 1
            self.written += sum_of(result.get("completion_tokens", 0))
            yield self._records[row["number"]], result
            if self._stopped:
                return

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield the actors' results. Raises LocalllmError.

        Ray Data itself spreads actors over the nodes, restarts lost ones and repeats their work.
        """
        from ray.data import ActorPoolStrategy, from_items
        from ray.exceptions import RayError

        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in self._ray.nodes())
        size = max(LEAST, min(MOST, -(-len(self._records) // (4 * nodes))))
        items = [{"number": n, "record": json.dumps(asdict(record))} for n, record in enumerate(self._records)]
        results = from_items(items, override_num_blocks=-(-len(items) // size)).map_batches(
            Actor,
            fn_constructor_args=(self._job,),
            batch_size=None,
            compute=ActorPoolStrategy(size=nodes, max_tasks_in_flight_per_actor=1),
            num_cpus=1,  # so that an actor whose node is lost finds room on another
        )
        try:
            yield from results.iter_rows()
        except RayError as error:
            raise LocalllmError(f"the Ray job failed: {one_line(error)}") from None

    def stop(self) -> None:
        """Stop after the next result."""
        self._stopped = True


def sum_of(count: int | Iterable[int]) -> int:
    return count if isinstance(count, int) else sum(count)


def one_line(error: Exception) -> str:
    """Return the last line of a Ray error: the original exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
