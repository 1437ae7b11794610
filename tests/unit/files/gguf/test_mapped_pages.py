"""Mapping pages ahead, so that the first run meets fewer faults."""

import sys

import numpy as np
import pytest
from project import ROOT

from localllm.files.gguf.file import GGUFFile, get_content, map_pages
from localllm.system.memory import is_cached

sys.path.insert(0, str(ROOT / "scripts" / "measure"))
from make_synthetic import SHAPES, write_model

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@linux
def test_pages_in_memory_are_mapped_at_once(tmp_path):
    import resource

    path = str(tmp_path / "weights")
    np.ones(1 << 24, np.uint8).tofile(path)
    met = []
    for ahead in (False, True):
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        if ahead:
            map_pages({path: content})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        assert int(content[::4096].sum(dtype=np.int64)) == 4096
        met.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert met[1] <= met[0] // 8 or met[0] < 64, "faults without, and with"


@linux
def test_mapping_ignores_missing_and_shortened_files(tmp_path):
    """Expect no signal and no exception."""
    path = str(tmp_path / "weights")
    np.ones(1 << 20, np.uint8).tofile(path)
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    assert is_cached(path, len(content))
    with open(path, "r+b") as file:
        file.truncate(4096)
    map_pages({path: content})
    assert not is_cached(str(tmp_path / "none"), 1)
    map_pages({str(tmp_path / "none"): content})


def test_the_whole_file_of_a_tensor_is_found(tmp_path):
    write_model(tmp_path / "model.gguf", SHAPES["tiny"], "Q4_K_M")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        for name in file.tensors:
            assert len(get_content(file.tensors[name].data)) == (tmp_path / "model.gguf").stat().st_size
