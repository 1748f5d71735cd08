"""Compiled functions that are not the same on all ranks.

Collectives of compiled programs match at run time, like any other. Where those of all ranks agree, however
different the programs are, results are right. Where they do not, all members of the group learn it, with the
line of each side. Each scenario runs on the world, on sub-groups and on overlapping groups.
"""

import re
import textwrap

import pytest

from tools.compiling import BACKEND, KNOWS_LINES

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tpurun.errors import CollectiveMismatchError

GROUPS = {"world": [[0, 1, 2, 3]], "sub-groups": [[0, 1], [2, 3]], "overlapping": [[0, 1, 2], [1, 2, 3]]}
where, backend = sys.argv[1:]
dist.init_process_group()
rank = dist.get_rank()
groups = [(ranks, dist.new_group(ranks)) for ranks in GROUPS[where]]
mine = [group for ranks, group in groups if rank in ranks]


def as_it_is(function):
    return function


def compiled(function):
    return torch.compile(function, backend=backend)


def is_guilty(step):
    return rank == 2 and step > 1

"""
RIGHT = """
ours, plain = make(compiled), make(as_it_is)
for step in range(4):
    for group in mine:
        x = torch.arange(48.0).view(12, 4).to("tpu") / 10 + rank + step
        found, wanted = ours(x.clone(), group, step), plain(x.clone(), group, step)
        assert torch.equal(found, wanted), f"step {step}: expected {wanted}, got {found}"
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
print("right")
"""
WRONG = """
ours = make(compiled)
try:
    for step in range(4):
        for group in mine:
            ours(torch.arange(48.0).view(12, 4).to("tpu") + rank, group, step).sum().item()
except CollectiveMismatchError as error:
    assert step == 2, f"in step {step}"
    print(f"<<<{error}>>>")
    assert isinstance(error, dist.DistBackendError)
"""
UNCAUGHT = """
ours = make(compiled)
for step in range(4):
    for group in mine:
        ours(torch.arange(48.0).view(12, 4).to("tpu") + rank, group, step).sum().item()
"""

# `COLLECTIVE` makes `y` of `x`; where ranks are to disagree, the first one is another one on one rank.
SCENARIOS = {
    "no divergence": """
        def make(compiled):
            def function(x, group, step):
                x = x.sin() * 2
                COLLECTIVE
                return y.cos() + 1
            return compiled(function)
    """,
    "an operation of one rank": """
        def make(compiled):
            def function(x, group, step):
                x = x.tanh() if rank == 1 else x * 3
                COLLECTIVE
                return y + rank
            return compiled(function)
    """,
    "after some steps": """
        def make(compiled):
            def function(x, group, step):
                if step > 1 and rank == 2:
                    x = x.relu() * 5
                COLLECTIVE
                return y.sin()
            return compiled(function)
    """,
    "one rank compiles again": """
        def make(compiled):
            def inner(x, weights, group, step):
                x = x * weights.sum()
                COLLECTIVE
                return y + weights.shape[0]
            function = compiled(inner)
            def sized(x, group, step):
                return function(x, torch.ones(step + 2 if rank == 1 else 3, 2, device="tpu"), group, step)
            return sized
    """,
    "a graph break of one rank": """
        def make(compiled):
            def function(x, group, step):
                x = x.sin()
                if rank == 2:
                    torch._dynamo.graph_break()
                COLLECTIVE
                if rank == 2:
                    torch._dynamo.graph_break()
                x = x + y.sum()
                COLLECTIVE
                return y * 2
            return compiled(function)
    """,
    "a last frame without a collective": """
        def make(compiled):
            def function(x, group, step):
                COLLECTIVE
                if rank != 0:
                    torch._dynamo.graph_break()
                return y.cos() * 2
            return compiled(function)
    """,
    "split on some ranks": """
        def make(compiled):
            def first(x, group, step):
                COLLECTIVE
                return y * 2
            def second(x, before, group):
                x = x.cos() + before.sum()
                COLLECTIVE
                return y
            def composed(x, group, step):
                return second(x, first(x, group, step), group)
            if rank % 2:
                return compiled(composed)
            parts = compiled(first), compiled(second)
            def split(x, group, step):
                return parts[1](x, parts[0](x, group, step), group)
            return split
    """,
    "nested": """
        def make(compiled):
            @compiled
            def inner(x, group, step):
                COLLECTIVE
                return y.sin()
            def outer(x, group, step):
                return inner(x * 2, group, step) + inner(x + 1, group, 0)
            # Half of the ranks compile the inner function alone.
            return compiled(outer) if rank % 2 else outer
    """,
}
WHERE = ("world", "sub-groups", "overlapping")
COLLECTIVES = {
    "all_reduce": "y = funcol.all_reduce(x, 'sum', group)",
    "all_gather": "y = funcol.all_gather_tensor(x, 0, group)",
    "reduce_scatter": "y = funcol.reduce_scatter_tensor(x, 'sum', 0, group)",
    "in place": "y = x.clone(); dist.all_reduce(y, group=group)",
}
# How the collective of one rank differs.
DIFFERENCES = {
    "shape": lambda kind: (
        COLLECTIVES[kind].replace("(x,", "(x[:, :2],").replace("x.clone()", "x[:6].clone()")
    ),
    "operation": lambda kind: COLLECTIVES["all_gather" if kind != "all_gather" else "all_reduce"],
}
# The members of the first group with a rank that is guilty.
MEMBERS = {"world": [0, 1, 2, 3], "sub-groups": [2, 3], "overlapping": [0, 1, 2]}


def program(scenario: str, kind: str, end: str, guilty: str | None = None) -> str:
    text = textwrap.dedent(SCENARIOS[scenario])
    first = re.search("^( *)COLLECTIVE$", text, re.MULTILINE)
    usual = COLLECTIVES[kind]
    if guilty is not None:
        lines = ["if is_guilty(step):", f"    {guilty}  # guilty", "else:", f"    {usual}  # usual"]
        text = text.replace(first[0], textwrap.indent("\n".join(lines), first[1]), 1)
    return PROGRAM + text.replace("COLLECTIVE", usual) + end


# Ranks find in the process they are forked from what they would import.
WORDS = ("-n", "4", "--device", "tpu", "--preload", "torch._dynamo")


@pytest.mark.slice(12)
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_programs_may_differ(run, script, scenario: str, where: str, kind: str):
    done = run(*WORDS, script(program(scenario, kind, RIGHT)), where, BACKEND)
    assert done.code == 0, done.err
    assert [done.log(rank).splitlines()[-1:] for rank in range(4)] == [["right"]] * 4, done.out


@pytest.mark.slice(24)
@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_collectives_may_not(run, script, scenario: str, where: str, kind: str, difference: str):
    text = program(scenario, kind, WRONG, DIFFERENCES[difference](kind))
    done = run(*WORDS, script(text), where, BACKEND)
    said = [re.search("<<<(.*)>>>", done.log(rank), re.DOTALL) for rank in MEMBERS[where]]
    assert all(said), done.out + done.err
    assert len({one[1] for one in said}) == 1, "ranks were told different things"
    for side in ("usual", "guilty"):
        assert place_of(text, side) in said[0][1], said[0][1]


def place_of(text: str, side: str) -> str:
    """The line of one side, as messages name it."""
    if not KNOWS_LINES:
        return "program.py:"
    lines = text.splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {side}"))
    return f"program.py:{number}"


@pytest.mark.parametrize("scenario", ["after some steps", "nested"])
def test_the_job_ends_and_names_the_guilty_rank(run, script, scenario: str):
    text = program(scenario, "all_reduce", UNCAUGHT, DIFFERENCES["shape"]("all_reduce"))
    done = run(*WORDS, script(text), "world", BACKEND)
    assert done.code == 1
    assert done.report.culprit == 2, done.report.text
    assert "CollectiveMismatchError" in done.report.text
    assert place_of(text, "guilty") in done.report.text, done.report.text


def test_each_scenario_can_be_wrong():
    """Guards the table: each has a collective, and each difference is one."""
    for scenario, text in SCENARIOS.items():
        assert "COLLECTIVE" in text, scenario
    for kind, usual in COLLECTIVES.items():
        assert all(change(kind) != usual for change in DIFFERENCES.values()), kind
