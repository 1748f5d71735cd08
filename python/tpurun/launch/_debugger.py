"""Debuggers in ranks: the prompt of :mod:`pdb` takes the terminal that the job was started from.

The standard input of all ranks but one is empty, so a prompt would read its end and the rank would quit. A
debugger uses the launcher's terminal instead, past the lines of the other ranks. It has the terminal alone:
a second rank that stops waits until the first one goes on. A rank whose standard input is a pipe or a file
reads its answers there, as under plain Python.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from types import FrameType, ModuleType
from typing import Any, TextIO

from tpurun._imports import after_import

_has_told = False


def prepare() -> None:
    """Changes pdb now, or when the program imports it."""
    after_import("pdb", _change)


def _change(pdb: ModuleType) -> None:
    debugger = pdb.Pdb
    if hasattr(debugger, "_tpurun_terminal"):
        return
    # The terminal that a debugger reads from and has a lock on. Both streams of a debugger are this one open
    # terminal.
    debugger._tpurun_terminal = None
    begin, set_trace, interaction = debugger.__init__, debugger.set_trace, debugger.interaction
    set_continue, set_quit = debugger.set_continue, debugger.set_quit

    def __init__(
        self: Any, completekey: str = "tab", stdin: Any = None, stdout: Any = None, *rest: Any, **options: Any
    ) -> None:
        terminal = _open_terminal() if stdin is None and stdout is None and _is_of_terminal() else None
        if terminal is not None:
            stdin, stdout = terminal
            if len(rest) < 2:
                # Else Ctrl-C, which ends the job, would lead to another prompt.
                options.setdefault("nosigint", True)
        begin(self, completekey, stdin, stdout, *rest, **options)
        if terminal is not None:
            self._tpurun_terminal = stdin
            self.prompt = f"(rank {os.environ.get('RANK', '?')}) {self.prompt}"

    def set_trace_or_go_on(self: Any, frame: FrameType | None = None, **options: Any) -> None:
        if self._tpurun_terminal is None and self.stdin is sys.stdin and _is_without_stdin():
            return _tell()
        return set_trace(self, sys._getframe(1) if frame is None else frame, **options)

    def interaction_alone(self: Any, *arguments: Any, **options: Any) -> Any:
        if self._tpurun_terminal is not None:
            fcntl.flock(self._tpurun_terminal, fcntl.LOCK_EX)
        return interaction(self, *arguments, **options)

    def give_back(self: Any) -> None:
        if self._tpurun_terminal is not None:
            fcntl.flock(self._tpurun_terminal, fcntl.LOCK_UN)

    def continue_without(self: Any) -> Any:
        give_back(self)
        return set_continue(self)

    def quit_without(self: Any) -> Any:
        give_back(self)
        return set_quit(self)

    debugger.__init__, debugger.interaction = __init__, interaction_alone
    debugger.set_trace = set_trace_or_go_on
    debugger.set_continue, debugger.set_quit = continue_without, quit_without


def _open_terminal() -> tuple[TextIO, TextIO] | None:
    """The launcher's terminal to read from and to write to; it must not become that of our session."""
    path = os.environ.get("TPURUN_TERMINAL")
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if not os.isatty(fd):
        os.close(fd)
        return None
    return open(fd), open(os.dup(fd), "w", buffering=1)


def _is_of_terminal() -> bool:
    """Whether the answers of a debugger come from a terminal, or from nowhere."""
    return _is_without_stdin() or os.isatty(0)


def _is_without_stdin() -> bool:
    """Whether standard input is closed, or the empty device."""
    try:
        status = os.fstat(0)
    except OSError:
        return True
    null = os.stat(os.devnull)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == null.st_rdev


def _tell() -> None:
    global _has_told
    if _has_told:
        return
    _has_told = True
    rank = os.environ.get("RANK", "?")
    print(
        f"tpurun: rank {rank} goes on past its breakpoint: expected a terminal, given none "
        f"(--stdin-rank {rank} sends it the answers that tpurun reads)",
        file=sys.stderr,
        flush=True,
    )
