"""After a failure the others go on, all ranks start again, or fewer do. No world meets the one before it."""

import re
import signal
from collections.abc import Callable

import pytest

from tools.jobs import Finished, Job

# In its first life a rank fails when all are there; what each life finds is printed by its ranks.
AGAIN = """
import os, subprocess, sys
import torch
import torch.distributed as dist

lives, culprit = int(sys.argv[1]), int(sys.argv[2])
life = int(os.environ["TPURUN_RESTART"])
dist.init_process_group("tpu_dist")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
is_agents = os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
note = f"left by {rank}"
assert not store.check([note]), "the store is not fresh"
store.set(note, "x")
dist.barrier()
restart = [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]
print(f"life {life} of {world}: restart {'/'.join(restart)}, parent {os.getppid()}", flush=True)
if life > 0:
    for pid in open("../orphans").read().split():
        assert not os.path.exists(f"/proc/{pid}"), f"process {pid} has outlived its world"
dist.barrier()
if life + 1 < lives:
    # One that runs from everybody: its parent is gone, its session and group are its own.
    with open("../orphans", "a") as file:
        command = ["setsid", "sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"]
        subprocess.run(command, stdout=file, check=True)
    dist.barrier()
    if rank == culprit:
        raise ValueError(f"the end of life {life}")
dist.all_reduce(torch.ones(8))
"""


def restarts_of(done: Finished) -> list[dict]:
    return [event for event in done.events if event["event"] == "restart"]


@pytest.mark.slice(2)
@pytest.mark.parametrize(
    ("ranks", "options"), [(2, []), (8, []), (2, ["--spawn"])], ids=["2", "8", "2 spawned"]
)
def test_all_start_again(run, script, ranks: int, options: list[str]):
    culprit = ranks - 1
    done = run(*options, "-n", str(ranks), "--max-restarts", "3", script(AGAIN), "2", str(culprit))
    assert done.code == 0, done.err
    parents = set(re.findall(r"parent (\d+)", done.out))
    assert len(parents) == 1, "both lives come from the same process"
    lives = [f"life {life} of {ranks}: restart {life}/3, parent {min(parents)}" for life in (0, 1)]
    assert done.shown_by_rank() == dict.fromkeys(range(ranks), lives)
    why = rf"rank {culprit} \(host \S+, pid \d+\) raised ValueError: the end of life 0"
    assert re.search(rf"^tpurun: restart 1 of 3: {why}$", done.err, re.MULTILINE), done.err
    assert re.search(rf"exit 0  {ranks} of {ranks} ranks  run \S+\n  restarts  1 of 3\n$", done.err), done.err
    (restart,) = restarts_of(done)
    assert (restart["restart"], restart["culprit"], restart["ranks"]) == (1, culprit, ranks)
    for rank in range(ranks):
        first, second = re.split(r"\n--- tpurun: restart 1 of 3: .* ---\n", done.log(rank))
        assert "life 0" in first and "life 1" in second
    first_report = (done.run_dir / "report-0.txt").read_text()
    assert "raised ValueError: the end of life 0" in first_report


def test_the_last_restart_ends_with_the_usual_report(run, script):
    done = run("-n", "2", "--max-restarts", "2", script(AGAIN), "9", "1")
    assert (done.code, done.report.culprit) == (1, 1), done.report.text
    assert done.report.what == "raised ValueError: the end of life 2"
    assert "  restarts  2 of 2\n" in done.report.text
    assert [restart["restart"] for restart in restarts_of(done)] == [1, 2]
    assert sum(event["event"] == "fork server started" for event in done.events) == 1


INIT_TIMES = """
import os, time
import torch.distributed as dist

dist.init_process_group("tpu_dist")
dist.barrier()
print("ready at", time.time(), flush=True)
dist.barrier()
if os.environ["TPURUN_RESTART"] == "0" and dist.get_rank() == 0:
    print("fails at", time.time(), flush=True)
    raise ValueError("once")
dist.barrier()
"""
RESTARTED_IN_S = 3.0


def test_64_ranks_are_back_in_3_seconds(run, script):
    """From the failure until the last rank of the next life has been in a barrier with all others."""
    done = run("-n", "64", "--max-restarts", "1", script(INIT_TIMES))
    assert done.code == 0, done.err
    failed_at = float(re.search(r"fails at ([0-9.]+)", done.log(0))[1])
    ready = [float(re.findall(r"ready at ([0-9.]+)", done.log(rank))[1]) for rank in range(64)]
    seconds = max(ready) - failed_at
    assert seconds < RESTARTED_IN_S * done.patience, f"{seconds:.2f} s, patience {done.patience:.1f}"


# In its first life the last rank fails and the one in the middle will not go, so that the job is in the
# middle of a restart for as long as it takes.
STUBBORN = """
import os, signal, subprocess
import torch.distributed as dist

def refuse(number, frame):
    print("not yet", flush=True)

is_first = os.environ["TPURUN_RESTART"] == "0"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if is_first and rank == world // 2:
    signal.signal(signal.SIGTERM, refuse)
dist.init_process_group("tpu_dist")
dist.barrier()
if is_first:
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    if rank == world - 1:
        raise ValueError("once")
    while True:
        signal.pause()
print("well", flush=True)
"""


@pytest.fixture
def restarting(start, script) -> Callable[..., Job]:
    """A job that waits for a rank of its first life to go."""

    def start_restarting(*options: str) -> Job:
        job = start(*options, "-n", "3", "--max-restarts", "1", script(STUBBORN))
        job.read_until("not yet")
        return job

    return start_restarting


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_who_will_not_go_is_killed(restarting, options: list[str]):
    done = restarting(*options).wait(limit_s=240)
    assert done.code == 0, done.err
    assert (done.ends()[1], done.shown_by_rank()[1][-1]) == ({**done.ends()[1], "code": 0}, "well")
    assert {event.get("signal") for event in done.events if event.get("rank") == 1} == {None, signal.SIGKILL}


def test_ctrl_c_ends_the_job_in_the_middle_of_a_restart(restarting):
    job = restarting("--shutdown-timeout", "1h")
    job.signal(signal.SIGINT)
    job.read_until("not yet")
    job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == 128 + signal.SIGINT
    assert re.search(
        r"^tpurun: interrupted: no restart after this: rank 2 .* raised ValueError: once$", done.err, re.M
    )
    assert not restarts_of(done) and "well" not in done.out


@pytest.mark.slice(2)
@pytest.mark.parametrize("options", [[], ["--spawn"]], ids=["forked", "spawned"])
@pytest.mark.parametrize("who", ["front", "agent"])
def test_nothing_survives_who_is_killed_in_the_middle_of_a_restart(restarting, who: str, options: list[str]):
    job = restarting("--shutdown-timeout", "1h", *options)
    if who == "agent":
        job.signal(signal.SIGKILL, event_of(job, "started")["agent"])
        assert job.wait().code == 128 + signal.SIGKILL
    else:
        job.signal(signal.SIGKILL)
        assert job.wait(linger_s=2).code == -signal.SIGKILL


def test_the_next_life_has_its_fork_server_whatever_becomes_of_the_first(restarting):
    job = restarting("--shutdown-timeout", "1h")
    job.signal(signal.SIGKILL, event_of(job, "fork server started")["pid"])
    done = job.wait()
    assert done.code == 0, done.err
    assert done.shown_by_rank()[1][-1] == "well"
    assert sum(event["event"] == "fork server started" for event in done.events) == 2


def test_a_lost_fork_server_is_a_failure_to_restart_after(start, script):
    program = STUBBORN.replace(
        'raise ValueError("once")', 'print("all are here", flush=True); signal.pause()'
    )
    job = start("-n", "3", "--max-restarts", "1", script(program))
    job.read_until("all are here")
    job.signal(signal.SIGKILL, event_of(job, "fork server started")["pid"])
    done = job.wait()
    assert done.code == 0, done.err
    assert re.search(r"^tpurun: restart 1 of 1: the fork server.* is gone$", done.err, re.MULTILINE), done.err


def event_of(job: Job, name: str) -> dict:
    return next(event for event in Finished(0, "", "", job.run_dir, 0, 1).events if event["event"] == name)


# The last rank is lost; the others need it, or they do not.
LOSS = """
import os, signal, sys, time
import torch
import torch.distributed as dist

how, needed = sys.argv[1:3]
dist.init_process_group("tpu_dist")
rank, world = dist.get_rank(), dist.get_world_size()
others = dist.new_group(list(range(world - 1)))
dist.barrier()
if rank == world - 1:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("the loss is nan")
if needed == "not needed":
    # As long as the loss is not known, nobody knows who goes on.
    dist.all_reduce(torch.ones(8), group=others)
    sys.exit()
try:
    dist.all_reduce(torch.ones(8))
except dist.DistBackendError:
    if needed == "needed":
        raise
    # What a rank raises in a handler is the error that it handles, unless it has gone on meanwhile.
    dist.barrier(others)
    if how == "twice" and rank == 0:
        raise KeyError("another one")
    print("goes on", flush=True)
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", r"was killed by SIGKILL \(signal 9\)"),
        ("raised", r"raised ValueError: the loss is nan \(.*\)"),
    ],
)
def test_the_others_go_on(run, script, ranks: int, how: str, said: str):
    done = run("-n", str(ranks), "--on-failure", "continue", script(LOSS), how, "handled")
    assert done.code == 0, done.err
    assert {rank for rank, lines in done.shown_by_rank().items() if "goes on" in lines} == {*range(ranks - 1)}
    lost = [line for line in done.err.splitlines() if line.startswith("tpurun: lost")]
    assert len(lost) == 1 and re.match(rf"tpurun: lost rank {ranks - 1}: {said}; ", lost[0]), done.err
    last = rf"exit 0  {ranks - 1} of {ranks} ranks  run \S+\n  lost      rank {ranks - 1}  {said}\n$"
    assert re.search(last, done.err), done.err
    assert done.err.endswith((done.run_dir / "report.txt").read_text())


def test_a_stopped_rank_is_ended_and_the_others_go_on(run, script):
    """When they wait for it; one that nobody waits for may yet be resumed."""
    done = run("-n", "3", "--on-failure", "continue", script(LOSS), "stopped", "handled")
    assert done.code == 0, done.err
    assert re.search(
        r"^tpurun: rank 2 \(.*\) has been stopped \(SIGSTOP\) for .* s: killing it$", done.err, re.M
    )
    assert done.shown == [("0-1", "goes on")]


def test_a_lost_rank_that_nobody_needs_is_missed_in_the_last_lines(run, script):
    done = run("-n", "4", "--on-failure", "continue", script(LOSS), "killed", "not needed")
    assert done.code == 0, done.err
    assert re.search(r"exit 0  3 of 4 ranks  run \S+\n  lost      rank 3  was killed by", done.err), done.err


def test_every_loss_is_told(run, script):
    """Rank 0 fails by itself, too, but only after it has gone on without the first one that was lost."""
    done = run("-n", "4", "--on-failure", "continue", script(LOSS), "twice", "handled")
    assert done.code == 0, done.err
    assert done.shown_by_rank().keys() == {1, 2}
    lost = re.findall(r"^tpurun: lost rank (\d): raised (\w+)", done.err, re.MULTILINE)
    assert sorted(lost) == [("0", "KeyError"), ("3", "ValueError")], done.err
    assert "exit 0  2 of 4 ranks" in done.err


def test_survivors_that_do_not_cope_fail_the_job_but_are_not_blamed(run, script):
    done = run("-n", "4", "--on-failure", "continue", script(LOSS), "killed", "needed")
    assert (done.code, done.report.culprit) == (128 + signal.SIGKILL, 3), done.report.text
    assert done.report.what == "was killed by SIGKILL (signal 9)"
    assert re.search(r"^  lost +ranks 0-2  did not handle the loss of another rank$", done.report.text, re.M)
    assert "lost rank 0" not in done.err and "lost ranks" not in done.err


# The culprits fail by themselves, the others because of them once all of them have, unless they handle that.
ELASTIC = """
import os, select, sys
import torch
import torch.distributed as dist

culprits = set(map(int, sys.argv[1].split(","))) if os.environ["TPURUN_RESTART"] == "0" else set()
dist.init_process_group("tpu_dist")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
pids = torch.empty(world, dtype=torch.int64)
dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
ends = [os.pidfd_open(pids[culprit].item()) for culprit in culprits]
dist.barrier()
if rank in culprits:
    os._exit(7)
try:
    total = torch.ones(1)
    dist.all_reduce(total)
except dist.DistBackendError:
    for end in ends:
        select.select([end], [], [])
    if sys.argv[2:] != ["handled"]:
        raise
    total = torch.zeros(1)
print("world of", int(total))
"""


@pytest.mark.parametrize(
    ("culprits", "then"), [("5", 7), ("0,3", 6), ("0,1,2,3,4", 8)], ids=["one", "two", "too many"]
)
def test_an_elastic_job_starts_again_with_those_that_had_not_failed(run, script, culprits: str, then: int):
    done = run("--elastic", "4:8", script(ELASTIC), culprits)
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {rank: [f"world of {then}"] for rank in range(then)}
    assert re.search(
        rf"^tpurun: restart 1 of 3 with {then} ranks: rank \d .* exited with code 7$", done.err, re.M
    )
    assert [restart["ranks"] for restart in restarts_of(done)] == [then]


def test_an_elastic_job_that_copes_is_not_restarted(run, script):
    done = run("-n", "8", "--elastic", "4:8", script(ELASTIC), "2", "handled")
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {rank: ["world of 0"] for rank in range(8) if rank != 2}
    assert not restarts_of(done) and "exit 0  7 of 8 ranks" in done.err


def test_an_elastic_job_without_restarts_fails_as_usual(run, script):
    done = run("--elastic", "2:2", "--max-restarts", "0", script(ELASTIC), "1")
    assert (done.code, done.report.culprit, done.report.what) == (7, 1, "exited with code 7")
