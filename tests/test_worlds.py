"""Worlds that are not all ranks of a job: some of them make one, numbered anew."""

import re

import pytest

PROGRAM = """
import os, time
from datetime import timedelta
import torch
import torch.distributed as dist

store, rank, ranks = next(iter(dist.rendezvous("env://")))
if rank % 2 == 0:
    own = dist.PrefixStore("own", store)
    limit = timedelta(seconds={limit_s})
    dist.init_process_group("tpu_dist", store=own, rank={rank}, world_size={size}, timeout=limit)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    print("the sum is", int(tensor), flush=True)
    {then}
    dist.destroy_process_group()
"""
# The others are gone long before.
GO_ON = "time.sleep(0.5); dist.all_reduce(tensor); dist.all_reduce(tensor, group=dist.new_group([0, 1]))"


@pytest.mark.parametrize("flags", [[], ["--hosts", "2"]], ids=["one host", "two"])
def test_half_of_the_job_is_a_world(run, script, flags):
    program = PROGRAM.format(limit_s=60, rank="rank // 2", size="ranks // 2", then=GO_ON)
    done = run("-n", "4", *flags, script(program))
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {0: ["the sum is 2"], 2: ["the sum is 2"]}


def test_who_fails_is_known_by_the_number_of_the_job(run, script):
    then = "dist.all_reduce(tensor) if rank == 0 else os._exit(3)"
    program = PROGRAM.format(limit_s=60, rank="rank // 2", size="ranks // 2", then=then)
    done = run("-n", "4", script(program))
    assert done.code == 3
    assert (done.report.culprit, done.report.what) == (2, "exited with code 3"), done.report.text
    assert re.search(r"RankLostError: rank 2 \(host .*, pid \d+\) exited with code 3", done.log(0)), done.log(
        0
    )


def test_who_does_not_come_is_named(run, script):
    program = PROGRAM.format(limit_s=1, rank="rank // 2", size="ranks // 2 + 1", then="")
    done = run("-n", "4", script(program))
    assert done.code != 0
    assert "Timed out after 1s creating" in done.log(0) and "2 of 3 ranks came, missing rank 2" in done.log(0)


def test_another_number_in_the_same_world_is_refused(run, script):
    program = """
import os, torch.distributed as dist
store, rank, ranks = next(iter(dist.rendezvous("env://")))
dist.init_process_group("tpu_dist", store=store, rank=1 - rank, world_size=2)
"""
    done = run("-n", "2", script(program))
    assert done.code == 1
    expected = "expected rank=0, the RANK of this process, or a world of fewer than all 2 ranks, given rank=1"
    assert expected in done.log(0), done.log(0)
