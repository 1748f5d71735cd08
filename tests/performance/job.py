"""Runs a command to its end, or until a row of it is late; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TPURUN, TORCHRUN = (Path(sys.executable).with_name(name) for name in ("tpurun", "torchrun"))
Row = dict[str, Any]

START_S = 90.0
"""What the start of 64 ranks may take on a machine that others use, too."""
GRACE_S = 10.0
SAID_LINES = 60
# Every process of a job inherits it, whatever session or parent it moves to.
MARKER = "TPURUN_MEASURED_JOB"
# Variables that would change what is measured.
FOREIGN = re.compile(r"(OMP|OPENBLAS|MKL)_NUM_THREADS|TPURUN_.*|PET_.*|OMPI_.*|RANK|WORLD_SIZE|MASTER_.*")


class Late(Exception):
    """No row came in time."""


class Failed(Exception):
    """The command ended with an error, whose last line this is; the lines before it are on stderr."""


class Job:
    """A command in a session and a directory of its own; to be used with `with`, which ends it."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.name = uuid.uuid4().hex
        self._command = [str(word) for word in command]
        self._folder = tempfile.TemporaryDirectory(prefix="tpurun-performance-")
        folder = Path(self._folder.name)
        self._errors = (folder / "stderr").open("w+b")
        environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        environment |= {MARKER: self.name, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._deadline_s = 0.0
        self.began_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def rows(self, limit_s: float) -> Iterator[Row]:
        """The JSON objects that it prints, until it ends.

        Raises Late when one takes longer than `limit_s`, the first one as much longer as a start may take,
        and Failed when the command does.
        """
        self._deadline_s = time.monotonic() + START_S + limit_s
        for line in self._lines():
            start = line.find("{")  # behind what a launcher puts in front of a line of a rank
            if start < 0:
                continue
            yield json.loads(line[start:])
            self._deadline_s = time.monotonic() + limit_s
        try:
            code = self._process.wait(limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            raise Late from None
        if code:
            raise Failed(self._last_words(code))

    def _lines(self) -> Iterator[str]:
        rest = b""
        while True:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise Late
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not part:
                return

    def _last_words(self, code: int) -> str:
        """Returns the most telling line of all that the job said. The last lines go to stderr."""
        self._errors.seek(0)
        lines = [line.rstrip() for line in self._errors.read().decode(errors="replace").splitlines()]
        telling = [line for line in lines if re.search(r"\b(error|culprit)\b|Error: ", line)]
        words = (telling or [line for line in lines if line] or ["nothing"])[-1].strip()
        print(*lines[-SAID_LINES:], sep="\n", file=sys.stderr, flush=True)
        return f"{Path(self._command[0]).name} ended with {code}: {words[:200]}"

    def _end(self) -> None:
        """A launcher gets the time to end its ranks and to remove what it has made."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        for pid in processes(self.name):
            _kill(pid)
        self._process.wait()


def processes(name: str) -> list[int]:
    """Everything that was started by the job of that name and is alive."""
    wanted = f"{MARKER}={name}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or not ours
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _kill(pid: int) -> None:
    """Waits for its end, too, so that it writes nothing any more."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        select.select([process], [], [], GRACE_S)
    finally:
        os.close(process)
