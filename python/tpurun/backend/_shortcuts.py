"""Blocking collectives go from torch's functions straight to the engine.

``dist.all_reduce`` stays the very function that it is: for whoever has imported it, for torch.compile and
torch.export, which know it by its identity, and for the logger of exceptions around it. Only what it calls
inside is another one, ``_C.Shortcut``, which asks torch to do it wherever anybody could tell the difference:
groups of other backends, asynchronous calls, subclasses and modes, profilers, hooks, gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CellType
from typing import Any


def install(shortcut: Any) -> None:
    """Put ``_C.Shortcut`` inside the functions that there are shortcuts for. Repeatable.

    A torch whose functions look otherwise keeps them as they are.
    """
    from torch.distributed import distributed_c10d

    world = getattr(distributed_c10d, "_world", None)
    if not all(hasattr(world, name) for name in ("_default_pg", "_pg_coalesce_state")):
        return
    for name, parameters in shortcut.PARAMETERS.items():
        cell = _inside(getattr(distributed_c10d, name, None), parameters)
        if cell is not None:
            _originals[name] = cell, cell.cell_contents
            cell.cell_contents = shortcut(name, cell.cell_contents)
            _name_frames(getattr(distributed_c10d, name), name)


# The functions that the cells held before, by name.
_originals: dict[str, tuple[CellType, Any]] = {}


def remove() -> None:
    """Have torch do everything, for those who look at what reaches its dispatcher. Repeatable."""
    for cell, original in _originals.values():
        cell.cell_contents = original
    _originals.clear()


def _inside(function: Callable[..., Any] | None, parameters: tuple[str, ...]) -> CellType | None:
    """Where a decorated function keeps the one that it wraps, if that has these parameters."""
    inner = getattr(function, "__wrapped__", None)
    code = getattr(inner, "__code__", None)
    if code is None or code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] != parameters:
        return None
    cells = [cell for cell in function.__closure__ or () if cell.cell_contents is inner]
    return cells[0] if len(cells) == 1 else None


def _name_frames(function: Any, name: str) -> None:
    """Have stacks show what was called: the innermost frame is the decorator's, which every function has."""
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
