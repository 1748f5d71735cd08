"""Ranks that do not make the same groups in the same order: said at once, in the program's words."""

import re

import pytest

PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
{body}
dist.destroy_process_group()
"""

OTHER_MEMBERS = """
group = dist.new_group([0, 1] if rank == 1 else [0, 2])
"""
OTHER_ORDER = """
pairs = [[0, 1], [1, 2]] if rank < 2 else [[1, 2], [0, 1]]
first, second = [dist.new_group(pair) for pair in pairs]
"""
ONE_MORE = """
if rank == 0:
    extra = dist.new_group([0, 2])
group = dist.new_group([0, 1, 2])
"""


@pytest.mark.parametrize(
    "body", [OTHER_MEMBERS, OTHER_ORDER, ONE_MORE], ids=["other members", "other order", "one more"]
)
def test_different_groups_are_a_mismatch(run, script, body):
    done = run("-n", "3", script(PROGRAM.format(body=body)))
    assert done.code == 1, done.err
    text = done.report.text
    made = r"rank (\d) made new_group\((\[.*?\])\) at program\.py:\d+"
    said = re.search(rf"CollectiveMismatchError: group 1: {made}, {made}; all ranks must make", text)
    assert said, text
    assert said[1] != said[3] and said[2] != said[4]


SAME_NAMES = """
for pair in [[0, 1], [0, 2], [1, 2]]:
    # A world of its own for each pair: the names of groups begin anew.
    group = dist.new_group(pair)
    if rank in pair:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("tpu_dist")
# Some have a group of that name, others another one, and nobody is in both.
mine = dist.new_group([rank], use_local_synchronization=True)
dist.barrier()
print("all is well", flush=True)
"""


@pytest.mark.parametrize("flags", [[], ["--hosts", "3"]], ids=["one host", "three"])
def test_names_of_another_world_are_no_mismatch(run, script, flags):
    done = run("-n", "3", *flags, script(PROGRAM.format(body=SAME_NAMES)))
    assert done.code == 0, done.err
    assert set(map(tuple, done.shown_by_rank().values())) == {("all is well",)}
