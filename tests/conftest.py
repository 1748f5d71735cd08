"""Every test starts its jobs through `start` or `run`; none of them can leave a process behind."""

import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jobs import TPURUN, Finished, Job

# A rank that dies of a signal on purpose leaves no core file.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# A shell starts what runs in its background with SIGINT ignored, and jobs would inherit that; what a process
# handles is the default again in what it executes.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the text of a program into a file."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts `tpurun` with these arguments, or the command given as `command`; ends it with the test."""
    jobs = []

    def start(*arguments: str | Path, command: Sequence[str | Path] = (TPURUN,), **options) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, [*command, *arguments], **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
def run(start: Callable[..., Job]) -> Callable[..., Finished]:
    """Runs `tpurun` with these arguments to its end."""

    def run(*arguments: str | Path, **options) -> Finished:
        return start(*arguments, **options).wait()

    return run
