"""``python -m tests.performance``: measures, stores what was measured, and writes the page of it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from . import collectives, mpi, start
from .job import Row
from .machine import machine
from .options import Options, parse
from .page import FOLDER, page
from .plots import NoPlots, draw
from .programs import FLOORS, OVERLAP, STEPS, WAITING
from .progress import Progress
from .results import NotResults, Part, Results, load
from .settings import Settings

MEASURED: dict[str, Callable[[Settings, Progress], Iterator[Row]]] = {
    "collectives": collectives.measured,
    "mpi": mpi.measured,
    "steps": STEPS.measured,
    "start": start.measured,
    "waiting": WAITING.measured,
    "overlap": OVERLAP.measured,
    "floors": FLOORS.measured,
}


def main() -> int:
    # Ends the job that is being measured before this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse(sys.argv[1:])
    try:
        results = load(options.stored) if options.stored else measured(options)
    except NotResults as error:
        print(f"tests.performance: {error}", file=sys.stderr)
        return 2
    results.store(stored_in(options.out))
    try:
        plots = draw(results, options.out / FOLDER)
    except NoPlots as error:
        print(f"tests.performance: {error}", file=sys.stderr)
        plots = []
    (options.out / "performance.md").write_text(page(results, plots))
    return 0


def measured(options: Options) -> Results:
    """The parts that were asked for, with the others that were measured on this machine before.

    Each part is stored when it is there: all of them take an hour.
    """
    path = stored_in(options.out)
    results = Results(machine())
    if path.exists() and (before := load(path)).machine == results.machine:
        results = before
    progress = Progress()
    command = shlex.join(["python", "-m", "tests.performance", *sys.argv[1:]])
    for name in options.parts:
        results.parts[name] = Part(command, list(MEASURED[name](options.settings, progress)))
        results.store(path)
    return results


def stored_in(out: Path) -> Path:
    return out / FOLDER / "results.json"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
