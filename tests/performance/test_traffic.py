"""`tpurun bench` counts what collectives move through memory."""

import json
import os

import pytest
import torch

from tools.jobs import TPURUN, Job
from tpurun import _C


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_moved_is_counted(ranks, tmp_path):
    """Bytes are those of the schedules, whoever executes them."""
    command = [TPURUN, "bench", "--ranks", str(ranks), "--json", "--seconds", "0.01", "--sizes", "96K,3M"]
    command += ["--collectives", "all_reduce,all_gather,broadcast,all_to_all", "--memory", "staged,mapped"]
    job = Job(tmp_path, command).wait()
    assert job.code == 0, job.err
    rows = [json.loads(line) for line in job.out.splitlines()]
    assert len(rows) == 16
    for row in rows:
        assert ("roofline_percent" in row) == (row["bytes"] >= 1 << 20)
        if row["memory"] == "mapped":
            assert (row["traffic_bytes"], row["staged_bytes"]) == (least_traffic(row, ranks), 0)
        else:
            assert row["traffic_bytes"] > row["floor_bytes"] and row["staged_bytes"] > 0
    staged = [row for row in rows if (row["memory"], row["collective"]) == ("staged", "all_reduce")]
    for row in staged:
        assert row["traffic_bytes"] == staged_passes(row, ranks) * row["bytes"]
        assert row["floor_bytes"] == 2 * ranks * row["bytes"]


def staged_passes(row: dict, ranks: int) -> int:
    """How often an all-reduce reads or writes as many bytes as a tensor has; mapped, 2 N times."""
    if row["bytes"] >= 1 << 20 and ranks > len(os.sched_getaffinity(0)):
        # A chain: the first rank begins it, the others fold to it, and all take the result.
        return 2 + 3 * (ranks - 1) + 2 * ranks
    # Two ranks fold for themselves, more fold together and fetch the result.
    return 10 if ranks == 2 else 5 * ranks + 1


def least_traffic(row: dict, ranks: int) -> int:
    """With more ranks than cores each reads itself what is broadcast; the floor has it read once for all."""
    is_read_by_each = row["collective"] == "broadcast" and row["bytes"] > 1 << 20
    if is_read_by_each and ranks > len(os.sched_getaffinity(0)):
        return 2 * (ranks - 1) * row["bytes"]
    return row["floor_bytes"]


def test_a_copy_past_the_caches_is_a_copy():
    source = torch.arange(50_001)[1:]
    to = torch.zeros_like(source)
    _C.stream_copy(to, source)
    assert torch.equal(to, source)


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (torch.zeros(7), "as many bytes, 32, got 28"),
        (torch.zeros(16)[::2], "contiguous CPU tensors"),
        (torch.zeros(8, device="meta"), "contiguous CPU tensors"),
    ],
    ids=["short", "strided", "elsewhere"],
)
def test_what_can_not_be_copied_so_is_refused(to, expected):
    with pytest.raises(ValueError, match=expected):
        _C.stream_copy(to, torch.zeros(8))


def test_a_tensor_is_not_copied_to_itself():
    tensor = torch.zeros(8)
    with pytest.raises(ValueError, match="views of one storage"):
        _C.stream_copy(tensor[:4], tensor[4:])
