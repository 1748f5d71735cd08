"""The examples run as their headers say, on device tpu, and learn."""

import re
from pathlib import Path

import pytest

from tools.jobs import Finished

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(done: Finished, rank: int = 0) -> list[float]:
    assert done.code == 0, done.err
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([0-9.]+)", done.log(rank), re.MULTILINE)]


@pytest.mark.slice(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "pipeline"])
def test_the_loss_falls(run, name: str):
    found = losses(run("-n", "4", EXAMPLES / f"{name}.py"), rank=3 if name == "pipeline" else 0)
    assert len(found) >= 4 and found[-1] < 0.9 * found[0], found


def test_a_checkpoint_is_for_any_number_of_ranks(run, tmp_path):
    program = EXAMPLES / "checkpoint.py"
    first = losses(run("-n", "4", program, tmp_path / "saved"))
    done = run("-n", "3", program, tmp_path / "saved")
    second = losses(done)
    assert first[0] > first[1] > second[1]
    assert second[0] < first[0] - (first[0] - first[1]) / 2, "it did not go on where the others stopped"
    assert "saved step 40" in done.log(0)
