"""Whether this rank ran as if there were no others: it ends well and has made no process group.

That happens to programs of libraries that train on CPUs by one process each unless a switch tells them to
distribute. The launcher says so when all its ranks did; this module tells it so, and which libraries it saw.
"""

from __future__ import annotations

import os
import re
import sys
from types import ModuleType
from typing import Any

# Libraries that make the process group of a program; the launcher knows the switch of each.
_LIBRARIES = ("accelerate", "lightning", "pytorch_lightning", "transformers")
# Other ways to the other ranks: modules, and words in the text of the program.
_OTHER_WAYS = ("deepspeed", "grpc", "horovod", "jax", "mpi4py", "ray", "torch_xla", "torchft", "zmq")
_WORDS = re.compile(
    rb"Store\b|\b(rendezvous|rpc|sockets?|socketserver|multiprocessing|shared_memory|mmap|fcntl|flock)\b|"
    rb"\b(filelock|requests|http|redis)\b"
)
# A program that reads it knows that it is one of several, and may do its part without the others.
_KNOWS_RANK = re.compile(rb"RANK|WORLD_SIZE")

_is_watched = False
_has_made_group = False


def watch(c10d: Any) -> None:
    """Notes when the process makes a default group, of whatever backend. Repeatable."""
    global _is_watched
    update = getattr(c10d, "_update_default_pg", None)
    if _is_watched or update is None:
        return

    def update_and_note(group: Any) -> Any:
        global _has_made_group
        _has_made_group = True
        return update(group)

    c10d._update_default_pg = update_and_note
    _is_watched = True


def libraries_alone(text: bytes) -> list[str] | None:
    """The libraries that a program of this `text` has imported, if it ran alone as far as can be seen."""
    modules: dict[str, ModuleType] = sys.modules
    if not _is_watched or _has_made_group or "torch" not in modules or _WORDS.search(text):
        return None
    if os.environ.get("WORLD_SIZE", "1") == "1" or any(name in modules for name in _OTHER_WAYS):
        return None
    libraries = [name for name in _LIBRARIES if name in modules]
    return libraries if libraries or not _KNOWS_RANK.search(text) else None
