"""Where the ranks of a test wait for each other outside of the process group that is tested."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

# How long a rank waits for the others; the slowest test takes a quarter of it on a busy machine.
LIMIT_S = 240.0
LOOK_S = 1.0


class Meeting:
    """Any number of barriers in a row, of all ranks or of as many as are waited for."""

    def __init__(self, store: dist.Store, ranks: int) -> None:
        self._store = dist.PrefixStore("meeting", store)
        self._ranks = ranks
        self._barriers = 0

    def sync(self, wait_for: int | None = None) -> None:
        """Returns when `wait_for` ranks, all of them unless said, have come to as many barriers."""
        name = f"{self._barriers}"
        self._barriers += 1
        if self._store.add(f"{name} came", 1) >= (wait_for or self._ranks):
            self._store.set(f"{name} all", "")
        deadline = time.monotonic() + LIMIT_S
        while not self._is_set(f"{name} all"):
            if self._store.check(["failed"]):
                raise RuntimeError(f"barrier {name}: {self._store.get('failed').decode()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"barrier {name}: expected {wait_for or self._ranks} ranks to come")

    def give_up(self, reason: str) -> None:
        """Nobody waits for this rank any more."""
        self._store.set("failed", reason)

    def _is_set(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=LOOK_S))
        except RuntimeError:  # a DistStoreError, except from a FileStore
            return False
        return True
