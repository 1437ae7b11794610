"""Run `localllm map` on a cluster: Ray Data distributes records to actors, one per node.

Ray starts the actors, repeats the work of lost nodes, and collects the results. The model file must have the same path
on every node, and localllm must be installed on each. The file is memory-mapped, so actors on one node share its
memory.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from localllm.errors import LocalllmError, UsageError
from localllm.services.records.lines import Record
from localllm.services.records.map import MapJob, RecordMapping, Result

if TYPE_CHECKING:
    import numpy as np

MAX_BATCH = 64  # maximum records of an actor's batch; a lost node loses the batch it works on
MIN_BATCH = 16  # minimum, except for the last batch


class RayActor:
    """A worker that answers records on one node."""

    def __init__(self, job: MapJob):
        from localllm.api import open_model

        self._job = job
        self._model = open_model(
            job.path,
            job.threads,
            job.context,
            job.kv_type,
            chat_template=job.chat_template,
            mmproj=job.mmproj,
            lora=dict(job.lora),
            control_vector=dict(job.control_vectors),
            control_layers=job.control_layers,
        )

    def __call__(self, batch: "dict[str, np.ndarray]") -> dict[str, list[int] | list[str]]:
        """Answer a batch.

        The input has columns "number" and "record" (JSON), the output "number" and "result" (JSON).
        """
        records = [Record(**json.loads(text)) for text in batch["record"]]
        numbers = {id(record): number for record, number in zip(records, batch["number"].tolist(), strict=True)}
        results = list(RecordMapping(self._model, self._job, records))
        return {
            "number": [numbers[id(record)] for record, _ in results],
            "result": [json.dumps(result) for _, result in results],
        }


class RayMapping:
    """Answers records on a Ray cluster; iterate over it for the results.

    Attributes:
        written: count of tokens generated so far.  done: count of finished records.
    """

    def __init__(self, job: MapJob, records: list[Record], address: str = ""):
        """Connect to a cluster.

        address: ""  means a running one, or a new one on this computer. Raises UsageError if Ray is not installed,
        LocalllmError if there is no cluster.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # unless the user wants to send usage statistics
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
                raise LocalllmError(f"cannot connect to a Ray cluster: {get_original_error(error)}") from None

    def __iter__(self) -> Iterator[tuple[Record, Result]]:
        for number, text in self._iterate_rows():
            result = json.loads(text)
            self.done += 1
            tokens = result.get("completion_tokens", 0)  # of one answer or several
            self.written += tokens if isinstance(tokens, int) else sum(tokens)
            yield self._records[number], result
            if self._stopped:
                return

    def _iterate_rows(self) -> Iterator[tuple[int, str]]:
        """Yield record indices with their results in JSON. Raises LocalllmError.

        Ray Data spreads actors over the nodes, restarts lost ones and repeats their work.
        """
        from ray.data import ActorPoolStrategy, from_items
        from ray.exceptions import RayError

        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in self._ray.nodes())
        size = max(MIN_BATCH, min(MAX_BATCH, -(-len(self._records) // (4 * nodes))))
        items = [{"number": n, "record": json.dumps(asdict(record))} for n, record in enumerate(self._records)]
        results = from_items(items, override_num_blocks=-(-len(items) // size)).map_batches(
            RayActor,
            fn_constructor_args=(self._job,),
            batch_size=None,
            compute=ActorPoolStrategy(size=nodes, max_tasks_in_flight_per_actor=1),
            num_cpus=1,  # so that a lost node's actor fits on another
        )
        try:
            for row in results.iter_rows():
                yield row["number"], row["result"]
        except RayError as error:
            raise LocalllmError(f"the Ray job failed: {get_original_error(error)}") from None

    def stop(self) -> None:
        """Stop after the next result."""
        self._stopped = True


def get_original_error(error: Exception) -> str:
    """Return the last line of a Ray error, which has the original exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
