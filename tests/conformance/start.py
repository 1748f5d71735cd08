"""Starts the ranks: the start methods, and what becomes of a job that does not come to its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from .plan import FAILED, SKIPPED, Outcome, Plan, read_outcomes

TESTS = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# Variables that a shell or another job may have set, and that a job would obey.
FOREIGN = re.compile(r"TPURUN_.*|PET_.*|TORCHELASTIC_.*|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_.*|TORCH_.*")
# Longest time without any test coming to its end: more than the ranks wait for each other.
STUCK_S = 420.0
LOOK_S = 0.2
# After this number of jobs in a row that end in their first test, something else is wrong than the tests.
FRUITLESS = 3
TAIL = 2000
# Tests that ask for more ranks than a suite usually has get so many.
MANY_RANKS = 8
TOO_FEW = "Skipped due to small world size."

STARTS: dict[str, Callable[[Plan], list[str]]] = {
    "fork": lambda plan: [sys.executable, "-m", "conformance.forked", str(plan.path)],
    "own": lambda plan: [sys.executable, "-m", "conformance.themselves", str(plan.path)],
    "spawn": lambda plan: [sys.executable, "-m", "conformance.lockstep", str(plan.path), "--spawn"],
    "torchrun": lambda plan: [
        *(str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={plan.ranks}"),
        *("-m", "conformance.lockstep", str(plan.path)),
    ],
    "tpurun": lambda plan: [
        *(str(BIN / "tpurun"), "-n", str(plan.ranks), "--log-dir", str(plan.folder / "run")),
        *("-m", "conformance.lockstep", str(plan.path)),
    ],
}

Progress = Callable[[Plan, Outcome], None]


def run(plan: Plan, start: str, progress: Progress) -> dict[int, list[Outcome]]:
    """All tests of the plan, by the number of ranks they ran on: those that want more ranks run on more."""
    usual = []
    for outcome in outcomes(plan, start):
        usual.append(outcome)
        progress(plan, outcome)
    few = [one.test for one in usual if (one.kind, one.text) == (SKIPPED, TOO_FEW)]
    if not few or plan.ranks >= MANY_RANKS:
        return {plan.ranks: usual}
    larger = replace(plan, folder=plan.folder / "many", ranks=MANY_RANKS, tests=few)
    return {plan.ranks: [one for one in usual if one.test not in few]} | run(larger, start, progress)


def outcomes(plan: Plan, start: str, fruitless: int = 0) -> Iterator[Outcome]:
    """Runs one job, and others for the tests that it has left: where its ranks were of no use any more after
    a test, and where a test ended the job, which has failed then. `fruitless` are the jobs before this one
    that ended in their first test."""
    plan.write()
    command = STARTS[start](plan)
    with (plan.folder / "output").open("w") as output:
        job = subprocess.Popen(
            command,
            cwd=TESTS,
            env=environment(plan),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            seen = yield from watch(plan, job)
        finally:
            end(job)
    if seen == len(plan.tests):
        return
    if seen and job.returncode == 0:
        yield from outcomes(after(plan, seen), start)
        return
    text = f"{start} ended with {job.returncode}: {tail(plan)}"
    fruitless = 0 if seen else fruitless + 1
    if fruitless == FRUITLESS:
        raise RuntimeError(f"expected {start} to run tests, {fruitless} jobs in a row ran none; {text}")
    yield Outcome(plan.tests[seen], FAILED, text)
    if plan.tests[seen + 1 :]:
        yield from outcomes(after(plan, seen + 1), start, fruitless)


def after(plan: Plan, count: int) -> Plan:
    """Returns the plan that is left after this number of tests."""
    left = plan.tests[count:]
    name = plan.folder.name.partition("-")[0]
    return replace(plan, folder=plan.folder.with_name(f"{name}-{len(left)}"), tests=left)


def tail(plan: Plan) -> str:
    return (plan.folder / "output").read_text(errors="replace")[-TAIL:]


def watch(plan: Plan, job: subprocess.Popen[bytes]) -> Iterator[Outcome]:
    """Yields outcomes as they are written until the job has ended, or nothing comes any more; returns how
    many there were."""
    seen, deadline = 0, time.monotonic() + STUCK_S
    while True:
        has_ended = job.poll() is not None
        for outcome in read_outcomes(plan.outcomes)[seen:]:
            yield outcome
            seen, deadline = seen + 1, time.monotonic() + STUCK_S
        if has_ended or time.monotonic() > deadline:
            return seen
        try:
            job.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            continue


def end(job: subprocess.Popen[bytes]) -> None:
    """Also what a job that was stuck has started."""
    try:
        os.killpg(job.pid, signal.SIGTERM if job.poll() is None else signal.SIGKILL)
        job.wait(10)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    if job.poll() is None:
        job.kill()
        job.wait()


def environment(plan: Plan) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG"):
        own[name] = plan.environment()[name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # For those that nobody gives one; a launcher replaces it.
    return own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
