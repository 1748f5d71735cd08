"""Jobs of several nodes that start again after a failure: on all nodes, or on none."""

import json
import re
import signal
from collections.abc import Callable

import pytest

from faults.test_restarts import STUBBORN, restarts_of
from tools.jobs import Job
from tools.nodes import Node, commands

from .test_nodes import shown

NODES = 3
PRETENDED = [Node([], f"n{node}", "127.0.0.1") for node in range(NODES)]


@pytest.fixture
def begin(start, script) -> Callable[..., list[Job]]:
    """Starts a program with two ranks on each node."""

    def begin(program: str, *options: str) -> list[Job]:
        started = commands(PRETENDED, 2, *options, script(program))
        return [start(command=command, env=env) for command, env in started]

    return begin


# In its first lives a rank of node 1 fails; what each life finds is printed by its ranks.
AGAIN = """
import os, subprocess
import torch
import torch.distributed as dist

life, lives = int(os.environ["TPURUN_RESTART"]), {lives}
dist.init_process_group("tpu_dist")
rank, world = dist.get_rank(), dist.get_world_size()
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
assert not store.check([f"left by {{rank}}"]), "the store is not fresh"
store.set(f"left by {{rank}}", "x")
ranks = torch.ones(1 << 17)
dist.all_reduce(ranks)
restart = [os.environ[f"TORCHELASTIC_{{name}}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]
print(f"life {{life}} of {{int(ranks[-1])}}: restart {{'/'.join(restart)}}", flush=True)
orphan = f"../orphan-{{rank}}"
if os.path.exists(orphan):
    assert not os.path.exists(f"/proc/{{open(orphan).read().strip()}}"), "a process has outlived its world"
if life + 1 < lives:
    # One that runs from everybody: its parent is gone, its session and group are its own.
    with open(orphan, "w") as file:
        command = ["setsid", "sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"]
        subprocess.run(command, stdout=file, check=True)
    dist.barrier()
    {how}
dist.barrier()
"""
RAISED = 'if rank == 2: raise ValueError(f"the end of life {life}")'
LEFT = "if rank == 2: os._exit(0)"


@pytest.mark.slice(3)
@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        (RAISED, [], r"raised ValueError: the end of life 0"),
        (RAISED, ["--spawn"], r"raised ValueError: the end of life 0"),
        (LEFT, [], r"exited with code 0 while others were waiting for it"),
    ],
    ids=["raised", "spawned", "left"],
)
def test_all_nodes_start_again(begin, how: str, options: list[str], said: str):
    jobs = begin(AGAIN.format(lives=2, how=how), "--max-restarts", "3", *options)
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [0] * NODES, done
    lives = [f"life {life} of {2 * NODES}: restart {life}/3" for life in (0, 1)]
    assert shown(done) == dict.fromkeys(range(2 * NODES), lives)
    for node, one in enumerate(done):
        line = rf"^tpurun: restart 1 of 3: rank 2 \(host n1.*\) {said}"
        assert re.search(line, one.err, re.MULTILINE), one.err
        assert re.search(rf"exit 0  {2 * NODES} of {2 * NODES} ranks .*\n  restarts  1 of 3\n$", one.err)
        (restart,) = restarts_of(one)
        assert (restart["restart"], restart["culprit"]) == (1, 2)
        assert re.search(rf"rank 2 \(host n1.*\)  {said}", (one.run_dir / "report-0.txt").read_text())
        first, second = re.split(r"\n--- tpurun: restart 1 of 3: .* ---\n", one.log(2 * node))
        assert "life 0" in first and "life 1" in second


def test_the_last_restart_ends_with_one_report(begin):
    done = [job.wait() for job in begin(AGAIN.format(lives=9, how=RAISED), "--max-restarts", "2")]
    assert [one.code for one in done] == [1] * NODES, done
    for one in done:
        assert "raised ValueError: the end of life 2" in one.err.rsplit("culprit", 1)[1], one.err
        assert "  restarts  2 of 2\n" in (one.run_dir / "report.txt").read_text()
        assert [restart["restart"] for restart in restarts_of(one)] == [1, 2]


@pytest.fixture
def restarting(begin) -> Callable[..., list[Job]]:
    """A job that waits for a rank of its first life to go."""

    def begin_restarting(*options: str) -> list[Job]:
        jobs = begin(STUBBORN, "--max-restarts", "1", *options)
        jobs[1].read_until("not yet")
        return jobs

    return begin_restarting


def test_nodes_wait_for_who_will_not_go(restarting):
    done = [job.wait() for job in restarting()]
    assert [one.code for one in done] == [0] * NODES, done
    assert shown(done)[3] == ["not yet", "well"] and shown(done)[0] == ["well"]


@pytest.mark.slice(3)
@pytest.mark.parametrize("node", range(NODES))
def test_ctrl_c_on_any_node_ends_the_job_in_the_middle_of_a_restart(restarting, node: int):
    jobs = restarting("--shutdown-timeout", "1h")
    jobs[node].signal(signal.SIGINT)
    jobs[1].read_until("not yet")
    jobs[1].signal(signal.SIGINT)
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [128 + signal.SIGINT] * NODES, done
    assert not any(restarts_of(one) or "well" in one.out for one in done)
    assert "interrupted: no restart after this: rank 5 (host n2" in done[node].err, done[node].err


@pytest.mark.slice(3)
@pytest.mark.parametrize("node", range(NODES))
def test_a_node_that_goes_in_the_middle_of_a_restart_ends_the_job(restarting, node: int):
    """All say so, and why it had to begin again."""
    # Long enough to see that a node is silent.
    jobs = restarting("--shutdown-timeout", "10s")
    started = next(event for event in events(jobs[node]) if event["event"] == "started")
    jobs[node].signal(signal.SIGKILL, started["agent"])
    others = [job for job in jobs if job is not jobs[node]]
    done = [job.wait() for job in others]
    jobs[node].wait(linger_s=5)
    assert [one.code for one in done] == [1, 1], done
    for one in done:
        assert re.search(rf"no restart: host n{node} \(node {node}\) is gone", one.err), one.err
        assert not restarts_of(one) and "well" not in one.out
        assert "raised ValueError: once" in (one.run_dir / "report.txt").read_text()


def test_a_node_that_is_gone_is_not_started_again_without(begin):
    program = STUBBORN.replace('raise ValueError("once")', 'print("all are here", flush=True)')
    jobs = begin(program, "--max-restarts", "3")
    jobs[2].read_until("all are here")
    started = next(event for event in events(jobs[1]) if event["event"] == "started")
    jobs[1].signal(signal.SIGKILL, started["agent"])
    done = [job.wait() for job in (jobs[0], jobs[2])]
    jobs[1].wait(linger_s=5)
    assert [one.code for one in done] == [1, 1], done
    for one in done:
        assert "host n1 (node 1) is gone" in (one.run_dir / "report.txt").read_text()
        assert not restarts_of(one)


def events(job: Job) -> list[dict]:
    return [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]


def test_nodes_must_agree_on_restarts(start, script):
    started = commands(PRETENDED[:2], 1, script("print('well')"))
    jobs = [
        start(command=[*command[:1], *restarts, *command[1:]], env=env)
        for (command, env), restarts in zip(started, ([], ["--max-restarts", "2"]), strict=True)
    ]
    refused = jobs[1].wait()
    assert refused.code == 2 and "node 0 refuses this node: --max-restarts 2, expected 0" in refused.err
    jobs[0].signal(signal.SIGINT)
    assert jobs[0].wait().code == 128 + signal.SIGINT


# Imported by a fork server: until its agent has been told that the first world is over.
LATE = """
import glob, time

while not any('"stop"' in open(path).read() for path in glob.glob("tpurun-runs/*/events.jsonl")):
    time.sleep(0.01)
"""


def test_a_node_whose_ranks_were_not_born_begins_with_the_others(start, script, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    program = """
import os

life, rank = os.environ["TPURUN_RESTART"], os.environ["RANK"]
if (life, rank) == ("0", "0"):
    raise ValueError("at once")
print("life", life, flush=True)
"""
    started = commands(PRETENDED[:2], 1, "--max-restarts", "1", script(program))
    jobs = [
        start(command=[*command[:1], *late, *command[1:]], env={**env, "PYTHONPATH": str(tmp_path)})
        for (command, env), late in zip(started, ([], ["--preload", "late"]), strict=True)
    ]
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [0, 0], done
    assert shown(done) == {0: ["life 1"], 1: ["life 1"]}
