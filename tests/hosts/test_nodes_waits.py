"""Ranks of several nodes that wait for each other, and what their agents tell of it."""

import re
from collections.abc import Callable

import pytest

from faults.test_deadlock import CIRCLES, PROGRAM
from tools.jobs import Finished, Job
from tools.nodes import Node, commands

from .test_nodes import shown

PRETENDED = [Node([], f"n{node}", "127.0.0.1") for node in range(3)]


@pytest.fixture
def run(start, script) -> Callable[..., list[Finished]]:
    """Runs a program with so many ranks on each of the first nodes."""

    def run(nodes: int, each: int, program: str, *options: str) -> list[Finished]:
        started = commands(PRETENDED[:nodes], each, *options, script(program))
        jobs: list[Job] = [start(command=command, env=env) for command, env in started]
        return [job.wait() for job in jobs]

    return run


def lines(done: list[Finished]) -> str:
    """Returns what each rank wrote, one rank after the other."""
    return "\n".join("\n".join(text) for _, text in sorted(shown(done).items()))


@pytest.mark.slice(2)
@pytest.mark.parametrize("case", ["two groups", "receives", "sends", "message and collective", "left alone"])
def test_a_circle_over_nodes_is_proven(run, case: str):
    done = run(3, 1, PROGRAM.format(wait=CIRCLES[case]), "--timeout", "120s")
    assert [one.code for one in done] == [0, 0, 0], done
    texts = set(re.findall(r"<<<(.*?)>>>", lines(done), re.DOTALL))
    assert len(texts) == 1, texts
    [text] = texts
    assert text.startswith("deadlock: ranks wait for each other in a circle"), text
    assert "host n0" in text and "host n1" in text and "program.py:" in text, text
    assert lines(done).count("<<<") == 3 and "the others have" in lines(done)
    if case == "two groups":
        assert "blames (2,)" in lines(done)


def test_a_circle_through_groups_of_one_node_each_is_proven(run):
    """Neither node has all of it."""
    program = """
import torch, torch.distributed as dist
from tpurun.errors import DeadlockError

dist.init_process_group("tpu_dist")
rank, tensor = dist.get_rank(), torch.zeros(8)
first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
dist.barrier()
try:
    if rank in (0, 2):
        dist.all_reduce(tensor, group=first if rank == 0 else second)
    else:
        dist.recv(tensor, (rank + 1) % 4)
except DeadlockError as error:
    print(f"<<<{error}>>>")
"""
    done = run(2, 2, program, "--timeout", "120s")
    texts = re.findall(r"<<<(.*?)>>>", lines(done), re.DOTALL)
    assert len(texts) == 4 and len(set(texts)) == 1, lines(done)
    assert all(f"rank {rank} (host n{rank // 2}" in texts[0] for rank in range(4)), texts[0]


def test_a_rank_that_has_finished_is_waited_for_in_vain(run):
    # Messages that are still on their way when a process ends so abruptly are lost, so both are received
    # first.
    wait = """
    if rank == 2: dist.recv(tensor, 0); dist.recv(tensor, 1); os._exit(0)
    dist.send(tensor, 2); dist.all_reduce(tensor)"""
    done = run(3, 1, PROGRAM.format(wait=wait), "--timeout", "120s")
    told = re.findall(r"rank 2 \(host n2, pid \d+\) exited with code 0 while others wait for it", lines(done))
    assert len(told) == 2, done


def test_a_stopped_rank_is_lost_to_those_of_other_nodes(run):
    program = """
import os, signal
import torch, torch.distributed as dist

dist.init_process_group("tpu_dist")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(8))
"""
    for one in run(2, 1, program):
        report = (one.run_dir / "report.txt").read_text()
        what = r"culprit   rank 1 \(host n1, pid \d+\)  has been stopped \(SIGSTOP\) for \d+\.\d s"
        assert re.search(what, report), report


def test_who_keeps_ranks_of_other_nodes_waiting_is_named(run):
    """By its own node on the screen, and in the timeout of those who waited."""
    program = """
import time
from datetime import timedelta
import torch, torch.distributed as dist

dist.init_process_group("tpu_dist", timeout=timedelta(seconds=4))
if dist.get_rank() == 3:
    time.sleep(600)
dist.all_reduce(torch.ones(8))
"""
    first, second = run(2, 2, program)
    named = r"suspect: rank 3 \(host n1, pid \d+\) keeps 3 ranks waiting in all_reduce#0 since .* sleeping at"
    assert re.search(named, second.err), second.err
    assert "suspect" not in first.err.partition("FAILED")[0], "it has nobody to name"
    for rank in (0, 1):
        assert re.search(r"rank 3 \(host n1, pid \d+\) is sleeping at program\.py", first.log(rank)), (
            first.log(rank)
        )


@pytest.mark.slice(2)
@pytest.mark.parametrize(
    ("link", "program"),
    [
        # On its way for seconds, in both directions.
        ("rate=8Mbit", "sent = dist.isend(large, 1 - rank); dist.recv(other, 1 - rank); sent.wait()"),
        # Sent, as far as the sender can tell, and not there yet.
        (
            "delay=800ms",
            "for turn in (0, 1): (dist.send if turn == rank else dist.recv)(small, 1 - rank)",
        ),
        ("delay=800ms", "dist.all_reduce(small)"),
    ],
    ids=["slow", "late", "collective"],
)
def test_what_is_on_its_way_is_no_proof(run, link: str, program: str):
    program = f"""
import torch, torch.distributed as dist

dist.init_process_group("tpu_dist")
rank, small = dist.get_rank(), torch.ones(8)
large, other = torch.full((500_000,), float(rank)), torch.zeros(500_000)
{program}
"""
    done = run(2, 1, program, "--link", link)
    assert [one.code for one in done] == [0, 0], done
