"""Running localllm map --ray on a cluster of several nodes, one of which is lost.

It needs Ray: scripts/platform/test_ray.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

from localllm import builtin_model
from localllm.errors import LocalllmError
from localllm.services.records.lines import PromptBuilder, Record
from localllm.services.records.map import MapJob, RecordMapping

ray = pytest.importorskip("ray", reason="needs Ray: scripts/platform/test_ray")
pytestmark = pytest.mark.slow
STORE = 100 * 2**20  # bytes of a node's object store


def job(path: str | os.PathLike[str]) -> MapJob:
    from localllm.generation.options import GenerationOptions
    from localllm.generation.sampling.sampler import SamplingOptions

    options = GenerationOptions(40, sampling=SamplingOptions(temperature=0))
    return MapJob(os.fspath(path), PromptBuilder("What is {line}?"), options, context=256, threads=1)


RECORDS = [Record(number, f"number {number}") for number in range(300)]


@pytest.fixture
def cluster(monkeypatch):
    """Start a head without processors, and two nodes."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=STORE) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_loses_nothing(cluster):
    from localllm import open as open_model
    from localllm.services.records.map_ray import RayMapping

    ray_cluster, (lost, _) = cluster
    results = dict[str | int, dict[str, Any]]()
    mapping = RayMapping(job(builtin_model()), RECORDS, ray_cluster.address)
    for record, result in mapping:
        assert record.id not in results, "each is told once"
        results[record.id] = result
        if len(results) == 20:
            ray_cluster.remove_node(lost, allow_graceful=False)
    assert mapping.done == 300
    assert mapping.written == sum(result["completion_tokens"] for result in results.values())
    with open_model(builtin_model(), context=256) as model:
        expected = {record.id: result for record, result in RecordMapping(model, job(builtin_model()), RECORDS)}
    same = sum(results[number] == expected[number] for number in expected)
    assert results.keys() == expected.keys()
    assert same >= 295, "other neighbours in a run, other roundings: a word may change where two are equally likely"


def test_a_missing_model_is_an_error_of_one_line(cluster):
    from localllm.services.records.map_ray import RayMapping

    with pytest.raises(LocalllmError, match=r"nowhere\.gguf") as error:
        list(RayMapping(job("/nowhere.gguf"), RECORDS[:3], cluster[0].address))
    assert "\n" not in str(error.value)


def test_the_command_starts_a_cluster_of_its_own(tmp_path: Path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("a model\na token\n")
    command = "map", builtin_model(), source, "-p", "What is {line}?", "-n", "5", "--temp", "0"
    here = run(*command)
    there = run(*command, "--ray")
    assert (there.returncode, there.stdout) == (0, here.stdout)
    assert run(*command, "-o", output, "--ray").returncode == 0
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [1, 2]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "localllm", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
