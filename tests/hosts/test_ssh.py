"""`--hosts n0,n1`: by a real ssh where that can be set up, and on this host without one."""

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.jobs import TPURUN, Finished, Job
from tools.namespaces import NotAllowed, unplug
from tools.ssh import SshHosts, ssh_hosts

PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
tensor = torch.ones(1)
dist.all_reduce(tensor)
names = ("GROUP_RANK", "LOCAL_WORLD_SIZE", "TPURUN_HOST", "LEARNING_RATE")
print(int(tensor.item()), *(os.environ.get(name) for name in names), os.path.basename(os.getcwd()))
hidden = {"TPURUN_TOKEN", "TPURUN_PLACE"} & set(os.environ)
assert not hidden, hidden
"""
WAITING = """
import os, time, torch.distributed as dist

dist.init_process_group("tpu_dist")
dist.barrier()
if dist.get_rank() == 0:
    print("all are here", flush=True)
time.sleep(600)
"""
# A host may need a moment to see that its ssh is gone.
LINGER_S = 20


@pytest.fixture(scope="module")
def reached(tmp_path_factory) -> Iterator[SshHosts]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(ssh_hosts(3, tmp_path_factory.mktemp("ssh")))
        except NotAllowed as why:
            pytest.skip(f"hosts by ssh: {why}")


@pytest.fixture
def begin(start, reached) -> Callable[..., Job]:
    """Starts a job on these hosts."""

    def begin(hosts: str, *words: str | Path, **options) -> Job:
        own = ["--hosts", hosts, "--ssh", " ".join(reached.ssh)]
        return start(*own, *words, command=[*reached.here, TPURUN], **options)

    return begin


def finish(job: Job) -> Finished:
    return job.wait(linger_s=LINGER_S, folder=Path("tpurun-runs"))


def lines(done: Finished) -> list[tuple[int, str]]:
    """Returns the lines that each rank wrote. Ranks that write alike are shown together, if they do at about
    the same time."""
    return sorted((rank, line) for rank, lines in done.shown_by_rank().items() for line in lines)


def test_one_command_runs_all_hosts(begin, script):
    done = finish(begin("n0,n1,root@n2", "-n", "5", script(PROGRAM), env={"LEARNING_RATE": "0.1"}))
    assert done.code == 0, done.err
    sizes = {0: 2, 1: 2, 2: 1}
    expected = [
        (rank, f"5 {node} {sizes[node]} n{node} 0.1 cwd") for rank, node in enumerate([0, 0, 1, 1, 2])
    ]
    assert lines(done) == expected, done
    for node in range(3):
        assert f"node {node} of 3 (host n{node})" in done.err, done.err


def test_a_failure_is_told_once(begin, script):
    program = "import os, sys, time; sys.exit(9) if os.environ['RANK'] == '2' else time.sleep(600)"
    done = finish(begin("n0:2,n1:1", script(program)))
    assert done.code == 9, done.err
    assert len(re.findall(r"culprit   rank 2 \(host n1, pid \d+\)  exited with code 9", done.err)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_hosts(begin, script, number: signal.Signals):
    job = begin("n0,n1", script(WAITING))
    job.read_until("all are here")
    job.signal(number)
    done = finish(job)
    assert done.code == 128 + number, done.err


def test_nothing_outlives_who_started_it(begin, script):
    job = begin("n0,n1", script(WAITING))
    job.read_until("all are here")
    job.signal(signal.SIGKILL)
    assert finish(job).code == -signal.SIGKILL


def test_a_host_without_tpurun_stops_the_others(begin, script, start, reached):
    """It is there, but this command is not."""
    words = " ".join(reached.ssh)
    shell = f'case "$1" in n1) exec {words} n1 exec /nowhere/tpurun;; *) exec {words} "$@";; esac'
    broken = script(f"#!/bin/sh\n{shell}\n")
    broken.chmod(0o755)
    own = ["--hosts", "n0,n1", "--rdzv", "10.77.0.1:29400", "--ssh", broken]
    done = finish(start(*own, "true", command=[*reached.here, TPURUN]))
    assert done.code != 0
    assert f"host n1: expected tpurun at {TPURUN}, as here, given none that can be run" in done.err, done.err


def test_a_host_that_ssh_does_not_know_stops_the_others(begin):
    done = finish(begin("n0,n7.invalid", "true"))
    assert done.code != 0
    assert "host n7.invalid: ssh ended with code 255: no connection, or it was lost" in done.err, done.err


ROLES = """
import os
import torch
import torch.distributed as dist
import tpurun

dist.init_process_group("tpu_dist")
own, ranks = torch.ones(1), torch.ones(1)
dist.all_reduce(ranks)
dist.all_reduce(own, group=tpurun.program().group)
sizes = {name: len(program.ranks) for name, program in tpurun.programs().items()}
print(tpurun.program().name, int(own), int(ranks), sizes, os.environ["LOCAL_RANK"], os.environ["ROLE_RANK"])
dist.destroy_process_group()
"""


def test_programs_go_on_over_the_hosts(start, script):
    learner, actor = script(ROLES, "learner.py"), script(ROLES, "actor.py")
    done = finish(start("--hosts", "localhost:1,localhost:3", "-n", "2", learner, ":", "-n", "2", actor))
    assert done.code == 0, done.err
    sizes = {"learner": 2, "actor": 2}
    assert sorted(re.findall(r"^[^|]*\| (.*)$", done.out, re.MULTILINE)) == [
        f"actor 2 4 {sizes} 1 0",
        f"actor 2 4 {sizes} 2 1",
        f"learner 2 4 {sizes} 0 0",
        f"learner 2 4 {sizes} 0 1",
    ]


def test_what_is_on_no_command_line(begin, script):
    """The token, the environment and the program go over ssh, not beside it."""
    job = begin("n0,n1", script(WAITING), "--secret", env={"API_KEY": "sesame"})
    job.read_until("all are here")
    words = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    sent = [line for line in words.splitlines() if line.startswith("ssh ")]
    job.signal(signal.SIGTERM)
    finish(job)
    assert len(sent) == 2, words
    assert all(line.endswith(f"exec '{TPURUN}' --follow") for line in sent), sent
    assert "sesame" not in words


class TestHere:
    """Hosts that are this one need no ssh."""

    def test_nodes_of_this_host(self, start, script):
        done = finish(start("--hosts", "localhost,localhost", "-n", "3", script("print('well')")))
        assert (done.code, lines(done)) == (0, [(0, "well"), (1, "well"), (2, "well")]), done

    def test_nothing_outlives_who_started_it(self, start, script):
        job = start("--hosts", "localhost,localhost", script(WAITING))
        job.read_until("all are here")
        job.signal(signal.SIGKILL)
        assert finish(job).code == -signal.SIGKILL

    def test_an_ssh_that_is_not_there(self, run, script):
        done = run("--hosts", "n0", "--ssh", "/nowhere/ssh", "true")
        assert done.code == 2
        assert "cannot run /nowhere/ssh: No such file" in done.err


def test_a_host_that_is_unplugged_ends_as_the_others_say(begin, script, reached):
    """Its ssh would wait for a quarter of an hour. The last one: the host stays as it is."""
    job = begin("n0,n2", script(WAITING))
    job.read_until("all are here")
    unplug(reached.namespaces[2])
    done = finish(job)
    assert done.code == 1
    assert "host n2 (node 1) is gone" in done.err, done.err


AGAIN = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
ranks = torch.ones(1)
dist.all_reduce(ranks)
if dist.get_rank() == 2 and os.environ["TPURUN_RESTART"] == "0":
    raise ValueError("once")
dist.barrier()
print("well with", int(ranks))
"""


def test_all_hosts_start_again_and_say_so_once(start, script):
    done = finish(start("--hosts", "localhost:1,localhost:2", "--max-restarts", "1", script(AGAIN)))
    assert done.code == 0, done.err
    said = re.findall(r"^tpurun: restart 1 of 1: (.*)$", done.err, re.MULTILINE)
    assert len(said) == 1 and "raised ValueError: once" in said[0], done.err
    assert sorted(text for _, text in lines(done)) == ["well with 3"] * 3, done.out
