"""Collecting the tests claims no device: who has claimed it has it for good, and so have all forks."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import pytest
pytest.main(["--collect-only", "-q"])
sys.exit("tpurun.tpu" in sys.modules)
"""


def test_collecting_the_tests_claims_no_device():
    environment = {**os.environ, "TPURUN_TEST_SLICE": "all"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tests/sources/test_collection.py" in done.stdout
