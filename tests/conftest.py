"""Every test starts its jobs through `start` or `run`; none of them can leave a process behind."""

import resource
import signal
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from jobs import TPURUN, Finished, Job
from scale import FULL

# A rank that dies of a signal on purpose leaves no core file.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# A shell starts what runs in its background with these ignored, and jobs would inherit that; what a process
# handles is the default again in what it executes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what takes long to `make full`: all that is marked `full`, and of the variants of a test that is
    marked `slice(n)` all but one in n. Which ones differs from test to test, so that what two tests have in
    common, as how ranks are started, is tried in each of its ways by one of them.
    """
    if FULL:
        return
    variants = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slice"):
            variants[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.get_closest_marker("full")}
    for name, all_of_it in variants.items():
        every = all_of_it[0].get_closest_marker("slice").args[0]
        first = zlib.crc32(name.encode()) % min(every, len(all_of_it))
        left_out |= {*all_of_it} - {*all_of_it[first::every]}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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
