"""The launcher can read what became of a rank, whatever exception ended it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpurun import errors, run_rank


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Stop(BaseException):
    @property
    def ranks(self) -> list[int]:
        raise RuntimeError("no ranks")


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def too_deep() -> BaseException:
    try:
        recurse(0)
    except RecursionError as error:
        return error
    raise AssertionError("the recursion ended")


def unreadable() -> BaseException:
    try:
        compile("x = (", "bad.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError("it compiled")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

    def record(error: BaseException) -> dict:
        run_rank.record(error, error.__traceback__)
        text = path.read_bytes()
        assert len(text) < 1 << 20, "the launcher reads no more"
        text.decode("utf-8")
        return json.loads(text)["exception"]

    yield record


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (raised(ValueError("bad \udcff")), "ValueError", r"bad \udcff"),
        (raised(Unprintable()), "Unprintable", "<its text cannot be had: __str__ raised RuntimeError>"),
        (raised(Stop("own")), "Stop", "own"),
        (raised(ValueError("x" * 5_000_000)), "ValueError", "x" * run_rank.MAX_MESSAGE_CHARS),
        (
            raised(ExceptionGroup("several", [ValueError("a"), Unprintable()])),
            "ExceptionGroup",
            "several (2 sub-exceptions)",
        ),
        (too_deep(), "RecursionError", "maximum recursion depth exceeded"),
        (unreadable(), "SyntaxError", "'(' was never closed (bad.py, line 1)"),
    ],
    ids=["surrogate", "no text", "base", "long", "group", "deep", "syntax"],
)
def test_every_exception_is_recorded(recorded, error: BaseException, kind: str, message: str):
    found = recorded(error)
    assert (found["type"], found["message"]) == (kind, message)


def test_the_error_of_the_engine_behind_another_one_is_recorded(recorded):
    lost = errors.RankLostError("rank 2 is gone", ranks=[2])
    outer = ValueError("step failed")
    outer.__cause__ = lost
    engine = recorded(outer)["engine"]
    assert (engine["type"], engine["message"], engine["ranks"]) == ("RankLostError", "rank 2 is gone", [2])
    assert engine["explicit"] and engine["age_ms"] < 60_000
    outer.__cause__, outer.__context__ = None, KeyError("x")
    outer.__context__.__cause__ = lost
    assert not recorded(outer)["engine"]["explicit"]
    outer.__context__ = None
    assert "engine" not in recorded(outer)
    assert recorded(ExceptionGroup("g", [KeyError(1), lost]))["engine"]["ranks"] == [2]
    assert "engine" not in recorded(lost) and recorded(lost)["ranks"] == [2]
