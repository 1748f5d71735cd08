"""The dump files for PyTorch's flight recorder: torchfrtrace's own loader and analysis read them."""

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components import builder, config_manager, loader

from tpurun import flight_export

PENDING = {"matched_ns": None, "first_byte_ns": None, "done_ns": None, "outcome": "pending"}


def record(seq: int, operation: str = "all_reduce", **changes: Any) -> dict:
    """One operation of a rank; the first of its lane when its number is not among the changes."""
    return {
        "number": seq,
        "seq": seq,
        "operation": operation,
        "text": f"{operation}#{seq}",
        "is_message": operation in ("send", "recv"),
        "dtype": "f32",
        "reduce_op": "SUM",
        "root": None,
        "tag": 0,
        "count": 8,
        "shape": [8],
        "input_bytes": 32,
        "strategy": "windows",
        "site": "train.py:5",
        "posted_ns": 1000 + seq,
        "matched_ns": 2000 + seq,
        "first_byte_ns": 2000 + seq,
        "done_ns": 3000 + seq,
        "outcome": "done",
    } | changes


def document(*ranks: list[dict], members: list[int | None] | None = None) -> dict:
    """All ranks in one communicator."""
    members = list(range(len(ranks))) if members is None else members

    def lane(rank: int, records: list[dict]) -> dict:
        posted = max((entry["seq"] + 1 for entry in records if not entry["is_message"]), default=0)
        return {
            "communicator": 0,
            "comm_rank": rank,
            "posted": posted,
            "completed": posted,
            "records": records,
        }

    return {
        "format": 1,
        "taken_ns": 9000,
        "taken_unix_ns": 10**18,
        "communicators": [{"id": "ab", "name": "0", "size": len(members), "members": members}],
        "ranks": [
            {"rank": rank, "lanes": [lane(rank, records)] if rank in members else []}
            for rank, records in enumerate(ranks)
        ],
    }


def analyse(flight: dict, directory: Path, caplog: pytest.LogCaptureFixture) -> tuple[Any, str]:
    """Exports the record, and returns what torchfrtrace makes of it and what it says."""
    flight_export.export(flight, directory)
    arguments = config_manager.JobConfig().parse_args([str(directory)])
    logger = logging.getLogger("Flight Recorder")
    with caplog.at_level(logging.INFO, logger=logger.name):
        details, version = loader.read_dir(arguments)
        database = builder.build_db(details, arguments, version)
    return database, "\n".join(caplog.messages)


def test_what_is_well_is_found_well(tmp_path, caplog):
    operations = [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "gather",
        "scatter",
    ]
    records = [record(seq, operation) for seq, operation in enumerate([*operations, "reduce"])]
    records.append(record(8, "barrier", shape=[], input_bytes=0))
    database, said = analyse(document(*[records] * 4), tmp_path / "dump", caplog)
    assert [collective.pass_check for collective in database.collectives] == [True] * 9
    assert "error" not in said and "unrecognized" not in said


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([], "missing ranks: {2}"),
        ([record(1, "broadcast", **PENDING)], "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH"),
        ([record(1, shape=[4], input_bytes=16, **PENDING)], "Culprit rank 2; Error type: SIZE_OR_SYNTAX"),
        ([record(1, dtype="i32", **PENDING)], "Culprit rank 2; Error type: COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_the_rank_that_differs_is_named(last, expected, tmp_path, caplog):
    others = [record(0), record(1, **PENDING)]
    database, said = analyse(document(others, others, [record(0), *last], others), tmp_path / "dump", caplog)
    assert expected in said and "? at train.py:5" in said
    assert database.collectives[0].pass_check


def test_the_format_knows_no_reduce_op(tmp_path, caplog):
    ranks = [[record(0, reduce_op=op, **PENDING)] for op in ("SUM", "MAX")]
    database, _ = analyse(document(*ranks), tmp_path / "dump", caplog)
    assert [collective.pass_check for collective in database.collectives] == [True]


def test_rings_that_have_lost_different_operations_are_cut_alike(tmp_path, caplog):
    ahead = [record(seq) for seq in range(70, 100)]
    behind = [record(seq) for seq in range(64, 100)]
    database, said = analyse(document(ahead, behind), tmp_path / "dump", caplog)
    assert [collective.collective_seq_id for collective in database.collectives] == list(range(70, 100))
    assert "missing" not in said


def test_messages_are_groups_of_two(tmp_path, caplog):
    sends = [record(0), record(0, "send", number=1, root=2), record(1, "send", number=2, root=2)]
    receives = [
        record(0),
        record(0, "recv", number=1, root=0),
        record(1, "recv", number=2, root=0, **PENDING),
    ]
    database, _ = analyse(document(sends, [record(0)], receives), tmp_path / "dump", caplog)
    names = [(collective.collective_name, collective.pass_check) for collective in database.collectives]
    assert names == [("c10d:all_reduce", True), ("c10d:send 0->1", True), ("c10d:send 0->1", True)]
    # After a receive from any source nobody knows which message it took.
    receives[1]["root"] = None
    dumps = flight_export.dumps(document(sends, [record(0)], receives))
    assert all(len(dump["entries"]) == 1 for dump in dumps.values())


def test_groups_of_unknown_members_are_left_out():
    records = [record(0, **PENDING)]
    dumps = flight_export.dumps(document(records, records, [], members=[0, None]))
    assert [(len(dump["entries"]), dump["pg_config"]) for dump in dumps.values()] == [(0, {})] * 3


def test_times_are_told_since_1970(tmp_path):
    paths = flight_export.export(document([record(0)]), tmp_path / "dump")
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600]
    (entry,) = pickle.loads(paths[0].read_bytes())["entries"]
    assert (entry["time_created_ns"], entry["duration_ms"]) == (10**18 - 8000, 0.002)


def test_files_of_others_are_not_mixed_in(tmp_path, capsys):
    (tmp_path / "notes").touch()
    with pytest.raises(FileExistsError, match="expected a new or empty directory"):
        flight_export.export(document([]), tmp_path)
    assert flight_export.main([]) == 2 and "expected a directory" in capsys.readouterr().err
