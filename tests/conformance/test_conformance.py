"""A bounded part of `make conformance`: PyTorch's base suite, and some of its tests under every launcher."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conformance import start
from conformance.page import page
from conformance.plan import FAILED, PASSED, SKIPPED, Outcome, Plan, together
from conformance.results import Result, Run, read_all
from tools.slices import FULL, some

ROOT = Path(__file__).parents[2]
LIMIT_S = 280
# Tests of the base suite: one or two of every kind, and some whose ranks keep their processes.
SOME = [
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_full_group_max",
    "test_all_to_all_single_unequal_split_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo",
    "test_broadcast_full_group",
    "test_DistributedDataParallelCPU",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_full_group_max",
    "test_reduce_group_sum",
    "test_send_recv_any_source",
]


def conformance(*arguments: str) -> Counter[str]:
    """How many tests ended in which way; prints what did not pass."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.conformance", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    kinds = Counter(line.split(maxsplit=1)[0] for line in run.stdout.splitlines() if " s  " in line)
    print("\n".join(line for line in run.stdout.splitlines() if not line.startswith((PASSED, SKIPPED))))
    assert run.returncode == (1 if kinds[FAILED] else 0), run.stdout[-2000:]
    return kinds


def test_base_suite() -> None:
    passed = [test for run in runs("c10d", "fork") for test in run.passed]
    chosen = some(passed, 5)
    kinds = conformance("--suites", "c10d", *([] if FULL else chosen))
    assert kinds[FAILED] == 0
    # The number that pass may only grow: a test that comes to be skipped is lost as surely as one that fails.
    assert kinds[PASSED] >= len(chosen)


def test_helpers() -> None:
    chosen = some(
        [test for suite in ("helpers", "fsdp") for run in runs(suite, "fork") for test in run.passed], 2
    )
    kinds = conformance("--suites", "helpers,fsdp", *([] if FULL else chosen))
    assert kinds[FAILED] == kinds[SKIPPED] == 0
    assert kinds[PASSED] >= len(chosen)


@pytest.mark.parametrize("launcher", some(["tpurun", "spawn", "torchrun"], 3))
def test_under_launchers(launcher: str) -> None:
    chosen = some(SOME, 3)
    kinds = conformance("--suites", "c10d", "--starts", launcher, *chosen)
    assert kinds[FAILED] == 0
    assert kinds[PASSED] >= len(chosen)


def runs(suite: str, method: str) -> list[Run]:
    """Those of docs/conformance.md."""
    result = Result.read(ROOT / "docs" / "conformance" / f"{suite}.json")
    return [run for run in result.runs if (run.start, run.debug) == (method, "OFF")]


def test_the_page_is_that_of_its_results() -> None:
    results = read_all(ROOT / "docs" / "conformance")
    assert (ROOT / "docs" / "conformance.md").read_text() == page(results)
    for result in results:
        for run in result.runs:
            assert not run.failed, f"{result.suite} under {run.start}: {list(run.failed)}"


def test_a_failure_is_a_failure() -> None:
    passed, skipped = Outcome("t", PASSED), Outcome("t", SKIPPED, "no GPU")
    assert together("t", [passed, passed]).kind == PASSED
    assert together("t", [skipped, skipped]) == skipped
    assert together("t", [passed, Outcome("t", FAILED, "why")]) == Outcome("t", FAILED, "rank 1: why")
    assert "rank 1 skipped" in together("t", [passed, skipped]).text
    run = Run.of("make", "fork", 4, "OFF", [passed, skipped, Outcome("u", FAILED, "why")])
    assert run.counts() == {PASSED: 1, FAILED: 1, SKIPPED: 1}
    text = page([Result("c10d", "here", "2.15.0", runs=[run])])
    assert "| `u` | fork |" in text


def test_a_job_that_ends_in_a_test_fails_that_test_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for a launcher whose ranks die in their second test.
    job = "import sys; from conformance.plan import *; plan = Plan.read(Path(sys.argv[1]));"
    job += "plan.outcomes.open('a').write(''.join(Outcome(test, PASSED).line() for test in plan.tests[:1]));"
    job += "print('last words'); sys.exit(7 if plan.tests[1:] else 0)"
    monkeypatch.setitem(start.STARTS, "fork", lambda plan: [sys.executable, "-c", job, str(plan.path)])
    plan = Plan(tmp_path, "c10d", 2, ["a", "b", "c"])
    outcomes = list(start.outcomes(plan, "fork"))
    assert [(one.test, one.kind) for one in outcomes] == [("a", PASSED), ("b", FAILED), ("c", PASSED)]
    assert "ended with 7" in outcomes[1].text
    assert "last words" in outcomes[1].text
    assert json.loads(plan.path.read_text())["tests"] == ["a", "b", "c"]
