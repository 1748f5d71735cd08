"""Write a flight recorder document as the dump files of PyTorch's flight recorder, one for each rank.

``tpurun trace --format torch -o DIR`` runs ``python -m tpurun.flight_export DIR`` with the document on
stdin; ``torchfrtrace DIR`` reads the files. They are pickles of plain dictionaries, lists, strings and
numbers. Nothing in tpurun reads them.

The keys are those of torch/csrc/distributed/c10d/FlightRecorder.hpp, version 2.10. The format cannot say:
reduce operations and roots; that an operation failed (it stays "scheduled" or "started"); communicators that
some of their ranks have not joined (their members are not known, so they are left out).
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

VERSION = "2.10"
PREFIX = "tpurun_rank_"
# torchfrtrace warns once for every operation of a backend whose name it does not list; this one it does.
LIBRARY = "c10d"

# As c10::toString writes them, and bytes per element.
DTYPES = {
    "bool": ("Bool", 1),
    "u8": ("Byte", 1),
    "i8": ("Char", 1),
    "u16": ("UInt16", 2),
    "i16": ("Short", 2),
    "u32": ("UInt32", 4),
    "i32": ("Int", 4),
    "u64": ("UInt64", 8),
    "i64": ("Long", 8),
    "f16": ("Half", 2),
    "bf16": ("BFloat16", 2),
    "f32": ("Float", 4),
    "f64": ("Double", 8),
    "f8e4m3fn": ("Float8_e4m3fn", 1),
    "f8e5m2": ("Float8_e5m2", 1),
    "f8e4m3fnuz": ("Float8_e4m3fnuz", 1),
    "f8e5m2fnuz": ("Float8_e5m2fnuz", 1),
    "c64": ("ComplexFloat", 8),
    "c128": ("ComplexDouble", 16),
}

Json = dict[str, Any]


def export(flight: Json, directory: Path) -> list[Path]:
    """Write one file per rank into `directory`, which is created, and return their paths.

    Raises FileExistsError when the directory holds anything: torchfrtrace would read that, too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"expected a new or empty directory, given {directory}")
    paths = []
    for rank, dump in dumps(flight).items():
        paths.append(directory / f"{PREFIX}{rank}")
        with open(paths[-1], "wb", opener=_private) as file:
            pickle.dump(dump, file, protocol=2)
    return paths


def dumps(flight: Json) -> dict[int, Json]:
    """Returns the content of each rank's file."""
    groups = _groups(flight)
    pairs = _pairs(flight, groups)
    first = _first_common(flight, groups)
    to_unix_ns = flight["taken_unix_ns"] - flight["taken_ns"]
    by_rank = {}
    for rank in flight["ranks"]:
        entries, config = [], {}
        for lane, record in _in_order(rank):
            key = (rank["rank"], lane["communicator"], record["number"])
            group = pairs.get(key) or groups.get(lane["communicator"])
            if group is None or (record["is_message"] and key not in pairs):
                continue
            if not record["is_message"] and record["seq"] < first[lane["communicator"]]:
                continue
            config[group.name] = group.config()
            entries.append(_entry(len(entries), rank["rank"], group, record, to_unix_ns))
        for index in {lane["communicator"] for lane in rank["lanes"]} & groups.keys():
            config[groups[index].name] = groups[index].config()
        by_rank[rank["rank"]] = {
            "version": VERSION,
            "comm_lib_version": "tpurun",
            "pg_config": config,
            "pg_status": {str(lane["communicator"]): _status(lane) for lane in rank["lanes"]},
            "entries": entries,
        }
    return by_rank


class _Group:
    """A process group as the format names it; `seq` is that of a message that is a group of its own."""

    def __init__(self, index: int, name: str, members: Sequence[int], seq: int | None = None) -> None:
        self.index, self.name, self.members, self.seq = index, name, members, seq
        self.description = "default_pg" if name == "0" else "undefined"

    def config(self) -> dict[str, str]:
        return {"name": self.name, "desc": self.description, "ranks": str(list(self.members))}


def _groups(flight: Json) -> dict[int, _Group]:
    """The communicators whose members are all known, by their index; names are made unique."""
    world = len(flight["ranks"])
    groups, names = {}, set()
    for index, communicator in enumerate(flight["communicators"]):
        members = communicator["members"]
        if communicator["size"] == world:
            members = list(range(world))
        if any(member is None for member in members):
            continue
        name = communicator["name"]
        if name in names:
            name = f"{name}@{communicator['id']}"
        names.add(name)
        groups[index] = _Group(index, name, members)
    return groups


def _in_order(rank: Json) -> list[tuple[Json, Json]]:
    """Returns the operations that a rank has posted, over all its communicators."""
    records = [(lane, record) for lane in rank["lanes"] for record in lane["records"]]
    return sorted(records, key=lambda pair: pair[1]["posted_ns"])


def _first_common(flight: Json, groups: Mapping[int, _Group]) -> dict[int, int]:
    """By communicator the first collective that no ring has lost: before it some would seem missing."""
    first: dict[int, int] = defaultdict(int)
    for lane in (lane for rank in flight["ranks"] for lane in rank["lanes"]):
        kept = [record["seq"] for record in lane["records"] if not record["is_message"]]
        lost = lane["posted"] - len(kept)
        if kept and lost > 0:
            first[lane["communicator"]] = max(first[lane["communicator"]], min(kept))
    return first


def _pairs(flight: Json, groups: Mapping[int, _Group]) -> dict[tuple[int, int, int], _Group]:
    """A group of two for each message: torchfrtrace expects every rank of a group in every operation.

    Messages of one direction and tag do not overtake each other, so the n-th receive got the n-th send. Where
    messages are no longer recorded, or a receive took any source, nobody can tell, and they are left out.
    """
    channels: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    uncountable = set()
    for rank in flight["ranks"]:
        for lane in rank["lanes"]:
            index, own = lane["communicator"], lane["comm_rank"]
            messages = [record for record in lane["records"] if record["is_message"]]
            is_whole = not lane["records"] or lane["records"][0]["number"] == 0
            if not is_whole or any(record["root"] is None for record in messages):
                uncountable.add((index, own))
            for record in messages:
                is_receive = record["operation"] == "recv"
                ends = (record["root"], own) if is_receive else (own, record["root"])
                key = (rank["rank"], index, record["number"])
                channels[(index, *ends, record["tag"])][is_receive].append(key)
    pairs = {}
    for (index, source, destination, tag), (sends, receives) in channels.items():
        if index not in groups or {(index, source), (index, destination)} & uncountable:
            continue
        members = groups[index].members
        if not max(source, destination) < len(members) or source == destination:
            continue
        ends = sorted((members[source], members[destination]))
        name = f"{groups[index].name}:{members[source]}->{members[destination]} tag {tag}"
        for side in (sends, receives):
            for seq, key in enumerate(side):
                pairs[key] = _Group(index, name, ends, seq)
    return pairs


def _entry(number: int, rank: int, group: _Group, record: Json, to_unix_ns: int) -> Json:
    def moment(ns: int | None) -> int | None:
        return None if ns is None else ns + to_unix_ns

    is_done = record["outcome"] == "done"
    seq = record["seq"] if group.seq is None else group.seq
    inputs, outputs = _sizes(record, len(group.members))
    dtype = DTYPES.get(record["dtype"], ("Undefined", 1))[0]
    state = "completed" if is_done else "started" if record["matched_ns"] else "scheduled"
    return {
        "record_id": number,
        "pg_id": group.index,
        "process_group": (group.name, group.description),
        "collective_seq_id": seq,
        "p2p_seq_id": seq if record["is_message"] else 0,
        "op_id": record["number"],
        "profiling_name": f"{LIBRARY}:{_operation(rank, group, record)}",
        "time_created_ns": moment(record["posted_ns"]),
        "input_sizes": inputs,
        "input_dtypes": [dtype] * len(inputs),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": moment(record["matched_ns"]),
        "time_discovered_completed_ns": moment(record["done_ns"]) if is_done else None,
        "duration_ms": (record["done_ns"] - record["posted_ns"]) / 1e6 if is_done else None,
        "retired": record["outcome"] != "pending",
        "timeout_ms": 0,
        "is_p2p": record["is_message"],
        "thread_id": "0",
        "thread_name": "",
        "frames": list(_frames(record["site"])),
    }


def _operation(rank: int, group: _Group, record: Json) -> str:
    """As torchfrtrace parses it: a message names both ends by their ranks in the group."""
    if not record["is_message"]:
        return record["operation"]
    own = list(group.members).index(rank)
    return f"send {own}->{1 - own}" if record["operation"] == "send" else f"recv {own}<-{1 - own}"


def _sizes(record: Json, ranks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Shapes of what goes in and comes out. Recorded are the first tensor's shape and the bytes of all."""
    if record["operation"] == "barrier":
        return [], []
    _, itemsize = DTYPES.get(record["dtype"], ("Undefined", 1))
    count = record["input_bytes"] // itemsize
    shape = record["shape"]
    whole = shape if prod(shape) == count else [count]
    match record["operation"]:
        case "all_gather" | "gather":
            return [whole], [[ranks * count]]
        case "reduce_scatter":
            return [whole], [[count // ranks]]
        case "send":
            return [shape], []
        case "recv":
            return [], [shape]
        case "broadcast" | "scatter":
            # Off the root nothing goes in; the shape is that of the result.
            return [shape], [shape]
        case _:
            return [whole], [whole]


def _frames(site: str) -> Iterator[Json]:
    file, _, line = site.rpartition(":")
    if file and line.isdigit():
        yield {"name": "?", "filename": file, "line": int(line)}


def _status(lane: Json) -> dict[str, int]:
    # Number of the last one, -1 while there was none.
    posted, completed = lane["posted"] - 1, lane["completed"] - 1
    return {
        "last_enqueued_collective": posted,
        "last_started_collective": posted,
        "last_completed_collective": completed,
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the document from stdin; 0 when all files are written. The arguments default to the process's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("tpurun.flight_export: expected a directory", file=sys.stderr)
        return 2
    try:
        export(json.load(sys.stdin), Path(arguments[0]))
    except OSError as error:
        print(f"tpurun.flight_export: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
