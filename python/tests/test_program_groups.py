"""A rank is told of the programs of its job. Whole jobs are in tests/jobs/test_programs.py."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun

TWO = [
    {"name": "eval", "first_rank": 0, "ranks": 1, "argv": ["eval.py", "--x"]},
    {"name": "train", "first_rank": 1, "ranks": 2, "argv": ["-m", "train"]},
]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPURUN_PROGRAMS", json.dumps(TWO))
    monkeypatch.setenv("TPURUN_PROGRAM", "train")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPURUN_PROGRAMS", "TPURUN_PROGRAM", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_programs_of_the_job(two):
    assert list(tpurun.programs()) == ["eval", "train"]
    own = tpurun.program()
    assert own == tpurun.programs()["train"] == tpurun.Program("train", range(1, 3), ("-m", "train"))


def test_a_process_without_tpurun_is_one_program(alone, monkeypatch):
    assert tpurun.program() == tpurun.Program("main", range(1), tuple(sys.argv))
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert next(iter(tpurun.programs().values())).ranks == range(4)
    # A name alone tells of no job.
    monkeypatch.setenv("TPURUN_PROGRAM", "train")
    assert tpurun.program().name == "main"


def test_reading_them_imports_no_torch():
    code = "import sys, tpurun; print(tpurun.program().name, 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == ("main False\n", "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{}",
        '[{"name": "a"}]',
        '[{"name": "a", "first_rank": 1, "ranks": 1, "argv": []}]',
        '[{"name": "a", "first_rank": 0, "ranks": 0, "argv": []}]',
        '[{"name": "a", "first_rank": 0, "ranks": "1", "argv": []}]',
    ],
)
def test_a_list_that_is_not_ours_is_refused(monkeypatch, text: str):
    monkeypatch.setenv("TPURUN_PROGRAMS", text)
    with pytest.raises(RuntimeError, match=r"^TPURUN_PROGRAMS: expected the list that tpurun sets, given "):
        tpurun.programs()


def test_a_program_that_is_not_in_the_job_is_refused(two, monkeypatch):
    monkeypatch.setenv("TPURUN_PROGRAM", "play")
    with pytest.raises(RuntimeError, match=r"^TPURUN_PROGRAM: expected one of eval, train, given play$"):
        tpurun.program()


def test_a_group_needs_a_world(two):
    with pytest.raises(RuntimeError, match=r"group of program train: .* call init_process_group first"):
        _ = tpurun.program().group


def sums_of_programs() -> list:
    """Returns what a rank gets from an all-reduce of its own program, in two worlds after each other."""
    os.environ["TPURUN_PROGRAM"] = "eval" if dist.get_rank() == 0 else "train"
    own = tpurun.program()
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=own.group)
    assert own.group is tpurun.programs()[own.name].group
    assert dist.get_process_group_ranks(own.group) == list(own.ranks)
    other = tpurun.programs()["train" if own.name == "eval" else "eval"]
    try:
        refused = str(other.group)
    except ValueError as error:
        refused = str(error)
    # Gloo's ranks do not survive one that leaves while they connect.
    dist.barrier()
    return [tensor.item(), refused]


@pytest.mark.parametrize("backend", ["tpu_dist", "gloo"])
def test_each_program_has_a_group(two, backend: str):
    assert ranks.run(3, sums_of_programs, backend=backend) == [
        [1.0, "group of program train: expected to be asked for by one of its ranks 1-2, given rank 0"],
        [5.0, "group of program eval: expected to be asked for by one of its ranks 0, given rank 1"],
        [5.0, "group of program eval: expected to be asked for by one of its ranks 0, given rank 2"],
    ]


def only_train() -> float | None:
    """The ranks of one program alone use its group; the other one does not take part."""
    if dist.get_rank() == 0:
        return None
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=tpurun.programs()["train"].group)
    return tensor.item()


def test_only_its_ranks_create_a_group(two):
    assert ranks.run(3, only_train) == [None, 2.0, 2.0]


def groups_around_it() -> list:
    """Groups that only some ranks make come before that of the program, one that all make comes after."""
    rank = dist.get_rank()
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    tensor = torch.ones(1)
    if rank > 0:
        dist.all_reduce(tensor, group=tpurun.programs()["train"].group)
    if rank != 1:
        dist.new_group([rank], use_local_synchronization=True)
    all_of_us = dist.new_group([0, 1, 2])
    dist.all_reduce(tensor, group=all_of_us)
    return tensor.item()


def test_a_group_neither_needs_nor_shifts_the_numbers_of_others(two):
    assert ranks.run(3, groups_around_it) == [5.0, 5.0, 5.0]


def of_another_world() -> str:
    try:
        return str(tpurun.programs()["train"].group)
    except RuntimeError as error:
        return str(error)


def test_the_world_must_be_that_of_the_job(two):
    said = "group of program train: expected the world of the job, 3 ranks, given 2"
    assert ranks.run(2, of_another_world) == [said, said]


def group_alone() -> list:
    first = tpurun.program().group
    size = dist.get_world_size(first)
    return [size, tpurun.program().name]


def test_a_world_without_tpurun_is_one_program(alone):
    assert ranks.run(2, group_alone) == [[2, "main"], [2, "main"]]
