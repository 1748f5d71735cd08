"""Programs as people write them compute what one process computes; `make programs` runs them elsewhere, too."""

import pytest

from programs.case import FAMILIES
from programs.start import Verdict, all_programs, run

PROGRAMS = {program.name: program for program in all_programs()}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """Of one job for all of them: to start it costs more than most of the programs."""
    return {verdict.program.name: verdict for verdict in run(list(PROGRAMS.values()))}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_computes_what_one_process_computes(verdicts: dict[str, Verdict], name: str):
    problems = verdicts[name].problems
    assert not problems, "\n".join(problems)


def test_no_family_is_empty():
    assert {name.partition("/")[0] for name in PROGRAMS} == {*FAMILIES}
