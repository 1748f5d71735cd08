"""Some random programs of operations on device tpu; `make op-programs` runs more of them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TPURUN_DEVICE": "1", "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=600
    )


def test_they_compute_what_the_cpu_does():
    done = run("""
        import sys
        from op_programs.__main__ import main
        sys.argv[1:] = ["--programs", "300"]
        sys.exit(main())
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 programs, 0 wrong" in done.stdout


def test_a_wrong_kernel_is_found():
    planted = """
        import sys
        import torch
        from torch import library
        from op_programs.__main__ import main
        torch.tpu.init()
        planted = library.Library("aten", "IMPL")
        planted.impl("neg", lambda x: torch.abs(x), "PrivateUse1", allow_override=True)
        sys.argv[1:] = ["--programs", "60"]
        sys.exit(main())
    """
    done = run(planted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "replay: python -m op_programs --replay" in done.stdout
