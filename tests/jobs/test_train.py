"""The example: its loss curve is the same on this backend and on Gloo, and compiled."""

import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"


def losses(run, backend: str, *options: str) -> list[float]:
    short = ("--steps", "12", "--log-every", "1", "--sample-bytes", "16")
    done = run("-n", "4", EXAMPLE, "--backend", backend, *short, *options)
    assert done.code == 0, done.err
    log = done.log(0)
    assert f"4 ranks, backend {backend}," in log
    assert re.search(r"^val loss \d\.\d\d\ndef ", log, re.MULTILINE), "the result comes last, then a sample"
    if not options:
        assert all(done.log(rank) == "" for rank in range(1, 4)), "rank 0 alone speaks"
    return [float(loss) for loss in re.findall(r"^step +\d+/12  loss ([0-9.]+)", log, re.MULTILINE)]


def test_the_curve_does_not_depend_on_the_backend(run):
    ours = losses(run, "tpu_dist")
    assert len(ours) == 12
    assert ours[0] == pytest.approx(5.55, abs=0.05), "every byte is equally likely at first"
    assert ours[-1] < ours[0] - 1
    # Printed with three digits.
    assert losses(run, "gloo") == pytest.approx(ours, abs=1e-3 + 1e-9)


def test_the_curve_is_the_same_compiled(run):
    assert losses(run, "tpu_dist", "--compile") == losses(run, "tpu_dist")
