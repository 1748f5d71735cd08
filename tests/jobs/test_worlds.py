"""Worlds that are not all ranks of a job: some of them make one, numbered anew."""

import re

import pytest
from torch.distributed import TCPStore

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
    # On a busy machine, a rank may need longer than the usual second to write what it was told.
    done = run("-n", "4", "--shutdown-timeout", "30", script(program))
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


# Each job is told where its ranks are in a world of all jobs, and of a store that is none of theirs.
OF_JOBS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist

first, taking_part, size, port = (int(word) for word in sys.argv[1:])
{before}
if int(os.environ["RANK"]) >= taking_part:
    sys.exit()
rank = first + int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("tpu_dist", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
tensor = torch.tensor([rank + 1.0])
dist.all_reduce(tensor)
half = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(tensor, group=half)
print("the sum is", int(tensor), flush=True)
dist.destroy_process_group()
"""
# A world of the job alone, before.
ALONE = """dist.init_process_group("tpu_dist")
dist.barrier()
dist.destroy_process_group()"""


@pytest.mark.parametrize(
    ("ranks", "taking_part", "before"), [((1, 1), 1, ALONE), ((2, 2), 1, ""), ((2, 1), 2, ALONE)]
)
def test_jobs_that_make_one_world(start, run, script, ranks, taking_part, before):
    program = script(OF_JOBS.format(before=before))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    taken = [min(count, taking_part) for count in ranks]
    size = sum(taken)
    job = start("-n", str(ranks[0]), program, "0", str(taken[0]), str(size), str(store.port))
    done = run("-n", str(ranks[1]), program, str(taken[0]), str(taken[1]), str(size), str(store.port))
    first = job.wait()
    assert (first.code, done.code) == (0, 0), first.err + done.err
    total = size * (size + 1) // 2
    assert f"the sum is {2 * total}" in first.log(0) and f"the sum is {2 * total}" in done.log(taken[1] - 1)
