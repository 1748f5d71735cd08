"""Some random programs of collectives against numpy; `make differential` runs many more."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from differential import generate
from differential.formats import FORMATS, INTEGERS, Format
from differential.order import POST, WAIT, actions
from differential.program import Program

ROOT = Path(__file__).parents[1]
FIRST = 1_000_000
LIMIT_S = 300


def run(*arguments: str | int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.differential", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


def assert_right(done: subprocess.CompletedProcess[str], programs: int) -> None:
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert f"{programs} programs, {programs} right, 0 wrong" in done.stdout, text


def test_programs_on_forked_ranks():
    assert_right(run("--seed", FIRST, "--programs", 240, "--launcher", "fork"), 240)


def test_programs_under_tpurun():
    seeds = [seed for seed in range(FIRST + 240, FIRST + 1000) if generate.ranks_of(seed) == 5][:60]
    done = run(
        "--seed", seeds[0], "--programs", seeds[-1] - seeds[0] + 1, "--ranks", 5, "--launcher", "tpurun"
    )
    assert_right(done, 60)


# A program of several steps, among which one all_reduce of more than nothing.
VICTIM = next(
    seed
    for seed in range(FIRST, 2 * FIRST)
    if (one := generate.program(seed)).ranks == 3
    and len(one.steps) > 4
    and [(step.kind, step.form, step.dtype, step.op) for step in one.steps if step.kind == "all_reduce"]
    == [("all_reduce", "plain", "float32", "SUM")]
    and len(one.groups[next(step.group for step in one.steps if step.kind == "all_reduce")].ranks) == 3
)
WHERE = next(step for step in generate.program(VICTIM).steps if step.kind == "all_reduce")


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("oracle", r"x0 float32\[.*\d+ elements differ, the first at 0"),
        ("result", r"x0 float32\[.*\d+ elements differ, the first at \d+"),
        ("stray", r"byte \d+ of \d+, in no tensor, was written to"),
        ("operation", r"CollectiveMismatchError: .*all_reduce"),
        ("crash", r"RankLostError: .*rank \d"),
        ("hang", r"CollectiveTimeoutError: .*rank \d"),
    ],
)
def test_an_error_made_on_purpose_is_found_and_the_program_shrunk_to_it(plant: str, says: str):
    timeout_s = 2 if plant == "hang" else 30
    # Beside others, which are right and stay so.
    done = run(
        *["--seed", VICTIM, "--programs", 1, "--ranks", 3, "--launcher", "fork"],
        *["--plant", plant, "--timeout", timeout_s],
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 programs, 0 right, 1 wrong" in done.stdout
    assert re.search(says, done.stdout), done.stdout
    shown = [line for line in done.stdout.splitlines() if line.startswith("    ")]
    assert shown == [f"  {WHERE}".rstrip()], done.stdout
    replay = re.search(r"replay: python -m tests.differential (.*)", done.stdout)[1].split()
    assert replay[:4] == ["--replay", str(VICTIM), "--steps", str(WHERE.index)]
    assert run(*replay, "--timeout", timeout_s).returncode == 1


def test_the_program_that_ends_its_job_is_named_and_the_others_run():
    done = run("--seed", VICTIM - 20, "--programs", 40, "--ranks", 3, "--launcher", "fork", "--no-shrink")
    total = int(re.search(r"(\d+) programs, (\d+) right, 0 wrong", done.stdout)[1])
    planted = run(
        *["--seed", VICTIM - 20, "--programs", 40, "--ranks", 3, "--launcher", "fork", "--no-shrink"],
        *["--plant", "crash"],
    )
    wrong = sum(
        any(step.kind == "all_reduce" for step in generate.program(seed).steps)
        for seed in range(VICTIM - 20, VICTIM + 20)
        if generate.ranks_of(seed) == 3
    )
    assert f"{total} programs, {total - wrong} right, {wrong} wrong" in planted.stdout, planted.stdout


def test_a_seed_is_a_program():
    for seed in range(200):
        assert generate.program(seed) == generate.program(seed)
        assert generate.program(seed).ranks == generate.ranks_of(seed)


def test_everything_is_drawn():
    steps = [step for seed in range(3000) for step in generate.program(seed).steps]
    assert {(step.kind, step.form) for step in steps} == {
        (kind, form) for kind, (_, forms) in generate.KINDS.items() for form in forms
    }
    assert {step.dtype for step in steps} == set(FORMATS)
    assert min(Counter(generate.ranks_of(seed) for seed in range(3000)).values()) > 100


def test_groups_are_used_in_one_order_and_everything_is_waited_for_once():
    for seed in range(300):
        program = generate.program(seed)
        by_rank = [actions(program, rank) for rank in range(program.ranks)]
        for index, group in enumerate(program.groups):
            orders = {posted(program, by_rank[rank], index) for rank in group.ranks}
            assert len(orders) == 1, program
        for rank, mine in enumerate(by_rank):
            expected = [
                step.index
                for step in program.steps
                if rank in program.groups[step.group].ranks and step.is_async
            ]
            assert sorted(step.index for what, step in mine if what == WAIT) == expected


def posted(program: Program, mine: list, group: int) -> tuple[int, ...]:
    return tuple(step.index for what, step in mine if what == POST and step.group == group)


SMALL = [form for form in FORMATS.values() if form.name.startswith("float") and form.bytes <= 2]


@pytest.mark.parametrize(
    "form", [form for form in SMALL if form.family != "opaque"], ids=lambda one: one.name
)
def test_small_floats_are_what_torch_says(form: Format):
    codes = np.arange(1 << 8 * form.bytes).astype(form.raw)
    numbers = torch.from_numpy(codes.copy()).view(getattr(torch, form.name)).float().numpy()
    assert np.array_equal(form.decode(codes), numbers, equal_nan=True)
    finite = np.isfinite(numbers)
    assert np.array_equal(form.encode(numbers)[finite], codes[finite])
    random = np.random.default_rng(1)
    wild = np.frombuffer(random.bytes(4_000_000), np.float32)
    near = random.normal(0, 1, 100_000).astype(np.float32)
    middles = ((numbers[finite][1:] + numbers[finite][:-1]) / 2).astype(np.float32)
    for floats in (wild, near, middles):
        rounded = torch.from_numpy(floats.copy()).to(getattr(torch, form.name))
        ours = form.decode(form.encode(floats))
        assert np.array_equal(ours, rounded.float().numpy(), equal_nan=True)


def test_integers_are_those_of_torch():
    for form in INTEGERS:
        assert torch.empty(0, dtype=getattr(torch, form.name)).itemsize == form.bytes
