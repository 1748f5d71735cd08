"""Start method ``own``: tests whose classes start their ranks themselves.

``python -m conformance.themselves PLAN`` runs a plan, whose tests are called ``Class.test``.
"""

from __future__ import annotations

import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any, TextIO

from .plan import FAILED, PASSED, SKIPPED, Outcome, Plan


def main() -> None:
    plan = Plan.read(Path(sys.argv[1]))
    os.environ.update(plan.environment())
    # Spawned ranks import this by its name.
    from . import bases

    # Tests of one class share its processes, so this is one suite.
    names = [name.split(".") for name in plan.tests]
    suite = unittest.TestSuite(bases.CASES[case](test) for case, test in names)
    with plan.outcomes.open("a", buffering=1) as file:
        suite.run(Written(file))


class Written(unittest.TestResult):
    """Writes every outcome as soon as it is known."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file
        self._began = 0.0
        self._end = (FAILED, "it came to no end")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        name = f"{type(test).__name__}.{test._testMethodName}"
        self._file.write(Outcome(name, *self._end, time.monotonic() - self._began).line())

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._end = (PASSED, "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._end = (SKIPPED, reason)

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        self._end = (FAILED, self._exc_info_to_string(error, test))

    addError = addFailure


if __name__ == "__main__":
    main()
