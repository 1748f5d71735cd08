"""Debuggers in ranks, answered from a terminal, from a pipe, or by nobody."""

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from tools.jobs import LIMIT_S, TPURUN

BREAKS = """
import sys
from datetime import timedelta
import torch.distributed as dist

dist.init_process_group("tpu_dist", timeout=timedelta(seconds=40))
rank, asked = dist.get_rank(), sys.argv[1]
secret = 40 + rank
if asked == "every":
    breakpoint()
elif asked.startswith("builtin"):
    rank == int(asked[-1]) and breakpoint()
else:
    dist.breakpoint(int(asked))
print("after", flush=True)
dist.barrier()
"""


@pytest.mark.parametrize("reader", [0, 1])
def test_answers_from_a_pipe_go_to_the_rank_that_reads(run, script, reader: int):
    """Also what quits, which must not keep the others waiting."""
    words = ["--stdin-rank", str(reader)] if reader else []
    answers = "up\np 'secret', secret\nc\n"
    done = run(*words, "-n", "2", script(BREAKS), str(reader), stdin=answers)
    assert done.code == 0, done.err
    assert f"('secret', {40 + reader})" in done.log(reader)
    assert all("after" in done.log(rank) for rank in range(2))
    done = run(*words, "-n", "2", script(BREAKS), str(reader), stdin="q\n")
    assert (done.code, done.report.culprit) == (1, reader) and "BdbQuit" in done.report.what, done.err


@pytest.mark.parametrize("asked", ["1", "builtin1"])
def test_without_a_terminal_a_breakpoint_is_passed_in_one_line(run, script, asked: str):
    done = run("-n", "2", script(BREAKS), asked)
    assert done.code == 0, done.err
    assert done.err.count("rank 1 goes on past its breakpoint: expected a terminal, given none") == 1
    assert all("after" in done.log(rank) for rank in range(2))


def test_the_rank_that_reads_is_one_of_the_job(run, script):
    done = run("--stdin-rank", "2", "-n", "2", script(BREAKS), "0")
    assert done.err == "tpurun: error: --stdin-rank: expected a rank below 2, given 2\n"


class Terminal:
    """A job in a terminal of its own."""

    def __init__(self, folder: Path, *words: str | Path) -> None:
        self._end, terminal = pty.openpty()
        command = [TPURUN, *words]
        # Its own session, whose terminal nobody has claimed.
        self._job = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, start_new_session=True
        )
        os.close(terminal)
        self.seen = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        """Reads on until the pattern matches, and returns the match."""
        deadline = time.monotonic() + LIMIT_S
        while not (match := re.search(pattern, self.seen)):
            ready = select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0]
            assert ready, f"no {pattern!r} in {self.seen}"
            self.seen += os.read(self._end, 4096).decode()
        self.seen = self.seen[match.end() :]
        return match

    def type(self, line: str) -> None:
        os.write(self._end, f"{line}\n".encode())

    def wait(self) -> int:
        """Its exit code; a terminal that nobody reads from would keep the job."""
        while True:
            try:
                if not (text := os.read(self._end, 4096)):
                    break
            except OSError:
                # Nobody has it open any more.
                break
            self.seen += text.decode()
        return self._job.wait(LIMIT_S)

    def end(self) -> None:
        if self._job.poll() is None:
            self._job.kill()
            self._job.wait()
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path, script):
    made = []

    def begin(*words: str) -> Terminal:
        made.append(Terminal(tmp_path, "-n", "3", script(BREAKS), *words))
        return made[-1]

    yield begin
    for one in made:
        one.end()


@pytest.mark.parametrize("asked", ["0", "2", "builtin2"])
def test_a_prompt_takes_the_terminal(terminal, asked: str):
    job = terminal(asked)
    rank = int(asked[-1])
    job.read_until(rf"\(rank {rank}\) \(Pdb\) ")
    job.type("up" if asked.isdecimal() else "p 1")
    job.read_until(rf"\(rank {rank}\) \(Pdb\) ")
    job.type("p 'secret', secret")
    job.read_until(rf"\('secret', {40 + rank}\)\s+\(rank {rank}\) \(Pdb\) ")
    job.type("c")
    assert job.wait() == 0, job.seen


def test_prompts_of_several_ranks_come_one_after_another(terminal):
    job = terminal("every")
    asked = []
    for _ in range(3):
        rank = int(job.read_until(r"\(rank (\d)\) \(Pdb\) ")[1])
        # It keeps the terminal from step to step.
        job.type("n")
        assert job.read_until(r"\(rank (\d)\) \(Pdb\) ")[1] == str(rank)
        asked.append(rank)
        job.type("c")
    assert sorted(asked) == [0, 1, 2]
    assert job.wait() == 0, job.seen


def test_who_quits_does_not_keep_the_others(terminal):
    job = terminal("1")
    job.read_until(r"\(rank 1\) \(Pdb\) ")
    job.type("q")
    assert job.wait() == 1 and "BdbQuit" in job.seen, job.seen
