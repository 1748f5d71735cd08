"""tpurun.bench: sizes, bandwidths, the plan, and whole runs on two Gloo ranks."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rank_processes import PACKAGE_ROOT, run_ranks
from tpurun import bench


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("64K", 65536), ("64k", 65536), ("1M", 1 << 20), ("2G", 2 << 30)]
)
def test_sizes_are_powers_of_1024(text, size):
    assert bench.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-8", "1.5M", "12Q", "1MB", " ", "²"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expected a size such as 8, 64K or 1M"):
        bench.parse_size(text)


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 64, 63 / 64),
        ("broadcast", 8, 1.0),
        ("send_recv", 8, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert bench.bus_factor(collective, ranks) == pytest.approx(factor)


def test_the_plan_keeps_to_the_time():
    plan = bench.Plan.within(2.0, {"fast": 10e-6, "slow": 0.01})
    assert plan.blocks == bench.MAX_BLOCKS
    assert plan.blocks * plan.iterations["slow"] * 0.01 == pytest.approx(2.0, rel=0.1)
    assert plan.iterations["fast"] == bench.MAX_ITERATIONS


def test_one_very_slow_iteration_is_still_repeated():
    plan = bench.Plan.within(1.0, {"slow": 10.0})
    assert (plan.blocks, plan.iterations["slow"]) == (bench.MIN_BLOCKS, 1)


def test_patterns_sum_up():
    setting = bench.Setting(group=None, rank=1, ranks=5, count=20, dtype=torch.int64)
    total = sum(setting.pattern(rank + 7, 20) for rank in range(5))
    assert torch.equal(total, setting.sum_of_patterns(7, 20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "8,x"], "expected a size such as 8, 64K or 1M, given 'x'"),
        (["--collectives", "all_reduce,nothing"], "given 'nothing'"),
        (["--memory", "staged,paged"], "expected some of staged, mapped, given 'paged'"),
        (["--seconds", "0"], "expected a number of seconds up to 3600, given '0'"),
        (["--backend", "gloo", "--against", "gloo"], "name another one"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench.parse_args(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_every_collective_on_two_gloo_ranks():
    names = ",".join(bench.COLLECTIVES)
    first, second = run_ranks(
        2, "-m", "tpurun.bench", "--backend", "gloo", "--json", "--seconds", "0.01",
        "--sizes", "8,1001", "--collectives", names,
    )  # fmt: skip
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == "", "only the first rank reports"
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    sizes = {name: [row["bytes"] for row in rows if row["collective"] == name] for name in bench.COLLECTIVES}
    assert sizes == {name: [8, 1000] for name in bench.COLLECTIVES} | {"barrier": [0]}
    for row in rows:
        assert (row["backend"], row["ranks"]) == ("gloo", 2)
        assert 0 < row["min_us"] <= row["time_us"] <= row["max_us"]
        assert row["algbw_gbps"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=0.01, abs=1e-6)
    assert f"[{len(rows)}/{len(rows)}] measured in" in first.stderr


# Another name for Gloo, so that two backends can be compared without a second implementation.
TWO_BACKENDS = """
import torch.distributed as dist
from tpurun import bench

def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("also_gloo", create, devices=["cpu"])
bench.main(["--backend", "also_gloo", "--against", "gloo", "--seconds", "0.01", "--sizes", "64",
            "--collectives", "all_reduce"])
"""


def test_a_comparison_shows_both_and_their_ratio():
    first, second = run_ranks(2, "-c", TWO_BACKENDS)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    title, columns, _units, line = first.stdout.splitlines()
    assert title == "# also_gloo, 2 ranks, against gloo"
    assert columns.split() == [
        "collective", "bytes", "time", "min-max", "algbw", "busbw", "moved", "memory",
        "gloo", "min-max", "ratio",
    ]  # fmt: skip
    fields = line.split()
    assert fields[:2] == ["all_reduce", "64"]
    ratio = float(fields[-1].removesuffix("x"))
    assert ratio == pytest.approx(float(fields[8]) / float(fields[2]), abs=0.1)


WRONG_RESULT = """
import torch.distributed as dist
from tpurun import bench

def wrong(setting):
    call = bench.all_reduce(setting)
    def run():
        call.run()
        call.output[3] += setting.rank
    return bench.Call(run, call.buffers, call.output, call.expected)

bench.COLLECTIVES["all_reduce"] = wrong
dist.init_process_group("gloo")
try:
    bench.measure("all_reduce", 64, [bench.Variant("gloo", dist.group.WORLD)], 0.01)
except RuntimeError as error:
    print(error)
    raise SystemExit(3)
finally:
    # Gloo's thread may still let go of the tensor, which needs the GIL: an exit at that moment aborts.
    dist.destroy_process_group()
"""


def test_a_wrong_result_is_an_error_on_the_rank_that_has_it():
    first, second = run_ranks(2, "-c", WRONG_RESULT)
    assert second.returncode == 3, second.stderr
    assert second.stdout == (
        "all_reduce of 16 elements on gloo is wrong on rank 1: element 3 is 2.0, expected 1.0\n"
    )
    assert first.returncode != 0, "the other rank learns that its partner left"


def test_outside_of_a_job_it_says_how_to_start_it():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = str(PACKAGE_ROOT)
    result = subprocess.run(
        [sys.executable, "-m", "tpurun.bench", "--backend", "gloo"],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.strip().endswith("start it with `tpurun bench` or torchrun")
