"""Runs a function in forked processes that are the ranks of one process group."""

import functools
import os
import pickle
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 60.0  # for a whole test: far above what any needs, far below a person's patience
TIMEOUT = timedelta(seconds=30)


@dataclass
class Rank:
    pid: int
    pipe: int
    report: bytes = b""
    status: int = 0  # as waitpid gives it


def run(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str = "tpu_dist",
    timeout: timedelta = TIMEOUT,
    limit_s: float = LIMIT_S,
    prepare: Callable[[], Any] = lambda: None,
) -> list[Any]:
    """Call ``body(*args)`` on every rank of a new world; returns what it returned, by rank. `prepare` comes
    before the world."""
    with tempfile.TemporaryDirectory() as folder:
        meeting_place = f"file://{folder}/store"

        def ranked(rank: int) -> Any:
            prepare()
            dist.init_process_group(
                backend, init_method=meeting_place, rank=rank, world_size=size, timeout=timeout
            )
            result = body(*args)
            if dist.is_initialized():
                dist.destroy_process_group()
            return result

        return fork(size, ranked, limit_s)


def fork(size: int, body: Callable[[int], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """Call ``body(rank)`` in forked processes without a process group."""
    ranks = [_start(rank, body) for rank in range(size)]
    try:
        _collect(ranks, limit_s)
    finally:
        for rank in ranks:
            _end(rank)
    reports = [
        pickle.loads(rank.report) if rank.report else (False, f"it died: {_end_of(rank.status)}")
        for rank in ranks
    ]
    failures = [f"rank {index}: {value}" for index, (ok, value) in enumerate(reports) if not ok]
    if failures:
        raise AssertionError("\n".join(failures))
    return [value for _, value in reports]


def fork_some(
    size: int, returning: Collection[int], body: Callable[[int, str], Any], limit_s: float = LIMIT_S
) -> dict[int, Any]:
    """Call ``body(rank, folder)`` in forked processes; what those that must return returned, by rank.

    The others may die or hang: in the end they are killed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, lambda rank: body(rank, folder)) for rank in range(size)]
        try:
            _collect([ranks[rank] for rank in returning], limit_s)
        finally:
            for rank in ranks:
                _end(rank)
    reports = {
        rank: pickle.loads(ranks[rank].report) if ranks[rank].report else (False, "it died")
        for rank in returning
    }
    failures = [f"rank {rank}: {value}" for rank, (ok, value) in reports.items() if not ok]
    if failures:
        raise AssertionError("\n".join(failures))
    return {rank: value for rank, (_, value) in reports.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(rank: int, body: Callable[[int], Any]) -> Rank:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(write)
        return Rank(pid, read)
    # The child: whatever happens, pytest's own code must not run on in here.
    try:
        os.close(read)
        try:
            report = pickle.dumps((True, body(rank)))
        except BaseException:
            report = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(write, "wb") as pipe:
            pipe.write(report)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _collect(ranks: list[Rank], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [index for index, rank in enumerate(ranks) if not rank.report]
                raise AssertionError(f"ranks {late} were not done after {limit_s:.0f} s")
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 20)
                key.data.report += piece
                if not piece:
                    selector.unregister(key.fd)


def _end(rank: Rank) -> None:
    os.close(rank.pipe)
    if not rank.report:
        os.kill(rank.pid, signal.SIGKILL)
    _, rank.status = os.waitpid(rank.pid, 0)


def _end_of(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"status {code}" if code >= 0 else signal.Signals(-code).name


def on_device(memory: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Has a test run in a process of its own that has claimed the device, with so much memory."""

    def of(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def forked(*args: Any, **kwargs: Any) -> None:
            def body(_rank: int) -> None:
                os.environ.update(TPURUN_HBM=memory, LOCAL_WORLD_SIZE="2")
                torch.manual_seed(0)
                # In two parts: to import a module that names the device is to claim it, here before the fork.
                getattr(torch, "t" + "pu").init()
                test(*args, **kwargs)

            fork(1, body)

        return forked

    return of


def failure_of(call: Callable[[], Any]) -> BaseException:
    """The exception that the call raises; to not raise one is a failure of the test."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("expected an exception, got none")


def here(offset: int = 0) -> str:
    """The call site of the caller's line, as messages show it."""
    frame = sys._getframe(1)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno + offset}"
