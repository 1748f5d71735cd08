"""A rank, forked or spawned, ends as a plain interpreter does, and leaves what that leaves."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs import TPURUN
from lifecycle.programs import PROGRAMS

LIMIT_S = 120
STARTS = {"forked": ["-n", "1"], "spawned": ["-n", "1", "--spawn"]}
# A module of this name in the working directory is not the library's, for whoever looks there.
STRANGERS = ("json", "random", "ast", "array")


def end_of(command: list[str], work: Path, program: str) -> tuple[int, str, dict[str, bytes]]:
    """The exit code, the standard output and the files of a program that is run by a command."""
    (work / "here").mkdir(parents=True)
    for name in STRANGERS:
        (work / "here" / f"{name}.py").write_text('open("stranger", "a").write(__name__)\n')
    source = work / "program.py"
    source.write_text(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN")}
    done = subprocess.run(
        [*command, str(source), "word"],
        cwd=work / "here",
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    left = [path for path in (work / "here").iterdir() if path.stem not in (*STRANGERS, "tpurun-runs")]
    files = {path.name: path.read_bytes() if path.is_file() else b"" for path in left}
    # As a shell would say it.
    code = 128 - done.returncode if done.returncode < 0 else done.returncode
    return code, done.stdout, files


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_ends_as_an_interpreter_does(tmp_path, start):
    commands = {"plain": [sys.executable], start: [str(TPURUN), *STARTS[start]]}

    def differences(number: int, program: str) -> str:
        ends = {
            how: end_of(command, tmp_path / f"{number}-{how}", program) for how, command in commands.items()
        }
        return "" if ends["plain"] == ends[start] else f"{program}: {ends}"

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(differences, range(len(PROGRAMS)), PROGRAMS.values()))
    assert not any(found), "\n".join(filter(None, found))


def test_an_interrupt_that_nobody_catches_is_seen_by_the_parent(tmp_path):
    code, _, files = end_of([str(TPURUN), "-n", "1"], tmp_path, PROGRAMS["an interrupt"])
    assert code == 128 + signal.SIGINT and files["a"] == b"x"
