"""Ranks that are processes of their own, beside a process that stands for their agent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Starts a rank as the launcher does.
AGENT = """
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
rank = [sys.executable, "-c", "from tpurun.run_rank import main; main()", sys.argv[1]]
env = os.environ | {"TPURUN_CONTROL_FD": str(theirs.fileno())}
# Where the rank is late, the agent is gone when it begins.
between = ["sh", "-c", 'read gone; exec "$@"', "sh"] if sys.argv[2] == "late" else []
subprocess.Popen([*between, *rank], env=env, pass_fds=[theirs.fileno()], stdin=sys.stdin)
theirs.close()
print("started", flush=True)
time.sleep(600)
"""
PROGRAM = "import time; print('up', flush=True); time.sleep(600)"


class Job:
    """A rank and its agent; the pipe of their output ends with both."""

    def __init__(self, folder: Path, how: str) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        env = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN")}
        command = [sys.executable, "-c", AGENT, str(program), how]
        pipe = subprocess.PIPE
        self.agent = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, process_group=0)

    def kill_agent(self) -> None:
        self.agent.send_signal(signal.SIGKILL)
        self.agent.wait()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        # A process that is left is ended here.
        os.killpg(self.agent.pid, signal.SIGKILL)
        self.agent.communicate()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path):
    with Job(tmp_path, request.param) as started:
        yield started


@pytest.mark.parametrize("job", ["alone"], indirect=True)
def test_a_rank_dies_with_its_agent(job: Job) -> None:
    assert {job.agent.stdout.readline(), job.agent.stdout.readline()} == {"started\n", "up\n"}
    job.kill_agent()
    assert job.agent.stdout.read() == "", "nobody is left who could write"


@pytest.mark.parametrize("job", ["late"], indirect=True)
def test_a_rank_without_an_agent_does_not_begin(job: Job) -> None:
    assert job.agent.stdout.readline() == "started\n"
    job.kill_agent()
    job.agent.stdin.write("gone\n")
    job.agent.stdin.flush()
    assert job.agent.stdout.read() == "", "its program does not run"
