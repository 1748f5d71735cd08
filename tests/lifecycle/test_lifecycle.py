"""A rank, forked or spawned, is a plain interpreter from its first line to its last."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lifecycle.programs import PROGRAMS
from lifecycle.starts import as_ranks, plainly, written_by
from tools.jobs import TPURUN
from tools.slices import some

# The ranks of each program, the options, how many programs are ranks of one job at a time (its start costs
# more than most of them), and of how many one is run with every change.
STARTS = {
    "forked": (1, [], 60, 3),
    "warm": (1, ["--warm"], 60, 3),
    "spawned": (1, ["--spawn"], 10, 10),
    "four forked": (4, [], 15, 13),
}


def jobs(names: list[str], most: int) -> list[list[str]]:
    """The programs of each job, which have the same variables."""

    def variables(name: str) -> list[tuple[str, str]]:
        return sorted(PROGRAMS[name].env.items())

    alike = [list(group) for _, group in itertools.groupby(sorted(names, key=variables), variables)]
    return [group[start : start + most] for group in alike for start in range(0, len(group), most)]


@pytest.fixture
def warm_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that a test starts are its own, and end with it."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    yield
    subprocess.run([TPURUN, "warm", "--stop"], check=True)


@pytest.mark.usefixtures("warm_servers")
@pytest.mark.parametrize("start", STARTS)
def test_a_rank_is_an_interpreter(tmp_path: Path, start: str):
    ranks, options, most, every = STARTS[start]
    chosen = some(list(PROGRAMS), every)
    ends = plainly(tmp_path / "plain", [PROGRAMS[name] for name in chosen])
    plain, wrong = dict(zip(chosen, ends, strict=True)), []
    for number, names in enumerate(jobs(chosen, most)):
        found = as_ranks(tmp_path / str(number), [PROGRAMS[name] for name in names], ranks, options)
        wrong += [
            f"{name}:\n  plain: {plain[name]}\n  rank:  {end}"
            for name, ends in zip(names, found, strict=True)
            for end in ends
            if end != plain[name]
        ]
    assert not wrong, "\n".join(wrong)


# Programs that must look the same to a shell by themselves and as a job of one rank.
ALONE = ["an interrupt", "bytes on the standard output", "a hook for exceptions that exits", "an abort"]


@pytest.mark.parametrize("name", some(ALONE, 2))
def test_a_job_of_one_rank_ends_as_its_program(tmp_path: Path, name: str):
    plain = written_by([sys.executable], tmp_path / "plain", PROGRAMS[name])
    assert written_by([TPURUN, "-n", "1"], tmp_path / "job", PROGRAMS[name]) == plain


DRAWS = """
import json, random, secrets, tempfile, uuid
import numpy, torch
draws = {
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "numpy's generator": numpy.random.default_rng().random(),
    "torch": torch.rand(1).item(),
    "seed of torch": torch.initial_seed(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "name of a file": tempfile.mktemp(),
    "secret": secrets.token_hex(),
}
print(json.dumps(draws))
"""


def test_each_rank_draws_numbers_of_its_own(run, script):
    """Forked from one process, whose generators they have inherited."""
    done = run("-n", "4", script(DRAWS))
    drawn = [json.loads(done.log(rank)) for rank in range(4)]
    alike = {name for name in drawn[0] if len({one[name] for one in drawn}) < 4}
    assert not alike
