"""Some random programs of collectives against numpy; `make nightly` runs many more."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from differential import generate
from differential.formats import FORMATS
from differential.order import POST, WAIT, actions
from differential.program import Program, Step
from differential.shrink import shrunk
from tools.jobs import Finished, Job
from tools.slices import FULL, some

ROOT = Path(__file__).parents[2]
FIRST = 1_000_000
PROGRAMS = 300 if FULL else 200
# Two minutes on two cores that do nothing else.
LIMIT_S = 600


@pytest.fixture
def fuzz(start: Callable[..., Job]) -> Callable[..., Finished]:
    """Runs the command to its end."""
    command = (sys.executable, "-m", "tests.differential")

    def fuzz(*arguments: str | int) -> Finished:
        job = start(*map(str, arguments), command=command, env={"PYTHONPATH": str(ROOT)})
        return job.wait(LIMIT_S)

    return fuzz


def test_programs(fuzz):
    done = fuzz("--seed", FIRST, "--programs", PROGRAMS)
    assert done.code == 0, done.out + done.err
    assert f"{PROGRAMS} programs, {PROGRAMS} right, 0 wrong" in done.out, done.out + done.err


def victims(seed: int) -> list[Step]:
    """The steps that are done wrong on purpose."""
    return [step for step in generate.program(seed).steps if step.kind == "all_reduce"]


def is_fit(seed: int) -> bool:
    """Whether one of several steps is an all_reduce, of all, in which each error can be made."""
    if generate.world_of(seed) != ("fork", 3):
        return False
    program, steps = generate.program(seed), victims(seed)
    return (
        len(program.steps) > 4
        and [(step.form, step.dtype, step.op) for step in steps] == [("plain", "float32", "SUM")]
        and len(program.groups[steps[0].group].ranks) == 3
        and 0 not in steps[0].shapes[0]
    )


VICTIM = next(filter(is_fit, range(FIRST, 2 * FIRST)))


@pytest.mark.parametrize(
    ("plant", "says"),
    # A plant that hangs takes long, because every step that is tried waits for its timeout.
    some(
        [
            ("oracle", r"x0 float32\[.*\d+ elements differ, the first at 0"),
            ("result", r"x0 float32\[.*\d+ elements differ, the first at \d+"),
            ("stray", r"byte \d+ of \d+, in no tensor, was written to"),
            ("operation", r"CollectiveMismatchError: .*all_reduce"),
            ("crash", r"RankLostError: .*rank \d"),
            ("hang", r"CollectiveTimeoutError: .*rank \d"),
        ],
        5,
    ),
)
def test_an_error_made_on_purpose_is_found_and_the_program_shrunk_to_it(fuzz, plant: str, says: str):
    timeout_s = 2 if plant == "hang" else 30
    done = fuzz("--seed", VICTIM, "--programs", 1, "--plant", plant, "--timeout", timeout_s)
    assert done.code == 1, done.out + done.err
    assert "1 programs, 0 right, 1 wrong" in done.out
    assert re.search(says, done.out), done.out
    (where,) = victims(VICTIM)
    shown = [line for line in done.out.splitlines() if re.match(r" {4,}\d", line)]
    assert shown == [f"  {where}"], done.out
    replay = re.search(r"replay: python -m tests.differential (.*)", done.out)[1].split()
    assert replay[:4] == ["--replay", str(VICTIM), "--steps", str(where.index)]
    assert fuzz(*replay, "--timeout", timeout_s).code == 1


def test_the_program_that_ends_its_job_is_named_and_the_others_run(fuzz):
    count = 40 if FULL else 16
    seeds = [seed for seed in range(VICTIM, VICTIM + count) if generate.world_of(seed).ranks == 3]
    done = fuzz("--seed", VICTIM, "--programs", count, "--ranks", 3, "--no-shrink", "--plant", "crash")
    wrong = [seed for seed in seeds if victims(seed)]
    assert 0 < len(wrong) < len(seeds)
    assert f"{len(seeds)} programs, {len(seeds) - len(wrong)} right, {len(wrong)} wrong" in done.out
    assert set(re.findall(r"--replay (\d+)", done.out)) == set(map(str, wrong))


def test_as_many_steps_are_kept_as_fail_together():
    def failing(choices: list[tuple[int, ...]]) -> list[bool]:
        return [{2, 5} <= set(choice) for choice in choices]

    assert shrunk(range(8), failing) == (2, 5)


def test_a_seed_is_a_program():
    for seed in range(200):
        assert generate.program(seed) == generate.program(seed)
        assert generate.program(seed).ranks == generate.world_of(seed).ranks


def test_everything_is_drawn():
    steps = [step for seed in range(3000) for step in generate.program(seed).steps]
    assert {(step.kind, step.form) for step in steps} == {
        (kind, form) for kind, (_, forms) in generate.KINDS.items() for form in forms
    }
    assert {step.dtype for step in steps} == set(FORMATS)
    drawn = Counter(map(generate.world_of, range(3000)))
    assert set(drawn) == set(generate.WORLDS)
    assert min(drawn.values()) > 100


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
