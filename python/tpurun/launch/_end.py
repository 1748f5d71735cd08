"""The end of a forked rank: that of an interpreter, which leaves alone what all ranks of a host share.

An interpreter ends by clearing every module. A forked rank would copy each page of torch for that, and all
ranks do it at once. So the modules of the fork server are taken out of ``sys.modules`` when everything that a
program has registered for its end has run: the interpreter clears the others, the program's own, as ever.
Objects that still live then are held by a module of the fork server, as an attribute or in a registry. Their
finalizers run last, so that a file is written and closed wherever the program has kept it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

# The exit status of an interpreter that could not write what was printed.
UNFLUSHED = 120

# Modules of the fork server, which the ranks share; a rank that has ended its program holds them on.
_shared: dict[str, ModuleType] = {}
_last_shared = ""
# The modules among them that sys.modules held.
_hidden: dict[str, ModuleType] = {}
_is_rank = False
_status = 0
_before_end: Callable[[], None] | None = None


def prepare() -> None:
    """In the fork server, before others register functions for the end: the first one in runs last."""
    atexit.register(_leave_shared_modules)


def share_modules() -> None:
    """In the fork server, once it has imported everything."""
    global _last_shared
    _shared.update(sys.modules)
    _last_shared = next(reversed(sys.modules))


def begin_rank() -> None:
    """In a rank that was just forked."""
    global _is_rank
    _is_rank = True
    _leave_shared_libraries()


def _leave_shared_libraries() -> None:
    """Makes C's ``exit`` stop where it comes to what the libraries of the fork server have registered.

    It calls functions from the last to the first: those that were registered since the fork, with the
    destructors of static objects made since, then these two. The destructors of torch's own libraries take
    half a second in each rank, and take apart only what goes with the process.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    at_exit = libc["__cxa_atexit"]
    at_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    at_exit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)


def leave(status: int, before_end: Callable[[], None] | None = None) -> None:
    """Ends this interpreter with an exit status, as SIGINT ends one for a status of ``-SIGINT``.

    It does so by an exception, which only the interpreter itself may catch. ``before_end`` is called when all
    functions that were registered for the end have run.
    """
    global _before_end, _status
    _before_end = before_end
    _status = status
    if status >= 0:
        raise SystemExit(status)
    # The interpreter ends itself by SIGINT after it has finalised, which other processes see; the program's
    # own traceback is on the screen already.
    sys.excepthook = lambda *error: None
    raise KeyboardInterrupt


def _leave_shared_modules() -> None:
    global _status
    try:
        if _before_end is not None:
            _before_end()
    finally:
        if _is_rank:
            if not _can_flush():
                _status = UNFLUSHED
            # All ranks of a job that fails end at once, and clearing modules would keep its end waiting.
            if _status > 0:
                _finalize_leftovers()
            _hide_shared_modules()


def _can_flush() -> bool:
    """Whether the standard streams take what was printed, which the interpreter looks at, too."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:
            if stream is sys.stdout:
                # In the interpreter's words, which will not look at the stream again.
                what = f"{type(error).__name__}: {error}"
                with contextlib.suppress(Exception):
                    print(f"Exception ignored in: {stream!r}\n{what}", file=sys.stderr)
            return False
    return True


def _hide_shared_modules() -> None:
    modules = sys.modules
    if type(modules) is not dict:
        return  # the program's own, which the interpreter does not look at
    # The interpreter clears modules from the last to the first.
    last = ModuleType("tpurun._last")
    last.__dict__["finalizers"] = _Leftovers()
    _shared["tpurun._last"] = last
    own = _names_of_the_program()
    _hidden[last.__name__] = last
    _hidden.update((name, modules.pop(name)) for name in own)
    _exchange(modules, _hidden)


def _names_of_the_program() -> list[str]:
    """Returns the names of modules that the fork server does not have, in the order of their imports."""
    since = list(itertools.takewhile(lambda name: name != _last_shared, reversed(sys.modules)))
    given_anew = [name for name in ("__main__", "__mp_main__") if name not in since]
    own = [name for name in (*given_anew, *reversed(since)) if name in sys.modules]
    return [name for name in own if _shared.get(name) is not sys.modules[name]]


def _exchange(one: dict, other: dict) -> None:
    """Gives each of them what is in the other.

    To look at a module counts a reference, so to go through thousands of them would copy the pages of all: a
    third of the memory that a small rank has of its own.
    """
    size = dict.__basicsize__ - object.__basicsize__
    first, second = (id(each) + object.__basicsize__ for each in (one, other))
    kept = ctypes.string_at(first, size)
    ctypes.memmove(first, second, size)
    ctypes.memmove(second, kept, size)


class _Leftovers:
    """Finalizes, when it goes, what lives on among the objects that the program has made."""

    def __del__(self) -> None:
        # This module is one of the shared ones, so its names still hold.
        _finalize_leftovers(self)


def _finalize_leftovers(without: object = None) -> None:
    """Finalizes what the program has made, and ends the process."""
    # Objects from before the fork are frozen, which hides them from get_objects.
    made = {id(one): one for one in gc.get_objects() if hasattr(type(one), "__del__") and one is not without}
    for one in _outermost_first(made):
        _finalize(one)
    # The interpreter would only take apart its own types and names now, which are shared as well.
    if _status >= 0:
        ctypes.PyDLL(None).exit(_status)
    # As the interpreter ends itself, which it still does where the program has blocked the signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _finalize(one: object) -> None:
    # A finalizer that has run is not called again; an exception in it is shown as the interpreter shows it.
    ctypes.pythonapi.PyObject_CallFinalizer(ctypes.py_object(one))


def _outermost_first(made: dict[int, object]) -> list[object]:
    """Puts an object before those it refers to: a text file is flushed before its bytes' file is closed."""
    inner_first: list[object] = []
    seen: set[int] = set()

    def visit(one: object) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        for inner in gc.get_referents(one):
            if id(inner) in made or type(inner) in (dict, list, tuple):
                visit(inner)
        if id(one) in made:
            inner_first.append(one)

    for one in made.values():
        visit(one)
    return inner_first[::-1]
