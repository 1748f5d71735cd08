"""Cases in forked processes: one that crashes or hangs costs its case, not the run."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from . import cases
from .cases import Choice, Done, Failure

# How often the clock of a process is looked at that is over its time, and what it must have moved by then.
_LOOK_S = 60.0
_LEAST_S = 0.1
_Context = multiprocessing.get_context("fork")


class _Worker:
    """A process that runs one case at a time."""

    def __init__(self, choice: Choice) -> None:
        self.pipe, theirs = _Context.Pipe()
        self.process = _Context.Process(target=_serve, args=(theirs, choice), daemon=True)
        self.process.start()
        theirs.close()
        self.name = ""
        self.until = 0.0
        self._looked = 0.0
        self._limit = 0.0

    def begin(self, name: str, limit_s: float) -> None:
        self._looked = self._cpu_s()
        self.name, self._limit, self.until = name, self._looked + limit_s, time.monotonic() + limit_s
        self.pipe.send(name)

    def goes_on(self) -> bool:
        """Whether it computes, below its limit: on a busy host a minute of computing may take ten."""
        if time.monotonic() < self.until:
            return True
        before, self._looked = self._looked, self._cpu_s()
        self.until = time.monotonic() + _LOOK_S
        return before + _LEAST_S < self._looked < self._limit

    def _cpu_s(self) -> float:
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> Done:
        """Returns the result, or what became of the process."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return _crashed(self.name, f"the process ended with {self.process.exitcode}")

    def kill(self) -> Done:
        self.process.kill()
        self.process.join()
        return _crashed(self.name, "did not end in time")


def run_all(names: Sequence[str], choice: Choice, jobs: int, limit_s: float) -> Iterator[Done]:
    """In whatever order they end."""
    left = deque(names)
    workers: list[_Worker] = []
    try:
        while left or workers:
            while left and len(workers) < jobs:
                workers.append(_Worker(choice))
                workers[-1].begin(left.popleft(), limit_s)
            first = min(worker.until for worker in workers)
            wait([worker.pipe for worker in workers], max(0.0, first - time.monotonic()))
            for worker in list(workers):
                ready = worker.pipe.poll()
                if not ready and worker.goes_on():
                    continue
                yield worker.end() if ready else worker.kill()
                if worker.process.is_alive() and left:
                    worker.begin(left.popleft(), limit_s)
                else:
                    workers.remove(worker)
                    worker.process.kill()
    finally:
        for worker in workers:
            worker.process.kill()


def _serve(pipe: Connection, choice: Choice) -> None:
    cases.prepare()
    while True:
        pipe.send(cases.run(pipe.recv(), choice))


def _crashed(name: str, text: str) -> Done:
    return Done(name, failed=[Failure("crash", "", 1, text)])
