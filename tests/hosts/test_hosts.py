"""Ranks of several hosts, which are network namespaces or only pretended; each is started by itself."""

import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tools.jobs import Job
from tools.namespaces import NotAllowed, kinds_of_hosts, namespaces


@dataclass
class Host:
    """How its ranks are started, and where the store is when the first of them holds it."""

    command: list[str]
    env: dict[str, str]
    address: str


@pytest.fixture(params=kinds_of_hosts())
def hosts(request) -> Iterator[Callable[[int], list[Host]]]:
    """Makes so many."""
    with ExitStack() as stack:

        def make(count: int) -> list[Host]:
            if request.param == "pretended":
                return [Host([], {"TPURUN_HOST": f"n{host}"}, "127.0.0.1") for host in range(count)]
            try:
                names = stack.enter_context(namespaces(count))
            except NotAllowed as why:
                pytest.skip(f"network namespaces: {why}")
            command = ["ip", "netns", "exec"]
            return [
                Host([*command, name], {"TPURUN_HOST": f"n{host}"}, f"10.77.0.{host + 1}")
                for host, name in enumerate(names)
            ]

        yield make


@pytest.fixture
def world(start, script) -> Callable[..., list[Job]]:
    """Starts a program as `each` ranks on each of these hosts."""

    def world(hosts: list[Host], each: int, program: str) -> list[Job]:
        path = script(program)
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        size = each * len(hosts)
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            # The store looks up the names of those who connect.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        jobs = []
        for rank in range(size):
            host = hosts[rank // each]
            env = common | host.env | {"RANK": str(rank), "LOCAL_RANK": str(rank % each)}
            jobs.append(start(path, command=[*host.command, sys.executable], env=env))
        return jobs

    return world


EVERYTHING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("tpu_dist")
rank, size = dist.get_rank(), dist.get_world_size()
for count in (1, 1000, 3_000_001):
    tensor = torch.arange(count, dtype=torch.float64) + rank
    expected = torch.arange(count, dtype=torch.float64) * size + size * (size - 1) / 2
    dist.all_reduce(tensor)
    assert torch.equal(tensor, expected), count
    works = [dist.all_reduce(torch.full((9,), float(n)), async_op=True) for n in range(40)]
    [work.wait() for work in works]
    parts = [torch.empty(count) for _ in range(size)]
    dist.all_gather(parts, torch.full((count,), float(rank)))
    assert all(torch.equal(part, torch.full((count,), float(n))) for n, part in enumerate(parts))
    given = [torch.full((count,), float(10 * rank + n)) for n in range(size)]
    dist.all_to_all(parts, given)
    assert all(torch.equal(part, torch.full((count,), float(10 * n + rank))) for n, part in enumerate(parts))
    received = torch.empty(count)
    sending = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    assert torch.equal(received, torch.full((count,), float((rank - 1) % size)))
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": n} for n in range(size)]

# Ranks 0 and 2 are on two hosts, ranks 0 and 1 on one.
for members in ([0, 2], [0, 1], list(range(size))[::-1]):
    group = dist.new_group(members)
    if rank in members:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((4, 300), float(rank + step))).square().mean().backward()
    optimizer.step()
weights = [torch.empty_like(model.module.weight) for _ in range(size)]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights)
print("all is well")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("count", [2, 3])
def test_everything_works_between_hosts(hosts, world, count: int):
    for job in world(hosts(count), 2, EVERYTHING):
        done = job.wait()
        assert (done.code, done.out) == (0, "all is well\n"), done.err


def test_a_process_that_ends_without_a_word_has_given_what_it_owed(hosts, world):
    program = """
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
tensor = torch.ones(8)
dist.all_reduce(tensor)
print(tensor[0].item())
"""
    for job in world(hosts(2), 2, program):
        done = job.wait()
        assert (done.code, done.out) == (0, "4.0\n"), done.err


FAILING = """
import os, signal, time
import torch
import torch.distributed as dist
from tpurun.errors import DistBackendError

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
dist.barrier()
began = time.monotonic()
tensor = torch.full((8,), float(rank))
try:
    {what}
    raise AssertionError("nothing failed")
except DistBackendError as error:
    print(f"{{time.monotonic() - began:.3f}} {{type(error).__name__}} {{error.ranks}} <<<{{error}}>>>")
    assert tensor.tolist() == [float(rank)] * 8, "written to"
"""


def failures(jobs: list[Job], but: int) -> tuple[str, float]:
    """Returns the text that all ranks but one said alike, and the longest time that one of them took."""
    told = []
    for rank, job in enumerate(jobs):
        done = job.wait()
        if rank != but:
            assert done.code == 0, done.err
            match = re.fullmatch(r"(\S+) (.*)", done.out.strip(), re.DOTALL)
            assert match, done.out
            told.append((match[2], float(match[1]) / done.patience))
    assert len({text for text, _ in told}) == 1, told
    return told[0][0], max(seconds for _, seconds in told)


def test_a_rank_that_dies_is_named_alike_on_all_hosts(hosts, world):
    what = "os.kill(os.getpid(), signal.SIGKILL) if rank == 3 else dist.all_reduce(tensor)"
    text, seconds = failures(world(hosts(2), 2, FAILING.format(what=what)), but=3)
    assert text.startswith("RankLostError (3,) <<<rank 3 (host n1, pid "), text
    assert seconds < 2, text


def test_a_mismatch_is_worded_alike_on_all_hosts(hosts, world):
    what = "dist.all_reduce(tensor, op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)"
    text, seconds = failures(world(hosts(2), 2, FAILING.format(what=what)), but=-1)
    assert text.startswith("CollectiveMismatchError (2,) <<<collective mismatch in"), text
    assert "majority: ranks 0-1 (host n0, pid " in text and "rank 3 (host n1, pid " in text, text
    assert "minority: rank 2 (host n1, pid " in text, text
    assert seconds < 2, text


def test_who_does_not_come_is_named_alike_on_all_hosts(hosts, world):
    limited = '("tpu_dist", timeout=__import__("datetime").timedelta(seconds=3))'
    program = FAILING.replace('("tpu_dist")', limited)
    what = "dist.all_reduce(tensor) if rank != 1 else [time.sleep(6), dist.all_reduce(tensor)]"
    text, seconds = failures(world(hosts(2), 2, program.format(what=what)), but=1)
    assert text.startswith("CollectiveTimeoutError (1,) <<<Timed out after 3s in operation"), text
    assert "3 of 4 ranks came, missing rank 1 (host n0, pid " in text, text
    assert seconds < 5, text
