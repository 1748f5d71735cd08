"""Runs programs as a plain interpreter does, and as ranks of jobs, and says how each process ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.jobs import FOREIGN, TPURUN

from .program import Program

LIMIT_S = 240
# A module of this name in the working directory is not the library's, for whoever looks there.
STRANGERS = ("json", "random", "ast", "array")
# `python -m` shows the frames of the library that found the module.
FOUND_BY = '  File "<frozen runpy>"'
# Variables of the tests themselves, which would change how every program is run.
OF_TESTS = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTEST_")


@dataclass(frozen=True)
class End:
    """How a process ended and what it left."""

    code: int
    """As a shell would say it."""
    output: tuple[str, ...]
    """The lines of both streams, sorted: a pipe is written to in blocks, and a rank writes lines."""
    files: Mapping[str, bytes]


@dataclass
class Place:
    """Where programs are written and run."""

    root: Path

    def __post_init__(self) -> None:
        self.start = self.root / "start"
        self.start.mkdir(parents=True)
        for name in STRANGERS:
            text = f'open({str(self.root / "stranger")!r}, "a").write(__name__)\n'
            (self.start / f"{name}.py").write_text(text)

    def cwd_of(self, rank: int) -> Path:
        return self.root / f"in-{rank}"

    def make_cwds(self, ranks: int) -> None:
        for rank in range(ranks):
            self.cwd_of(rank).mkdir()

    def words(self, number: int, program: Program) -> list[str]:
        return program.write(self.root / f"program-{number}", self.start, f"module_{number}")

    def run(self, command: Sequence[str | Path], env: Mapping[str, str]) -> subprocess.CompletedProcess:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not FOREIGN.fullmatch(name) and not name.startswith(OF_TESTS)
        }
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.start,
            env=kept | dict(env) | {"LIFECYCLE_IN": str(self.root / "in-")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
        )

    def end(self, code: int, output: bytes, rank: int, number: int) -> End:
        """Returns the end of a program in a rank, in words that do not say where it ran."""
        text = output.decode("utf-8", "backslashreplace").replace(str(self.cwd_of(rank)), "CWD")
        text = text.replace(f"{self.root}/program-{number}", "PROGRAM").replace(f"module_{number}", "MODULE")
        text = re.sub("0x[0-9a-f]{6,}", "ADDRESS", text.replace(str(self.root), "ROOT"))
        lines = [line for line in text.splitlines() if not line.startswith(FOUND_BY)]
        return End(code, tuple(sorted(lines)), self.files(rank, number))

    def files(self, rank: int, number: int) -> dict[str, bytes]:
        """Those in the working directory, and the names of those beside the program."""
        cwd, beside = self.cwd_of(rank), self.root / f"program-{number}"
        found = {f"PROGRAM/{path.relative_to(beside)}": b"" for path in beside.rglob("*")}
        for path in cwd.rglob("*"):
            found[f"CWD/{path.relative_to(cwd)}"] = path.read_bytes() if path.is_file() else b""
        if (self.root / "stranger").exists():
            found["stranger"] = (self.root / "stranger").read_bytes()
        return found


def plainly(root: Path, programs: Sequence[Program]) -> list[End]:
    """Each by an interpreter of its own."""

    def one(number: int) -> End:
        place = Place(root / str(number))
        place.make_cwds(1)
        words = place.words(number, programs[number])
        done = place.run([sys.executable, *words, "word"], programs[number].env)
        code = 128 - done.returncode if done.returncode < 0 else done.returncode
        return place.end(code, done.stdout + done.stderr, 0, number)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(len(programs))))


def written_by(command: Sequence[str | Path], root: Path, program: Program) -> tuple[int, bytes]:
    """The exit code, as a shell would say it, and the standard output of a command with a program."""
    place = Place(root)
    place.make_cwds(1)
    done = place.run([*command, *place.words(0, program), "word"], program.env)
    return 128 - done.returncode if done.returncode < 0 else done.returncode, done.stdout


def as_ranks(root: Path, programs: Sequence[Program], ranks: int, options: Sequence[str]) -> list[list[End]]:
    """All in one job, which has so many ranks of each; yields how those of each program ended."""
    place = Place(root)
    place.make_cwds(ranks * len(programs))
    command = [TPURUN, *options, "--on-failure", "continue", "--log-dir", root / "run"]
    for number, program in enumerate(programs):
        python = [sys.executable] if program.form == "text" else []
        command += [*([":"] if number else []), "-n", str(ranks)]
        command += [*python, *place.words(number, program), "word"]
    (env,) = {tuple(program.env.items()) for program in programs}
    done = place.run(command, dict(env))
    codes = codes_of(root / "run")
    assert len(codes) == ranks * len(programs), done.stderr.decode()
    return [
        [
            place.end(codes[rank], log_of(root / "run", rank), rank, number)
            for rank in range(number * ranks, (number + 1) * ranks)
        ]
        for number in range(len(programs))
    ]


def codes_of(run_dir: Path) -> dict[int, int]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    ended = [event for event in events if event["event"] == "rank ended"]
    return {event["rank"]: event.get("code", 128 + event.get("signal", 0)) for event in ended}


def log_of(run_dir: Path, rank: int) -> bytes:
    paths = [path for path in run_dir.iterdir() if re.fullmatch(rf"rank-{rank:04}(-.*)?\.log", path.name)]
    return paths[0].read_bytes() if paths else b""
