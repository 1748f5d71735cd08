"""Ranks that wait for each other, or for one that has finished: proven, and told in one text."""

import re

import pytest

PROGRAM = """
import os, threading
import torch
import torch.distributed as dist
from tpurun.errors import DeadlockError

dist.init_process_group("tpu_dist")
rank, size = dist.get_rank(), dist.get_world_size()
one, two = (dist.new_group(list(range(size))) for _ in range(2))
apart = dist.new_group([0, 1])
tensor, large = torch.full((8,), float(rank)), torch.ones(4_000_000)
dist.barrier()
try:
    {wait}
except DeadlockError as error:
    print(f"<<<{{error}}>>> blames {{error.ranks}}")
    assert tensor.tolist() == [float(rank)] * 8, "written to"
if rank < 2:
    dist.all_reduce(tensor, group=apart)
    print("the others have", tensor.tolist()[0])
"""

CIRCLES = {
    "two groups": """
    for group in (two, one) if rank == 2 else (one, two):
        dist.all_reduce(tensor, group=group)""",
    "receives": "dist.recv(tensor, (rank + 1) % size)",
    "sends": "dist.send(large, (rank + 1) % size); dist.recv(large, (rank - 1) % size)",
    "other tags": """
    if rank == 0: dist.recv(tensor, 1, tag=5)
    if rank == 1: dist.send(large[:8], 0, tag=6); dist.recv(tensor, 0)
    if rank == 2: dist.recv(tensor, 0)""",
    "message and collective": "dist.recv(tensor, 1) if rank == 0 else dist.all_reduce(tensor)",
    "left alone": """
    for _ in range(2): dist.all_reduce(torch.ones(1), async_op=True).wait()
    if rank != 2: begun = dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier(group=one)
    if rank == 2: begun = dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier(group=one)
    for group in (two, one) if rank == 2 else (one, two):
        dist.all_reduce(tensor, group=group)""",
    "asynchronous": "(dist.irecv(tensor, 1) if rank == 0 else dist.all_reduce(tensor, async_op=True)).wait()",
}


@pytest.mark.slice(2)
@pytest.mark.parametrize("case", CIRCLES)
def test_a_circle_is_proven(run, script, case: str):
    done = run("-n", "3", "--timeout", "120s", script(PROGRAM.format(wait=CIRCLES[case])))
    assert done.code == 0, done.err
    texts = set(re.findall(r"<<<(.*?)>>>", joined(done), re.DOTALL))
    assert len(texts) == 1, texts
    [text] = texts
    assert text.startswith("deadlock: ranks wait for each other in a circle"), text
    assert re.search(r"program\.py:\d+", text), text
    assert "the others have" in done.out
    if case == "two groups":
        assert "blames (2,)" in done.out


def test_a_rank_that_has_finished_is_waited_for_in_vain(run, script):
    wait = "os._exit(0) if rank == 2 else dist.all_reduce(tensor)"
    done = run("-n", "3", "--timeout", "120s", script(PROGRAM.format(wait=wait)))
    assert "exited with code 0 while others wait for it" in done.out, done.out
    assert "blames (2,)" in done.out


def test_a_thread_that_may_still_post_is_no_proof(run, script):
    """One thread of a rank waits for what another one is going to do a second later."""
    wait = """
    later = threading.Timer(1.0, lambda: dist.all_reduce(tensor, group=two))
    if rank == 2:
        later.start()
        dist.all_reduce(tensor.clone(), group=one)
        later.join()
    else:
        dist.all_reduce(tensor, group=two)
        dist.all_reduce(tensor, group=one)"""
    done = run("-n", "3", "--timeout", "120s", script(PROGRAM.format(wait=wait)))
    assert done.code == 0, done.err
    assert "<<<" not in done.out, done.out


def joined(done) -> str:
    """Returns what each rank wrote, one rank after the other."""
    return "\n".join("\n".join(lines) for _, lines in sorted(done.shown_by_rank().items()))


def test_the_timeout_of_the_command_line_ends_what_can_not_be_proven(run, script):
    wait = "time.sleep(20) if rank == 2 else dist.all_reduce(tensor)"
    program = PROGRAM.replace("import os, threading", "import os, threading, time")
    program = program.replace("except DeadlockError", "except CollectiveTimeoutError")
    program = program.replace("import DeadlockError", "import CollectiveTimeoutError")
    done = run("-n", "3", "--timeout", "3s", script(program.format(wait=wait)))
    assert "Timed out after 3s in operation" in done.out, done.out
    assert "blames (2,)" in done.out


AGAIN = """
import os, time
import torch
import torch.distributed as dist

for world in range(2):
    if world == 1 and os.environ["RANK"] == "1":
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            pass
    dist.init_process_group("tpu_dist")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
print("fine")
"""


def test_who_comes_late_to_the_next_world_has_not_left_it(run, script):
    done = run("-n", "3", "--timeout", "120s", script(AGAIN))
    assert done.code == 0, done.err
    assert all("fine" in done.log(rank) for rank in range(3)), done.out
