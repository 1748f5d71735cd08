"""`tpurun --timings`: the steps from the command to the first collective, as a table and as a file."""

import json
import re
from pathlib import Path

import pytest

from tools.jobs import Finished

from .test_bad_input import only_line

# Goes on until the launcher has told its timings, so that it can look at processes that are there.
PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
told = os.path.join(os.environ["TPURUN_RUN_DIR"], "timings.json")
is_told = torch.zeros(1)
while not is_told:
    is_told.fill_(os.path.exists(told))
    dist.broadcast(is_told, 0)
print("done")
"""
FORK_SERVER = ["fork server started", "torch imported", "fork server ready", "store ready"]
OF_RANKS = [
    "ranks started",
    "script entered",
    "group created",
    "first collective called",
    "first collective done",
]


def timings(done: Finished) -> dict:
    return json.loads((done.run_dir / "timings.json").read_text())


def table(done: Finished) -> list[str]:
    """The lines of the table after its title."""
    lines = done.err.splitlines()
    (start,) = [index for index, line in enumerate(lines) if line.startswith("tpurun: timings")]
    rows = lines[start + 1 :]
    end = next((index for index, line in enumerate(rows) if not line.startswith("  ")), len(rows))
    return rows[:end]


def assert_in_order(phases: list[dict]) -> None:
    lasts = [phase["last_s"] for phase in phases]
    assert lasts == sorted(lasts)
    firsts = [phase["first_s"] for phase in phases if phase["ranks"]]
    assert firsts == sorted(firsts)
    assert all(0 <= phase["first_s"] <= phase["last_s"] for phase in phases)


@pytest.mark.slice(2)
@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_every_step_is_told_in_order(run, script, start_method: list[str]):
    done = run("-n", "2", "--timings", *start_method, script(PROGRAM))
    assert done.code == 0, done.err
    told = timings(done)
    assert (told["format"], told["ranks"]) == (1, 2)
    steps = ["command understood", "agent ready", *([] if start_method else FORK_SERVER), *OF_RANKS]
    assert [phase["phase"] for phase in told["phases"]] == steps
    assert [phase["ranks"] for phase in told["phases"]] == [None] * (len(steps) - 5) + [2] * 5
    assert_in_order(told["phases"])
    *rows, summary = table(done)
    for shown, phase in zip(rows, told["phases"], strict=True):
        moments = ["first_s", "last_s"] if phase["ranks"] else ["last_s"]
        numbers = " +".join(f"{phase[moment]:.3f}" for moment in moments)
        assert re.fullmatch(rf"  {phase['phase']} +{numbers} +\d+\.\d{{3}}", shown), (shown, phase)
    assert summary.startswith(f"  2 ranks in {told['phases'][-1]['last_s']:.3f} s: ")
    cost = told["cost"]
    assert cost["cpu_s"] > 0 and f"{cost['cpu_s']:.1f} s of CPU" in summary, summary
    # The front, the agent and the ranks, and the fork server with its store.
    if Path("/proc/self/smaps_rollup").exists():
        assert cost["processes"] == (4 if start_method else 6) and cost["pss_bytes"] > 0, cost
        assert summary.endswith(f"{cost['pss_bytes'] >> 20} MiB (PSS of {cost['processes']} processes)")


FAILS = """
import os
import torch.distributed as dist

if os.environ["RANK"] == "1":
    raise ValueError("before anything")
dist.init_process_group("tpu_dist")
"""


def test_a_job_that_fails_before_says_how_far_it_came(run, script):
    done = run("-n", "2", "--timings", script(FAILS))
    assert (done.code, done.report.culprit) == (1, 1)
    told = timings(done)
    reached = {phase["phase"]: phase["ranks"] for phase in told["phases"]}
    assert list(reached)[-5:] == OF_RANKS
    assert reached["ranks started"] == 2 and reached["script entered"] in (1, 2)
    assert (reached["group created"], reached["first collective done"]) == (0, 0)
    assert_in_order([phase for phase in told["phases"] if phase["ranks"] != 0])
    *rows, summary = table(done)
    assert " ".join(rows[-1].split()) == "first collective done 0 of 2 ranks"
    assert summary.startswith("  ended before every rank had a collective done: "), summary
    assert told["cost"]["pss_bytes"] is None


def test_nobody_has_to_ask_for_the_file(run):
    done = run("-n", "2", "--no-python", "true")
    assert "timings" not in done.err
    told = timings(done)
    assert [phase["phase"] for phase in told["phases"]] == [
        "command understood",
        "agent ready",
        "ranks started",
    ]
    assert told["cost"] is None
    assert_in_order(told["phases"])


def test_the_variable_asks_as_the_option_does(run):
    asked = run("--no-python", "true", env={"TPURUN_TIMINGS": "1"})
    assert table(asked)[-1].startswith("  ended before every rank had a collective done: ")
    assert "timings" not in run("--no-python", "true", env={"TPURUN_TIMINGS": "0"}).err
    refused = run("true", env={"TPURUN_TIMINGS": "maybe"})
    assert only_line(refused).startswith("TPURUN_TIMINGS: expected 1, true, on or yes, or 0, false, ")
    valued = run("--timings=json", "true")
    assert only_line(valued).startswith("unexpected value 'json' for '--timings'")
