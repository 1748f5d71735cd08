"""Four hosts of four ranks, with a tpurun on each, compute what one process computes."""

import re
from pathlib import Path

import pytest

from programs.start import Verdict, all_programs, run
from tools.jobs import Finished
from tools.namespaces import NotAllowed
from tools.nodes import commands, plugged

HOSTS, EACH = 4, 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
# Some programs of each kind of communication. `make programs LAUNCHER=nodes` runs all there are.
PROGRAMS = [
    "ddp/plain",
    "ddp/buffers_are_those_of_rank_0",
    "ddp_hooks/bf16_compress",
    "ddp_hooks/median_of_the_ranks",
    "join/divided_by_those_left",
    "zero_redundancy/in_shards",
    "fsdp2/plain",
    "fsdp2/state_dict",
    "fsdp2_gradients/means",
    "fsdp2_gradients/bf16_reduced_in_bf16",
    "dtensor/every_redistribution",
    "dtensor/matrix_products",
    "tensor_parallel/ring_attention",
    "pipeline/one_forward_one_backward",
    "pipeline/interleaved",
]


@pytest.fixture(scope="module")
def verdicts(selected) -> dict[str, Verdict]:
    """Runs all programs in one job."""
    names = selected("test_programs_compute_what_one_process_computes", "name")
    chosen = [program for program in all_programs() if program.name in names]
    try:
        found = run(chosen, launcher="nodes", each=HOSTS * EACH)
    except NotAllowed as why:
        pytest.skip(f"network namespaces: {why}")
    return {verdict.program.name: verdict for verdict in found}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compute_what_one_process_computes(verdicts: dict[str, Verdict], name: str):
    problems = verdicts[name].problems
    assert not problems, "\n".join(problems)


def losses(done: Finished) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+/8  loss ([0-9.]+)", done.log(0), re.MULTILINE)]


@pytest.mark.full
def test_the_example_learns_what_one_process_learns(start):
    """From the same batches: each rank has a sixteenth of them."""
    words = [EXAMPLE, "--steps", "8", "--log-every", "1", "--sample-bytes", "16", "--batch-size"]
    try:
        with plugged(HOSTS) as hosts:
            jobs = [start(command=command, env=env) for command, env in commands(hosts, EACH, *words, "4")]
            done = [job.wait() for job in jobs]
    except NotAllowed as why:
        pytest.skip(f"network namespaces: {why}")
    assert [one.code for one in done] == [0] * HOSTS, "\n".join(one.err for one in done)
    assert done[0].log(0).startswith("16 ranks, backend tpu_dist, device tpu: ")
    ours = losses(done[0])
    assert len(ours) == 8 and ours[-1] < ours[0] - 1, ours
    alone = start("-n", "1", *words, "64").wait()
    assert alone.code == 0, alone.err
    # Printed with three digits.
    assert ours == pytest.approx(losses(alone), abs=2e-3)
