"""A rank's marks go onto the board, once each, and nowhere else."""

import os
import struct
import time

import pytest

from tpurun import _marks


@pytest.fixture
def board(monkeypatch):
    """A file of the board's name, as a rank inherits it."""
    fd = os.memfd_create("tpurun-board")
    os.ftruncate(fd, 256)
    monkeypatch.setattr(_marks, "_reached", set())
    monkeypatch.setenv("TPURUN_BOARD_FD", str(fd))
    monkeypatch.setenv("TPURUN_MARKS_AT", "64")
    monkeypatch.delenv("TPURUN_RANK_PID", raising=False)
    yield fd
    os.close(fd)


def words(fd: int) -> dict[int, int]:
    """Returns the words that are written, by their offset in bytes."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    return {8 * index: word for index, (word,) in enumerate(struct.iter_unpack("=Q", data)) if word}


def test_each_step_is_marked_the_first_time(board):
    before = time.monotonic_ns()
    _marks.reach(_marks.SCRIPT_ENTERED)
    entered = words(board)
    _marks.reach(_marks.SCRIPT_ENTERED)
    _marks.reach(_marks.GROUP_CREATED)
    after = words(board)
    assert list(after) == [64, 72] and list(entered) == [64]
    assert before <= entered[64] == after[64] <= after[72] <= time.monotonic_ns()


def test_a_process_that_is_not_the_rank_marks_nothing(board, monkeypatch):
    monkeypatch.setenv("TPURUN_RANK_PID", str(os.getppid()))
    _marks.reach(_marks.SCRIPT_ENTERED)
    assert words(board) == {}


def test_another_file_under_the_number_is_left_alone(board, monkeypatch, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(256))
    with path.open("r+b") as file:
        monkeypatch.setenv("TPURUN_BOARD_FD", str(file.fileno()))
        _marks.reach(_marks.SCRIPT_ENTERED)
        assert words(file.fileno()) == {}


@pytest.mark.parametrize(("name", "value"), [("BOARD_FD", "x"), ("BOARD_FD", "-1"), ("MARKS_AT", "")])
def test_what_is_no_board_does_no_harm(board, monkeypatch, name: str, value: str):
    monkeypatch.setenv(f"TPURUN_{name}", value)
    _marks.reach(_marks.GROUP_CREATED)
    monkeypatch.delenv(f"TPURUN_{name}")
    _marks.reach(_marks.SCRIPT_ENTERED)
    assert words(board) == {}
