"""Ranks that post different operations: all learn the same, nothing is written, other groups go on."""

import re

import pytest

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from tpurun.errors import CollectiveMismatchError

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
without_guilty = dist.new_group([0, 1])
tensor = torch.full((4,), float(rank))

def usual():
    {usual}  # usual

def guilty():
    {guilty}  # guilty

try:
    guilty() if rank == 2 else usual()
except CollectiveMismatchError as error:
    print(f"<<<{{error}}>>>")
    assert isinstance(error, dist.DistBackendError)
assert tensor.tolist() == [float(rank)] * 4, "written to"
if rank < 2:
    dist.all_reduce(tensor, group=without_guilty)
    print("the others have", tensor.tolist())
"""

CASES = {
    "collective": ("dist.all_reduce(tensor)", "dist.broadcast(tensor, 0)", "all_reduce", "broadcast"),
    "operator": ("dist.all_reduce(tensor)", "dist.all_reduce(tensor, dist.ReduceOp.MAX)", "sum", "max"),
    "dtype": ("dist.all_reduce(tensor)", "dist.all_reduce(tensor.int())", "f32", "i32"),
    "count": ("dist.all_reduce(tensor)", "dist.all_reduce(tensor.repeat(2))", "f32[4]", "f32[8]"),
    "root": ("dist.broadcast(tensor, 0)", "dist.broadcast(tensor, 2)", "root 0", "root 2"),
    "shape": ("dist.all_reduce(tensor)", "dist.all_reduce(tensor.view(2, 2))", "f32[4]", "f32[2, 2]"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_both_sides(run, script, case: str):
    usual, guilty, usually, guiltily = CASES[case]
    text = PROGRAM.format(usual=usual, guilty=guilty)
    done = run("-n", "3", script(text))
    assert done.code == 0, done.err
    texts = [re.search("<<<(.*)>>>", done.log(rank), re.DOTALL)[1] for rank in range(3)]
    assert texts[0] == texts[1] == texts[2]
    for side, ranks, what in [("usual", "ranks 0-1", usually), ("guilty", "rank 2", guiltily)]:
        number = next(
            number for number, line in enumerate(text.splitlines(), 1) if line.endswith(f"# {side}")
        )
        said = [line for line in texts[0].splitlines() if f"program.py:{number}" in line]
        assert len(said) == 1, f"program.py:{number} in {texts[0]}"
        assert ranks in said[0] and what in said[0].lower(), texts[0]
    assert done.shown[-1] == ("0-1", "the others have [1.0, 1.0, 1.0, 1.0]")


UNCAUGHT = """
import signal
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
is_guilty = dist.get_rank() == 2
try:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if is_guilty else dist.ReduceOp.SUM)
finally:
    if is_guilty:
        signal.pause()
"""


def test_the_report_blames_the_rank_that_differs(run, script):
    """Not one of those that raise what all of them raise; the guilty one is even the last to leave."""
    done = run("-n", "4", script(UNCAUGHT))
    assert done.code == 1
    assert done.report.culprit == 2, done.report.text
    assert "CollectiveMismatchError" in done.report.text
    assert "SUM" in done.report.text.upper() and "MAX" in done.report.text.upper()


OVERLAPPING = """
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
groups = [dist.new_group([0, 1, 2]), dist.new_group([1, 2])]
tensors = [torch.full((1000,), 1.0), torch.full((1000,), 10.0)]
mine = [index for index, group in enumerate(groups) if rank in dist.get_process_group_ranks(group)]
for _ in range(20):
    order = mine if rank == 1 else mine[::-1]
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        work.wait()
    tensors = [tensors[0] / 3, tensors[1] / 2]
print([round(tensors[index].mean().item(), 3) for index in mine])
"""


def test_groups_in_opposite_orders(run, script):
    done = run("-n", "3", script(OVERLAPPING))
    assert done.code == 0, done.err
    assert [done.log(rank) for rank in range(3)] == ["[1.0]\n", "[1.0, 10.0]\n", "[1.0, 10.0]\n"]
