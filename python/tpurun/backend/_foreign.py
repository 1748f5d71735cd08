"""Groups of this rank that other backends serve. The launcher sees nothing of them, so it is told."""

from __future__ import annotations

import json
from typing import Any

from tpurun import _rank_files

# The groups that there are, by name.
_groups: dict[str, dict[str, Any]] = {}
# A bound on the file, which the launcher reads: 64 KiB at about 100 bytes for each.
_MOST_TOLD = 256


def note(name: str, backend: str, size: int) -> None:
    """Lets the launcher know of a group of this rank in which it sees nothing."""
    _groups[name] = {"name": name, "backend": backend, "size": size}
    _tell()


def forget_others(existing: set[str]) -> None:
    """Lets the launcher know that no other groups than these are left."""
    gone = _groups.keys() - existing
    for name in gone:
        del _groups[name]
    if gone:
        _tell()


def _tell() -> None:
    """Lets the launcher know of the groups of this rank that are of other backends."""
    groups = list(_groups.values())[:_MOST_TOLD]
    _rank_files.tell("groups", json.dumps(groups).encode())
