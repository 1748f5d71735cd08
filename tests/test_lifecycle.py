"""A rank, forked or spawned, is a plain interpreter from its first line to its last."""

import itertools
from pathlib import Path

import pytest

from lifecycle.programs import PROGRAMS
from lifecycle.starts import End, as_ranks, plainly
from scale import FULL

STARTS = {
    "forked": (1, []),
    "spawned": (1, ["--spawn"]),
    "four forked": (4, []),
    "four spawned": (4, ["--spawn"]),
}
# Four interpreters of each program take a minute.
SLOW = "four spawned"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    ends = plainly(tmp_path_factory.mktemp("plain"), list(PROGRAMS.values()))
    return dict(zip(PROGRAMS, ends, strict=True))


def jobs() -> list[list[str]]:
    """The programs of each job: those with the same variables together, as each alone takes its time."""
    names = sorted(PROGRAMS, key=lambda name: sorted(PROGRAMS[name].env))
    if FULL:
        return [[name] for name in names]
    return [list(some) for _, some in itertools.groupby(names, lambda name: sorted(PROGRAMS[name].env))]


@pytest.mark.parametrize("start", [start for start in STARTS if FULL or start != SLOW])
def test_a_rank_is_an_interpreter(tmp_path: Path, plain: dict[str, End], start: str):
    ranks, options = STARTS[start]
    wrong = []
    for number, names in enumerate(jobs()):
        found = as_ranks(tmp_path / str(number), [PROGRAMS[name] for name in names], ranks, options)
        wrong += [
            f"{name}:\n  plain: {plain[name]}\n  rank:  {end}"
            for name, ends in zip(names, found, strict=True)
            for end in ends
            if end != plain[name]
        ]
    assert not wrong, "\n".join(wrong)
