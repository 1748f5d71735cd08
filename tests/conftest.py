"""Every test starts its jobs through `start` or `run`; none of them can leave a process behind."""

import json
import os
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tools import slices
from tools.jobs import TPURUN, Finished, Job

# A rank that dies of a signal on purpose leaves no core file.
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


# A shell starts what runs in its background with these ignored, and jobs would inherit that; what a process
# handles is the default again in what it executes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves what takes long to `make full`: all that is marked `full`, of the variants of a test that is
    marked `slice(n)` all but one in n, and unless somebody has said which tests to run, what is not in the
    slice of this commit.
    """
    if slices.FULL:
        return
    variants = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slice"):
            variants[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if item.get_closest_marker("full")}
    for name, all_of_it in variants.items():
        every = all_of_it[0].get_closest_marker("slice").args[0]
        first = slices.place(slices.NAME, name) % min(every, len(all_of_it))
        left_out |= {*all_of_it} - {*all_of_it[first::every]}
    rest = [item for item in items if item not in left_out]
    is_named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.keyword
    if slices.NAME != slices.ALL and not is_named:
        seconds = slices.durations([item.nodeid for item in rest], slices.known())
        chosen = slices.chosen(slices.NAME, seconds)
        left_out |= {item for item in rest if item.nodeid not in chosen}
        took, of = sum(seconds[test] for test in chosen), sum(seconds.values())
        config.get_terminal_writer().line(
            f"slice {slices.NAME}: {len(chosen)} of {len(rest)} tests, about {took:.0f} s of {of:.0f} s "
            f"(again: make test-python SLICE={slices.NAME}; all: SLICE={slices.ALL})"
        )
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[str], list]:
    """The values of a parameter in the selected tests of a module, for which what they share is made."""

    def of(test: str, name: str) -> list:
        same = (item for item in request.session.items if item.path == request.path)
        return [item.callspec.params[name] for item in same if item.originalname == test]

    return of


_took: dict[str, list[float]] = defaultdict(list)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what `make durations` writes down."""
    if report.when == "setup":
        _took[report.nodeid.partition("[")[0]].append(0.0)
    _took[report.nodeid.partition("[")[0]][-1] += report.duration


def pytest_sessionfinish() -> None:
    """Writes how long each test took, where TPURUN_TEST_DURATIONS says."""
    if path := os.environ.get("TPURUN_TEST_DURATIONS"):
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for test, all_of_it in _took.items():
            file, _, function = test.partition("::")
            found[file][function] = max(round(sum(all_of_it) / len(all_of_it), 1), 0.1)
        Path(path).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


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
