"""Runs `tpurun` as a person does, and checks that nothing of a job is left when it has ended."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from fault_matrix.patience import Clock

TPURUN = Path(sys.executable).with_name("tpurun")
LIMIT_S = 60
# Every process of a job inherits it, whatever session or parent it moves to.
MARKER = "TPURUN_TEST_JOB"
# Variables that a shell or another test may have set, and that a job would obey.
FOREIGN = re.compile(
    r"(OMP|OPENBLAS|MKL)_NUM_THREADS|TPURUN_.*|PET_.*|TORCHELASTIC_.*|RANK|WORLD_SIZE|MASTER_.*|SLURM_.*|JOB_COMPLETION_INDEX"
)

# Made by every process that imports torch._dynamo, and by torchrun.
TORCHS_OWN = ("torchinductor_", "torchelastic_")


@dataclass(frozen=True)
class Report:
    """The verdict on a job that failed."""

    text: str
    culprit: int
    what: str
    """What the culprit did, up to the end of the line."""


@dataclass(frozen=True)
class Finished:
    """A job that has ended and left nothing but its run directory."""

    code: int
    out: str
    err: str
    run_dir: Path | None
    ended_at: float
    """By the clock of time.time()."""
    patience: float
    """How much longer everything takes because others use the machine, too; 1 when nobody does."""

    @cached_property
    def shown(self) -> list[tuple[str, str]]:
        """The lines on the screen: whose, and what. Lines of one program alone have its name in front."""
        lines = [re.fullmatch(r" *(?:[^ |]+ )?([0-9,-]+)\| (.*)", line) for line in self.out.splitlines()]
        assert all(lines), self.out
        return [(line[1], line[2]) for line in lines]

    def shown_by_rank(self) -> dict[int, list[str]]:
        """The lines of each rank on the screen, however they were folded."""
        by_rank: dict[int, list[str]] = {}
        for ranks, text in self.shown:
            for rank in ranks_in(ranks):
                by_rank.setdefault(rank, []).append(text)
        return by_rank

    @cached_property
    def events(self) -> list[dict]:
        return [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]

    def ends(self) -> dict[int, dict]:
        """How each rank ended."""
        return {event["rank"]: event for event in self.events if event["event"] == "rank ended"}

    def log(self, rank: int) -> str:
        """Everything that a rank wrote."""
        paths = list(self.run_dir.glob(f"rank-{rank:04}*.log"))
        assert len(paths) <= 1, paths
        return paths[0].read_text() if paths else ""

    @cached_property
    def report(self) -> Report:
        """The report, which is the last thing on the screen and lies in the run directory, too."""
        text = (self.run_dir / "report.txt").read_text()
        assert self.err.endswith(text), self.err
        assert len(text.splitlines()) <= 25, text
        match = re.search(r"^  culprit +rank (\d+) \(.*?\)  (.*)$", text, re.MULTILINE)
        assert match, text
        return Report(text, int(match[1]), match[2])


def free_rendezvous(address: str = "127.0.0.1") -> str:
    """Where node 0 of a job may listen: HOST:PORT with a UDP port that nobody has."""
    with socket.socket(type=socket.SOCK_DGRAM) as free:
        free.bind(("", 0))
        return f"{address}:{free.getsockname()[1]}"


def ranks_in(label: str) -> list[int]:
    """Those of `0-3,7`."""
    spans = [span.split("-") for span in label.split(",")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


class Job:
    """A command that runs in a session, a working directory and a temporary directory of its own."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str | Path],
        *,
        stdin: str = "",
        env: Mapping[str, str] = MappingProxyType({}),
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`files` are put into the working directory first."""
        self.name = uuid.uuid4().hex
        self.cwd, self.temporary = folder / "cwd", folder / "tmp"
        for directory in (self.cwd, self.temporary):
            directory.mkdir()
        for name, text in files.items():
            (self.cwd / name).parent.mkdir(parents=True, exist_ok=True)
            (self.cwd / name).write_text(text)
        self._files_before = set(self.cwd.iterdir())
        self._shared_before = set(os.listdir("/dev/shm"))
        self._clock = Clock()
        environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        environment |= {MARKER: self.name, "TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [str(word) for word in command],
            cwd=self.cwd,
            env=environment | dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Or what `read_until` has read ahead would be missing in the end.
            bufsize=0,
            start_new_session=True,
        )
        self._out = b""
        self._stdin = stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def run_dir(self) -> Path | None:
        runs = list(self.cwd.glob("tpurun-runs/[!.]*"))
        assert len(runs) <= 1, runs
        return runs[0] if runs else None

    def read_until(self, text: str, limit_s: float = LIMIT_S) -> str:
        """Reads what the job writes to stdout until a line contains `text`, and returns that line."""
        watchdog = threading.Timer(limit_s, self.end)
        watchdog.start()
        try:
            for line in self._process.stdout:
                self._out += line
                if text.encode() in line:
                    return line.decode()
        finally:
            watchdog.cancel()
        raise AssertionError(f"no {text!r} in {self._out}\n{self._process.communicate()[1].decode()}")

    def read_of_all(self, text: str, ranks: int) -> None:
        """Reads until each of several ranks has written a line with `text`."""
        missing = set(range(ranks))
        while missing:
            missing -= set(ranks_in(self.read_until(text).split("|")[0].strip()))

    def signal(self, number: int, pid: int | None = None) -> None:
        """Sends a signal to one process, the front unless another is named."""
        os.kill(pid or self.pid, number)

    def processes(self) -> list[int]:
        """Everything that was started by this job and is alive."""
        wanted = f"{MARKER}={self.name}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            pid = int(path.parent.name)
            try:
                # None is left of those that have ended; some write their own name over it.
                given = path.read_bytes()
                if given and (wanted in given.split(b"\0") or os.getsid(pid) == self.pid):
                    found.append(pid)
            except OSError:  # ended meanwhile, or not ours
                continue
        return found

    def wait(self, limit_s: float = LIMIT_S, *, linger_s: float = 0, folder: Path | None = None) -> Finished:
        """Waits for the end, then for the last process for `linger_s`, and looks at what is left.

        `folder` is the run directory when the command names one.
        """
        is_late = False
        try:
            rest, err = self._process.communicate(self._stdin.encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
            self.end()
            rest, err = self._process.communicate()
        out, err = (self._out + rest).decode(), err.decode()
        assert not is_late, f"still running after {limit_s} s\n{out}\n{err}"
        ended_at = time.time()
        left = self._await_the_last(linger_s)
        names = [_name(pid) for pid in left]
        self.end()
        assert not left, f"alive after the end: {names}\n{err}"
        self._assert_clean()
        code = self._process.returncode
        return Finished(code, out, err, folder or self.run_dir, ended_at, self._clock.patience())

    def end(self) -> None:
        """Kills whatever is left."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _await_the_last(self, limit_s: float) -> list[int]:
        deadline = time.monotonic() + limit_s
        while (left := self.processes()) and (rest := deadline - time.monotonic()) > 0:
            ends_within(rest, left[0])
        return left

    def _assert_clean(self) -> None:
        files = {path.name for path in set(self.cwd.iterdir()) - self._files_before} - {"tpurun-runs"}
        assert not files, f"left in the working directory: {files}"
        temporary = [name for name in os.listdir(self.temporary) if not name.startswith(TORCHS_OWN)]
        assert not temporary, f"left in TMPDIR: {temporary}"
        shared = set(os.listdir("/dev/shm")) - self._shared_before
        # Those that others have made meanwhile are in use.
        assert not shared or not (shared - _names_in_use()), f"left in /dev/shm: {shared}"
        groups = list(Path("/sys/fs/cgroup").glob(f"**/tpurun-{self.pid}"))
        assert not groups, f"left: {groups}"


def ends_within(limit_s: float, pid: int) -> bool:
    """Waits for the end of a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def _name(pid: int) -> str:
    try:
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    except OSError:
        return f"{pid}"


def _names_in_use() -> set[str]:
    """The files of /dev/shm that a living process has open or mapped."""
    return {Path(target).name for target in _open_files() if target.startswith("/dev/shm/")}


def _open_files() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            yield from (os.readlink(path) for path in (process / "fd").iterdir())
            yield from (line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines())
        except OSError:
            continue
