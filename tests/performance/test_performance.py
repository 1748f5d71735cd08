"""The tools that `make bench` measures with work. These tests do not care how long something took."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from performance import job, mpi
from performance.options import parse
from performance.page import page
from performance.plots import draw
from performance.results import NotResults, Part, Results, load
from performance.settings import COLLECTIVES, PARTS, Settings

COMMAND = [sys.executable, "-m", "tests.performance"]
ENV = {"PYTHONPATH": str(job.ROOT)}
SAMPLE = Path(job.__file__).parent / "sample"
PLOTS = ["collectives-all_reduce.svg", "collectives-barrier.svg", "mpi-broadcast.svg", "start.svg"]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_the_page_of_stored_results():
    """After a change that is meant: python -m tests.performance --from tests/performance/sample/results.json,
    whose performance.md is tests/performance/sample/page.md."""
    assert page(load(SAMPLE / "results.json"), PLOTS) == (SAMPLE / "page.md").read_text()


def test_results_are_stored_as_they_are(tmp_path: Path):
    stored = load(SAMPLE / "results.json")
    assert set(stored.parts) == set(PARTS)
    stored.store(tmp_path / "folder" / "results.json")
    assert (tmp_path / "folder" / "results.json").read_text() == (SAMPLE / "results.json").read_text()


def test_the_same_results_are_the_same_plots(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="`make bench` installs matplotlib")
    results = load(SAMPLE / "results.json")
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert sorted(draw(results, folder)) == PLOTS
        drawn.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert drawn[0] == drawn[1]


def test_a_quick_run_writes_a_page_that_can_be_written_again(run, tmp_path: Path):
    grid = ["--quick", "--parts", "collectives", "--collectives", "all_reduce,barrier", "--ranks", "2"]
    done = run(*grid, "--sizes", "8,1K", "--out", tmp_path / "a", command=COMMAND, env=ENV)
    assert done.code == 0, done.err
    assert "collectives 1/2: all_reduce on 2 ranks" in done.err
    assert ("no plots" in done.err) == (not HAS_MATPLOTLIB)

    rows = load(tmp_path / "a/performance/results.json").parts["collectives"].rows
    assert {(row["collective"], row["bytes"], row["backend"]) for row in rows} == {
        (*case, backend)
        for case in [("all_reduce", 8), ("all_reduce", 1024), ("barrier", 0)]
        for backend in ("tpu_dist", "gloo")
    }
    assert all(row["min_us"] <= row["time_us"] <= row["max_us"] for row in rows)

    stored = tmp_path / "a/performance/results.json"
    again = run("--from", stored, "--out", tmp_path / "b", command=COMMAND, env=ENV)
    assert again.code == 0, again.err
    text = (tmp_path / "a/performance.md").read_text()
    assert "| 1 KiB | 2 |" in text
    assert (tmp_path / "b/performance.md").read_text() == text


@pytest.mark.slice(2)
@pytest.mark.parametrize(("part", "rows"), [("steps", 3), ("waiting", 1), ("overlap", 2), ("floors", 2)])
def test_the_programs_of_ranks_end_well(run, tmp_path: Path, part: str, rows: int):
    done = run("--quick", "--ranks", "2", "--parts", part, "--out", tmp_path, command=COMMAND, env=ENV)
    assert done.code == 0, done.err
    (measured,) = load(tmp_path / "performance/results.json").parts.values()
    assert [row.get("missing") for row in measured.rows] == [None] * rows


def test_parts_of_another_machine_are_not_kept(run, tmp_path: Path):
    Results({"CPU": "another"}, {"start": Part("command", [])}).store(tmp_path / "performance/results.json")
    grid = ["--quick", "--parts", "collectives", "--collectives", "barrier", "--ranks", "2"]
    assert run(*grid, "--out", tmp_path, command=COMMAND, env=ENV).code == 0
    assert set(load(tmp_path / "performance/results.json").parts) == {"collectives"}


@pytest.mark.parametrize("implementation", mpi.IN_C, ids=lambda one: one.name)
def test_a_program_in_c_checks_and_measures(implementation: mpi.Mpi | mpi.Engine):
    if implementation.missing:
        pytest.skip(implementation.missing)
    for collective, size in [*((name, "96") for name in COLLECTIVES[:-1]), ("barrier", "0")]:
        command = implementation.collectives(2, collective, "0.001", size)
        with job.Job(command) as measuring:
            rows = list(measuring.rows(limit_s=20))
        memories = ["staged", "mapped"] if implementation is mpi.ENGINE else ["staged"]
        assert [row["memory"] for row in rows] == memories
        for row in rows:
            assert (row["collective"], row["bytes"], row["ranks"]) == (collective, int(size), 2)
            assert 0 < row["min_us"] <= row["time_us"] <= row["max_us"]


def test_a_job_that_is_late_is_ended_with_all_it_started(monkeypatch):
    monkeypatch.setattr(job, "START_S", 10)
    with job.Job(["sh", "-c", "echo '{}'; setsid sleep 100 & wait"]) as measuring:
        found = measuring.rows(limit_s=0.05)
        assert next(found) == {}
        with pytest.raises(job.Late):
            next(found)
    assert job.processes(measuring.name) == []


def test_a_job_that_fails_says_why(capsys):
    script = "echo before >&2; echo it is an error: no >&2; echo after >&2; exit 3"
    with (
        job.Job(["sh", "-c", script]) as failing,
        pytest.raises(job.Failed, match=r"^sh ended with 3: it is an error: no$"),
    ):
        list(failing.rows(limit_s=10))
    assert capsys.readouterr().err == "before\nit is an error: no\nafter\n"


def test_sizes_are_whole_elements_for_each_rank():
    settings = Settings(sizes=(8, 1024, 1026))
    assert settings.sizes_of("all_reduce", 64) == {8: 8, 1024: 1024}
    assert settings.sizes_of("all_gather", 64) == {256: 8, 1024: 1024}
    assert settings.sizes_of("barrier", 64) == {0: 8}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--parts colectives", "argument --parts: expected some of collectives, mpi, steps, start, waiting, "
            "overlap, floors, given 'colectives'"),
        ("--collectives gather", "argument --collectives: expected some of all_reduce, all_gather, "
            "reduce_scatter, all_to_all, broadcast, barrier, given 'gather'"),
        ("--ranks 2,1", "argument --ranks: expected numbers of 2 to 1024 ranks, given '1'"),
        ("--sizes 8,x", "argument --sizes: expected a size such as 8, 64K or 1M, given 'x'"),
        ("--seconds 0", "argument --seconds: expected seconds up to 3600, given '0'"),
        ("--from a.json --quick", "expected --from or what to measure, given --from and --quick"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(arguments: str, text: str, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"tests.performance: {text}\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": {}, "parts": {"start": {"rows": []}}}'])
def test_another_file_is_not_taken_for_results(text: str, tmp_path: Path):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(NotResults, match=r"expected a results\.json of this command, given .*some\.json"):
        load(path)


def test_unknown_parts_are_named(tmp_path: Path):
    path = tmp_path / "some.json"
    path.write_text(json.dumps({"machine": {}, "parts": {"more": {"command": "", "rows": []}}}))
    with pytest.raises(NotResults, match=r"expected the parts collectives, .*, given more: "):
        load(path)
