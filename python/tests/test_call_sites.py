"""Errors name the line of the program, also where a library made the call, and its function beside it."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
import tpurun

LIBRARY = """
import torch.distributed as dist

def average(tensor):
    return reduced(tensor)

def reduced(tensor):
    dist.all_reduce(tensor)
    return tensor

def call(function, *arguments):
    return function(*arguments)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `glue` as pip installs it."""
    package = tmp_path / "lib" / "python3" / "site-packages" / "glue"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sync.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(package.parent)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "glue"]:
        del sys.modules[name]


def line() -> int:
    """Returns the caller's line number."""
    return inspect.currentframe().f_back.f_lineno


def ranks_differ() -> None:
    from glue import sync

    me = dist.get_rank()
    tensor = torch.ones(3 + me)
    before = line()
    error = ranks.failure_of(lambda: sync.average(tensor))
    assert type(error) is tpurun.CollectiveMismatchError
    assert f"test_call_sites.py:{before + 1}, by glue's reduced" in str(error), str(error)
    assert "sync.py" not in str(error)


def the_program_is_called_back() -> None:
    from glue import sync

    tensor = torch.ones(3 + dist.get_rank())

    def hook() -> None:
        dist.all_reduce(tensor)

    error = ranks.failure_of(lambda: sync.call(hook))
    assert f"test_call_sites.py:{hook.__code__.co_firstlineno + 1}" in str(error), str(error)
    assert "by glue" not in str(error)


def no_program_is_on_the_stack() -> None:
    import threading

    from glue import sync

    tensor = torch.ones(3 + dist.get_rank())
    errors = []

    def keep(arguments: threading.ExceptHookArgs) -> None:
        errors.append(arguments.exc_value)

    threading.excepthook = keep
    thread = threading.Thread(target=sync.average, args=(tensor,))
    thread.start()
    thread.join()
    assert "sync.py:" in str(errors[0]), str(errors[0])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("body", [ranks_differ, the_program_is_called_back, no_program_is_on_the_stack])
def test_the_line_of_the_program_is_named(body) -> None:
    ranks.run(2, body)
