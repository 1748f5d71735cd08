"""``python -m tests.conformance``: runs suites of the installed torch, and writes down what came out."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ..tools.choices import names_of
from .page import page
from .plan import Outcome, Plan
from .results import Result, Run, read_all
from .start import STARTS, TESTS, environment, run
from .suites import SUITES

WIDTH = 300
# The start methods to choose from; the other one is for tests that leave no choice.
CHOICE = [start for start in STARTS if start != "own"]


def main() -> int:
    options = parse()
    # The way out is through `finally`, which ends the ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = 0
    for name in options.suites:
        result = run_suite(name, options)
        failed += sum(len(one.failed) for one in result.runs)
        if options.out is not None:
            result.write(options.out / "conformance")
    if options.out is not None:
        (options.out / "conformance.md").write_text(page(read_all(options.out / "conformance")))
    print(f"{failed} failed", flush=True)
    return 1 if failed else 0


def run_suite(name: str, options: argparse.Namespace) -> Result:
    suite = SUITES[name]
    command = f"python -m tests.conformance {' '.join(sys.argv[1:])}"
    result = Result(name, suite.source, version("torch"), suite.about)
    with tempfile.TemporaryDirectory(prefix="tpurun-conformance-") as folder:
        for start in ["own"] if suite.load is None else options.starts:
            plan = Plan(Path(folder) / start, name, options.ranks or suite.ranks, [], options.debug)
            plan = replace(plan, tests=chosen(plan, options.tests))
            for ranks, outcomes in run(plan, start, told(name, start)).items():
                result.runs.append(Run.of(command, start, ranks, options.debug, outcomes))
    return result


def chosen(plan: Plan, parts: Sequence[str]) -> list[str]:
    """The names of the tests, from a process of its own: importing a suite binds it to a number of ranks."""
    listing = subprocess.run(
        [sys.executable, "-m", "conformance.listing", plan.suite],
        cwd=TESTS,
        env=environment(plan) | plan.environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    names = json.loads(listing.stdout.splitlines()[-1])
    return [name for name in names if not parts or any(part in name for part in parts)]


def told(suite: str, start: str) -> Callable[[Plan, Outcome], None]:
    """Prints one line for each test."""

    def tell(plan: Plan, one: Outcome) -> None:
        text = " ".join(one.text.split())[-WIDTH:]
        print(
            f"{one.kind:<7} {suite}/{start}/{plan.ranks} {one.test} {one.seconds:.1f} s  {text}", flush=True
        )

    return tell


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("tests", nargs="*", metavar="TEST", help="parts of names of tests [all]")
    parser.add_argument(
        "--suites", type=names_of(SUITES), default=list(SUITES), help=f"of {','.join(SUITES)}"
    )
    parser.add_argument(
        "--starts", type=names_of(CHOICE), default=["fork"], help=f"of {','.join(CHOICE)} [fork]"
    )
    parser.add_argument("--ranks", type=int, default=0, help="instead of what each suite usually has")
    parser.add_argument("--debug", choices=["OFF", "INFO", "DETAIL"], default="OFF")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the results and the page there")
    options = parser.parse_args()
    if options.tests and options.out is not None:
        parser.error("expected --out with all tests of a suite, given some")
    return options


if __name__ == "__main__":
    sys.exit(main())
