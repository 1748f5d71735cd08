"""Errors that are made on purpose, to see that they are found: `--plant NAME`."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import numpy as np

from .memory import Memory
from .oracle import Effects
from .program import Step

PLANTS = ("oracle", "operation", "result", "stray", "crash", "hang")


class Plant:
    """One kind of error, of one rank of a group, in steps of one kind."""

    kind = "all_reduce"

    def __init__(self, name: str) -> None:
        self.name = name

    def is_here(self, step: Step, place: int) -> bool:
        return step.kind == self.kind and place == 0

    def before(self, step: Step, place: int, effects: Effects) -> Step:
        """May change what is expected, and what is posted."""
        if not self.is_here(step, place):
            return step
        match self.name:
            case "oracle":
                _change(effects)
            case "operation":
                return replace(step, op="MAX" if step.op != "MAX" else "MIN", dtype="float32")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                threading.Event().wait()
        return step

    def after(self, step: Step, place: int, memory: Memory) -> None:
        """May change what the operation has left."""
        if not self.is_here(step, place):
            return
        match self.name:
            case "result":
                _flip(memory.buffer, np.flatnonzero(memory.buffer != memory.untouched))
            case "stray":
                memory.buffer[-1] ^= 1


def _change(effects: Effects) -> None:
    for index, one in enumerate(effects.held):
        if one.after is not None and one.after.size:
            bits = one.after.copy()
            bits.view(np.uint8)[0] ^= 1
            effects.held[index] = replace(one, after=bits)


def _flip(buffer: np.ndarray, places: np.ndarray) -> None:
    """The first byte that the operation wrote."""
    if places.size:
        buffer[places[0]] ^= 1
