"""The flight recorder of jobs with compiled programs: runs around and between the collectives of a rank."""

import json
from collections.abc import Iterator
from pathlib import Path

from tools.protobuf import fields, wire

# Rank 0 waits in its last step for a rank that will not come.
PROGRAM = """
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from tpurun.compile import _counters

dist.init_process_group()
rank = dist.get_rank()
torch.tpu.init()

def step(x):
    total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return total.sigmoid() + x

def alone(x):
    return (x - 1).tanh()

step, alone = torch.compile(step), torch.compile(alone)
x = torch.ones(4, 4, device="tpu")
for _ in range(3):
    x = step(x)
    dist.all_reduce(x)
shared = {program.fingerprint() for program in _counters._all}
if rank == 1:
    alone(x)
own = {program.fingerprint() for program in _counters._all} - shared
print(*(f"{one:016x}" for one in shared), "|", *(f"{one:016x}" for one in own), flush=True)
dist.barrier(device_ids=[0])
if rank == 1:
    raise ValueError("on purpose")
step(x)
"""
STEP, ALONE = ("step", 5, "program.py:12"), ("alone", 2, "program.py:16")
# The programs of each rank, and what it does after three steps.
RUNS = {0: [STEP] * 4, 1: [STEP] * 3 + [ALONE]}
REST = {0: ["barrier", "done", "run", "all_reduce"], 1: ["run", "end", "barrier", "done"]}


def happened(rank: dict) -> list[str]:
    """Everything that a rank has begun and ended, in the order of the times."""
    moments = []
    for run in rank["runs"]:
        moments += [(run["begun_ns"], "run"), (run["done_ns"], "end")]
    for record in (record for lane in rank["lanes"] for record in lane["records"]):
        moments += [(record["posted_ns"], record["operation"]), (record["done_ns"], "done")]
    return [what for _, what in sorted((at, what) for at, what in moments if at is not None)]


def slices(trace: bytes) -> Iterator[tuple[str, str, int, int | None]]:
    """Rank, program, begin and end of each run in a trace for Perfetto."""
    packets = [fields(packet) for _, packet in wire(trace)]
    # As in test_status.py: TracePacket, TrackDescriptor and TrackEvent by the numbers of their fields.
    tracks = [fields(packet[60][0]) for packet in packets if 60 in packet]
    ranks = {track[1][0]: fields(track[3][0])[6][0].decode() for track in tracks if 3 in track}
    programs = {
        track[1][0]: (ranks[track[5][0]], track[2][0].decode())
        for track in tracks
        if track.get(2, [b""])[0].startswith(b"program ")
    }
    begun: dict[int, int] = {}
    for packet in packets:
        event = fields(packet[11][0]) if 11 in packet else {}
        track = event[11][0] if event else None
        if track not in programs:
            continue
        if event[9][0] == 1:
            arguments = [fields(one)[10][0].decode() for one in event[4]]
            assert arguments == ["program", "site", "operations", "run"]
            begun[track] = packet[8][0]
        else:
            yield *programs[track], begun.pop(track), packet[8][0]
    yield from ((*programs[track], at, None) for track, at in begun.items())


def test_programs_are_seen_around_and_between_the_collectives(run, script):
    done = run("-n", "2", script(PROGRAM))
    assert done.code == 1, done.err
    fingerprints = dict(zip(("step", "alone"), done.log(1).splitlines()[0].split(" | "), strict=True))
    flight = json.loads((done.run_dir / "flight" / "flight.json").read_text())
    for rank in flight["ranks"]:
        number, runs = rank["rank"], rank["runs"]
        wanted = [(fingerprints[name], operations, line) for name, operations, line in RUNS[number]]
        assert [(run["program"], run["operations"], run["line"]) for run in runs] == wanted
        assert [run["outcome"] == "done" for run in runs] == [True] * 3 + [number == 1]
        steps = ["run", "all_reduce", "done", "end", "all_reduce", "done"] * 3
        assert happened(rank)[: len(steps) + 4] == steps + REST[number]
    check_trace(flight, done.run_dir / "flight" / "trace.perfetto-trace")


def check_trace(flight: dict, path: Path) -> None:
    """Raises unless the trace for Perfetto shows the runs that the document has."""
    wanted = [
        (f"rank {rank['rank']}", f"program {run['program']} {run['line']}", run["begun_ns"], run["done_ns"])
        for rank in flight["ranks"]
        for run in rank["runs"]
    ]
    assert sorted(slices(path.read_bytes()), key=str) == sorted(wanted, key=str)
