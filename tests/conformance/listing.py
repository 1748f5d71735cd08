"""``python -m conformance.listing SUITE`` prints the names of its tests, as JSON."""

from __future__ import annotations

import json
import sys

from .suites import SUITES, tests_of

if __name__ == "__main__":
    print(json.dumps(tests_of(SUITES[sys.argv[1]])))
