"""`tpurun status` and `tpurun trace`: what they say of jobs that run, hang, fail and have ended, without
asking anybody in the job, and whatever lies on the board."""

import contextlib
import io
import json
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from tools.jobs import LIMIT_S, Finished, Job
from tools.protobuf import fields, wire

PROGRAM = """
import mmap, os, random, signal, sys
import torch
import torch.distributed as dist

what = sys.argv[1]
dist.init_process_group("tpu_dist")
rank, ranks = dist.get_rank(), dist.get_world_size()
pair = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(8))
if rank < 2:
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0, group=pair)
if rank == 0:
    dist.send(torch.ones(4), 1, tag=5)
if rank == 1:
    dist.recv(torch.ones(4), 0, tag=5)
dist.barrier()
if rank == 0:
    print("ready", flush=True)
if what == "hang" and rank == ranks - 1:
    signal.pause()
if what == "mismatch" and rank == ranks - 1:
    dist.all_reduce(torch.ones(16))
if what == "alone" and rank < ranks - 1:
    try:
        dist.all_reduce(torch.ones(8))
    except dist.DistBackendError:
        print("goes on", flush=True)
    signal.pause()
if what in ("error", "alone") and rank == ranks - 1:
    raise ValueError("on purpose")
if what.startswith("scribble") and rank == ranks - 1:
    board = mmap.mmap(int(os.environ["TPURUN_BOARD_FD"]), 0)
    some = random.Random(7)
    # Nothing is read where the size and the version are not right.
    bytes_ = b"\\xff" * (len(board) - 64) if what == "scribble ones" else some.randbytes(len(board) - 64)
    board[64:] = bytes_
    print("scribbled", flush=True)
    signal.pause()
if what == "busy":
    while dist.all_reduce(torch.ones(8)) is None:
        pass
if what != "end":
    dist.all_reduce(torch.ones(8))
dist.destroy_process_group()
"""
RANKS = 4
KEYS = "format job is_running exit ran_ms silent reason taken_unix_ns communicators foreign classes ranks"
RANK_KEYS = (
    "rank pid ranks state ending program group operation strategy outcome site for_ms completed posted "
    "ops_per_s cpu_percent rss_bytes"
)


@pytest.fixture
def job(script: Callable[[str], Path], start: Callable[..., Job]) -> Callable[[str], Job]:
    """Starts the program, which does what it is told once all ranks are ready."""

    def run(what: str) -> Job:
        return start("-n", str(RANKS), script(PROGRAM), what)

    return run


@pytest.fixture
def ask(run: Callable[..., Finished]) -> Callable[..., Finished]:
    """Runs a command of tpurun as somebody in the working directory of a job would."""

    def ask(job: Job, *arguments: str | Path, code: int = 0) -> Finished:
        asked = run(*arguments, env={"TPURUN_RUNS": str(job.cwd / "tpurun-runs")})
        assert asked.code == code, asked.err
        return asked

    return ask


@pytest.fixture
def status(ask: Callable[..., Finished]) -> Callable[..., dict]:
    """Returns a function that runs `tpurun status --json` and returns what it prints."""

    def status(job: Job, *arguments: str) -> dict:
        return json.loads(ask(job, "status", "--json", *arguments).out)

    return status


def until(look: Callable[[], dict], is_it: Callable[[dict], bool]) -> dict:
    """Looks again and again, as a person does."""
    deadline = time.monotonic() + LIMIT_S
    while not is_it(seen := look()):
        assert time.monotonic() < deadline, seen
    return seen


def states(seen: dict) -> list[str]:
    return [rank["state"] for rank in seen["ranks"]]


def test_a_running_job(job, ask, status):
    busy = job("busy")
    busy.read_until("ready")
    seen = until(lambda: status(busy), lambda seen: seen["ranks"][0]["completed"][1] > 100)
    assert set(seen) == set(KEYS.split()) and set(seen["ranks"][0]) == set(RANK_KEYS.split())
    assert (seen["is_running"], seen["exit"], seen["job"]["ranks"]) == (True, None, RANKS)
    groups = {group["name"]: group["members"] for group in seen["communicators"]}
    assert list(range(RANKS)) in groups.values() and [0, 1] in groups.values()
    assert {rank["pid"] for rank in seen["ranks"]} <= set(busy.processes())
    assert all(rank["ops_per_s"] > 1 and rank["rss_bytes"] > 1 << 20 for rank in seen["ranks"])
    assert sum(rank["cpu_percent"] for rank in seen["ranks"]) > 0
    table = ask(busy, "status", "--ranks").out.splitlines()
    assert table[0].startswith(f"{busy.run_dir.name}  running for") and f"{RANKS} ranks" in table[0]
    assert table[2].split()[:2] == ["RANKS", "STATE"] and len(table) == 3 + RANKS
    busy.signal(signal.SIGINT)
    busy.wait()


def test_a_watch_ends_with_the_job(job, start):
    busy = job("busy")
    busy.read_until("ready")
    runs = {"TPURUN_RUNS": str(busy.cwd / "tpurun-runs")}
    watch = start("status", "--json", "--watch=100ms", env=runs)
    watch.read_until('"is_running":true')
    watch.read_until('"is_running":true')
    busy.signal(signal.SIGINT)
    busy.wait()
    pictures = [json.loads(line) for line in watch.wait().out.splitlines()]
    assert [picture["is_running"] for picture in pictures] == [True] * (len(pictures) - 1) + [False]
    assert (pictures[-1]["exit"], pictures[-1]["reason"]) == (128 + signal.SIGINT, "stopped")


def test_a_hung_job_tells_who_is_missing(job, ask, status, tmp_path):
    hung = job("hang")
    hung.read_until("ready")
    seen = until(lambda: status(hung), lambda seen: states(seen).count("waiting") == RANKS - 1)
    waiting, absent = seen["classes"]
    assert (waiting["ranks"], waiting["state"]) == (f"0-{RANKS - 2}", "waiting")
    assert waiting["operation"] == "all_reduce#4 (f32[8], SUM)"
    assert (absent["ranks"], absent["state"], absent["outcome"]) == (str(RANKS - 1), "running", "done")
    assert absent["operation"] == "barrier#3" and absent["posted"][1] == waiting["posted"][0] - 1
    assert waiting["site"].startswith("program.py:")
    # From a process that is stopped, too.
    hung.signal(signal.SIGSTOP, seen["job"]["agent_pid"])
    flight = json.loads(ask(hung, "trace", "--format", "json", "-o", "-").out)
    pending = [record for rank in flight["ranks"] for lane in rank["lanes"] for record in lane["records"]]
    pending = [record for record in pending if record["outcome"] == "pending"]
    assert len(pending) == RANKS - 1 and all(record["done_ns"] is None for record in pending)
    hung.signal(signal.SIGCONT, seen["job"]["agent_pid"])
    said = analyse(ask, hung, tmp_path / "torch")
    assert "Not all ranks joining collective" in said and f"missing ranks: {{{RANKS - 1}}}" in said
    hung.signal(signal.SIGINT)
    hung.wait()
    after = status(hung)
    assert (after["is_running"], after["exit"], after["reason"]) == (False, 130, "stopped")
    assert [row["ranks"] for row in after["classes"]] == [f"0-{RANKS - 2}", str(RANKS - 1)]


def test_a_job_that_ends_well_leaves_no_dump(job, ask, status):
    ended = job("end")
    assert ended.wait().code == 0
    seen = status(ended)
    assert (seen["exit"], seen["reason"]) == (0, "no dump")
    assert [(row["ranks"], row["ending"]) for row in seen["classes"]] == [(f"0-{RANKS - 1}", "exit 0")]
    assert not (ended.run_dir / "flight").exists()
    error = ask(ended, "trace", code=2).err
    assert len(error.splitlines()) == 1 and "left no dump" in error


def test_a_failed_job_keeps_what_was_posted(job, ask, status):
    failed = job("error")
    finished = failed.wait()
    assert finished.report.culprit == RANKS - 1
    assert "tpurun trace " in finished.report.text
    seen = status(failed, failed.run_dir.name[-9:])
    assert (seen["exit"], seen["reason"]) == (1, "failed")
    flight = json.loads((failed.run_dir / "flight" / "flight.json").read_text())
    assert [rank["pid"] for rank in flight["ranks"]] == [rank["pid"] for rank in seen["ranks"]]
    first = flight["ranks"][0]["lanes"][0]["records"][0]
    assert first["posted_ns"] <= first["matched_ns"] <= first["first_byte_ns"] <= first["done_ns"]
    assert (first["text"], first["input_bytes"]) == ("all_reduce#0 (f32[8], SUM)", 32)
    assert first["strategy"] == "windows"
    (path,) = ask(failed, "trace").out.split()
    assert Path(path) == failed.run_dir / "flight" / "trace.perfetto-trace"
    assert (Path(path).stat().st_mode & 0o777, Path(path).parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_each_world_leaves_its_dump(script, run):
    finished = run("-n", str(RANKS), "--max-restarts", "1", script(PROGRAM), "error")
    assert finished.code == 1
    flights = [
        json.loads((finished.run_dir / name / "flight.json").read_text()) for name in ("flight-0", "flight")
    ]
    before, after = ({rank["pid"] for rank in flight["ranks"]} for flight in flights)
    assert len(before) == len(after) == RANKS and not before & after
    assert {event["pid"] for event in finished.events if event["event"] == "rank started"} == before | after


def test_a_job_that_goes_on_keeps_the_failure(script, start, status):
    job = start("-n", str(RANKS), "--on-failure", "continue", script(PROGRAM), "alone")
    job.read_until("goes on")
    seen = status(job)
    assert seen["is_running"] and seen["ranks"][RANKS - 1]["ending"] == "exit 1"
    flight = until(lambda: job.run_dir / "flight" / "flight.json", Path.exists)
    assert json.loads(flight.read_text())["reason"] == "failed"
    job.signal(signal.SIGINT)
    job.wait()


def test_the_trace_has_a_slice_for_each_operation(job, ask):
    failed = job("mismatch")
    assert failed.wait().code != 0
    packets = [
        fields(packet) for _, packet in wire((failed.run_dir / "flight/trace.perfetto-trace").read_bytes())
    ]
    # TracePacket: timestamp 8, track_event 11, track_descriptor 60.
    tracks = [fields(packet[60][0]) for packet in packets if 60 in packet]
    # TrackDescriptor: uuid 1, name 2, process 3, parent_uuid 5; ProcessDescriptor: process_name 6.
    names = {track[1][0]: fields(track[3][0])[6][0].decode() for track in tracks if 3 in track}
    assert sorted(names.values()) == [f"rank {rank}" for rank in range(RANKS)]
    parents = {track[1][0]: names[track[5][0]] for track in tracks if 5 in track}
    depth, flows, open_ = {}, {}, {}
    for packet in packets:
        if 11 not in packet:
            continue
        # TrackEvent: debug_annotations 4, type 9, track_uuid 11, name 23, flow_ids 47.
        event = fields(packet[11][0])
        track, rank = event[11][0], parents[event[11][0]]
        depth[track] = depth.get(track, 0) + (1 if event[9][0] == 1 else -1)
        assert depth[track] >= 0 and packet[8][0] > 0
        if event[9][0] == 1 and 4 in event:
            arguments = {fields(a)[10][0].decode(): fields(a) for a in event[4]}
            name = event[23][0].decode()
            assert name in arguments["operation"][6][0].decode() and arguments["bytes"][3][0] >= 0
            open_[track] = name
            for flow in event.get(47, []):
                flows.setdefault((name.partition("#")[0] in ("send", "recv"), flow), set()).add((rank, name))
    everybody = {f"rank {rank}" for rank in range(RANKS)}
    joined = [{rank for rank, _ in ends} for ends in flows.values()]
    assert joined.count(everybody) >= 5
    assert {("rank 0", "send"), ("rank 1", "recv")} in flows.values()
    # The operation that failed never ends, on any rank.
    stuck = {(parents[track], open_[track]) for track, levels in depth.items() if levels > 0}
    assert stuck == {(rank, "all_reduce#4") for rank in everybody}


def test_torchfrtrace_finds_the_mismatch(job, ask, tmp_path):
    failed = job("mismatch")
    assert failed.wait().code != 0
    said = analyse(ask, failed, tmp_path / "torch")
    assert "Collective sequence number: 4 has errors" in said
    assert f"Culprit rank {RANKS - 1}; Error type: SIZE_OR_SYNTAX_MISMATCH" in said
    assert "program.py" in said


def analyse(ask: Callable[..., Finished], job: Job, directory: Path) -> str:
    """Returns what torchfrtrace says of the dump of a job."""
    ask(job, "trace", "--format", "torch", "-o", directory)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = loader.logger.logger
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            arguments = config_manager.JobConfig().parse_args([str(directory)])
            details, version = loader.read_dir(arguments)
            database = builder.build_db(details, arguments, version)
    finally:
        logger.removeHandler(handler)
    assert len(details) == RANKS and len(database.groups) >= 3
    # Messages and the collectives before the failure are whole.
    assert sum(collective.pass_check for collective in database.collectives) >= 6
    fr_trace.main([str(directory), "-o", str(directory.with_suffix(".db"))])
    return said.getvalue()


@pytest.mark.parametrize("pattern", ["ones", "noise"])
def test_nonsense_on_the_board_breaks_nobody(job, ask, pattern):
    hostile = job(f"scribble {pattern}")
    hostile.read_until("scribbled")
    for arguments in (["status"], ["status", "--json"], ["trace", "--format", "json", "-o", "-"]):
        said = ask(hostile, *arguments).out
        assert "panicked" not in said and not any(ord(c) < 32 and c != "\n" for c in said)
    hostile.signal(signal.SIGINT)
    finished = hostile.wait()
    assert "panicked" not in finished.err
    assert "running" not in ask(hostile, "status").out.splitlines()[0]


def test_wrong_questions_get_one_line(job, ask, run, tmp_path):
    nowhere = run("status", env={"TPURUN_RUNS": str(tmp_path / "none")})
    assert (nowhere.code, len(nowhere.err.splitlines())) == (2, 1) and "no job in" in nowhere.err
    busy = job("busy")
    busy.read_until("ready")
    for arguments, expected in [
        (["status", "1999"], "no job 1999 in"),
        (["status", "./nothing"], "expected the directory of a run"),
        (["status", "--watch=soon"], "--watch: expected a time"),
        (["trace", "--format", "torch", "-o", "-"], "expected a directory"),
        (["trace", "-o", "/nowhere/at/all"], "cannot write /nowhere/at/all"),
    ]:
        error = ask(busy, *arguments, code=2).err
        assert expected in error and len(error.splitlines()) == 1, error
    described = busy.run_dir / "job.json"
    text = described.read_text()
    entry = json.loads(text)
    # A process that has got the number of the agent since is not the agent.
    described.write_text(json.dumps(entry | {"agent_start_ticks": 1}))
    assert "without saying how" in ask(busy, "status").out
    for changed, expected in [
        (entry | {"board_fd": 0}, "is not its board"),
        (entry | {"board_fd": -1}, "cannot look into job"),
        (entry | {"format": 2}, "no job in"),
        (entry | {"job": entry["job"] | {"host": "elsewhere"}}, "host elsewhere"),
    ]:
        described.write_text(json.dumps(changed))
        error = ask(busy, "status", code=2).err
        assert expected in error and len(error.splitlines()) == 1, error
    described.write_text(text)
    busy.signal(signal.SIGINT)
    busy.wait()
