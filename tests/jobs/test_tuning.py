"""The numbers by which collectives are planned: given to a job, measured, and seen in what ran."""

import json
import os

import pytest

# Every collective but the last is a pair: the group, and how many KiB of f32.
PROGRAM = """
import os, sys
import torch, tpurun
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
first = "{ pipeline_bytes = 0, small_bytes = 0 }"
os.environ["TPURUN_TUNING"] = first if rank == 0 else "{ pipeline_bytes = 1048576 }"
tuned = dist.new_group()
for group in (None, tuned):
    for kib in (4, 64):
        dist.all_reduce(torch.ones(kib << 8), group=group)
dist.all_reduce(tpurun.empty(64 << 8).fill_(1.0))
dist.broadcast(torch.ones(64 << 8), 0)
dist.barrier()
sys.exit("on purpose")
"""


def strategies(finished) -> list[list[str | None]]:
    """Every lane of every rank says how its collectives were run; all ranks say the same."""
    flight = json.loads((finished.run_dir / "flight" / "flight.json").read_text())
    of_ranks = [
        sorted([record["strategy"] for record in lane["records"]] for lane in rank["lanes"])
        for rank in flight["ranks"]
    ]
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks), of_ranks
    return of_ranks[0]


def test_what_ran_is_on_the_board_and_rank_0_decides(script, run):
    ranks = 2 * len(os.sched_getaffinity(0)) + 2
    finished = run("-n", str(ranks), script(PROGRAM))
    assert finished.code == 1
    world, tuned = sorted(strategies(finished), key=len, reverse=True)
    assert world == ["windows", "windows", "in_place", "windows", None]
    assert tuned == ["pipeline", "pipeline"]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_file_is_for_all_groups(script, run, tmp_path, given):
    file = tmp_path / "this-machine.toml"
    file.write_text("# of this machine\npipeline_bytes = 65_536\nin_place_bytes = 1_048_576\n")
    ranks = 2 * len(os.sched_getaffinity(0)) + 2
    arguments = ["--tuning", str(file)] if given == "option" else []
    environment = {} if given == "option" else {"TPURUN_TUNING": str(file)}
    finished = run("-n", str(ranks), *arguments, script(PROGRAM), env=environment)
    world = max(strategies(finished), key=len)
    assert world == ["windows", "pipeline", "pipeline", "windows", None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pipeline_byte = 1", "expected one of small_bytes, in_place_bytes, "),
        ("pipeline_pieces = 0", "pipeline_pieces: expected a number from 1 to 16, given 0"),
        ("pipeline_pieces = ", "expected TOML: "),
    ],
)
def test_a_bad_file_is_refused_before_any_rank_starts(run, tmp_path, text, expected):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    finished = run("-n", "2", "--tuning", str(file), "true")
    assert finished.code == 2
    line = finished.err.strip()
    assert line.startswith(f"tpurun: error: --tuning {file}: ") and expected in line and "\n" not in line


def test_this_machine_is_measured(run, tmp_path):
    file = tmp_path / "this-machine.toml"
    measured = run("bench", "--ranks", "3", "--seconds", "0.002", "--tune", str(file))
    assert measured.code == 0, measured.err
    lines = measured.out.splitlines()
    assert lines[-1] == f"written to {file}: use it with `tpurun --tuning {file}`"
    assert {line.split()[0] for line in lines[:-1]} >= {
        "in_place_fold_part",
        "read_by_many_bytes",
        "cache_bytes",
    }
    assert run("-n", "2", "--tuning", str(file), "true").code == 0
    again = run("bench", "--ranks", "3", "--tune", str(file))
    assert again.code != 0 and f"expected a file that does not exist yet, given {file}" in again.err
