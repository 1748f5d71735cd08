"""examples/train.py: the curve depends on the seed and the global batch, not on how many ranks share it."""

import re
import subprocess
from pathlib import Path

import pytest

from rank_processes import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
SMALL = ["--steps", "6", "--width", "32", "--log-every", "2", "--eval-every", "3", "--sample-bytes", "8"]


def train(ranks: int, *arguments: str) -> list[subprocess.CompletedProcess]:
    results = run_ranks(ranks, str(SCRIPT), "--device", "cpu", "--backend", "gloo", *SMALL, *arguments)
    for result in results:
        assert result.returncode == 0, result.stderr
        assert result.stderr == "", "a clean run warns of nothing"
    return results


def losses(result: subprocess.CompletedProcess) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", result.stdout)]


@pytest.fixture(scope="module")
def alone() -> subprocess.CompletedProcess:
    return train(1, "--batch-size", "6")[0]


def test_ranks_share_one_global_batch(alone):
    first, second = train(2, "--batch-size", "3")
    assert second.stdout == "", "the first rank alone logs"
    # Steps 1, 2, 4 and 6, one evaluation in between, and the last one.
    assert len(losses(alone)) == 6
    assert losses(first) == pytest.approx(losses(alone), abs=0.005)
    assert losses(alone)[0] == pytest.approx(5.55, abs=0.05), "every byte is equally likely at first"
    assert re.search(r"^val loss \d\.\d\d\ndef ", first.stdout, re.MULTILINE)


def test_another_seed_is_another_curve(alone):
    (other,) = train(1, "--batch-size", "6", "--seed", "1")
    assert losses(other) != losses(alone)
