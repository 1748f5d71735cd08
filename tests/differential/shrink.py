"""Makes failing programs small: as few steps as still fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Steps = tuple[int, ...]


def shrunk(steps: Sequence[int], failing: Callable[[list[Steps]], list[bool]]) -> Steps:
    """`failing` says of each choice of steps whether it fails; it is asked for many at once."""
    steps = tuple(steps)
    # One step alone is nearly always enough.
    alone = [(step,) for step in steps]
    for choice, fails in zip(alone, failing(alone) if len(steps) > 1 else [], strict=False):
        if fails:
            return choice
    while len(steps) > 1:
        smaller = [steps[:at] + steps[at + 1 :] for at in range(len(steps))]
        found = [choice for choice, fails in zip(smaller, failing(smaller), strict=True) if fails]
        if not found:
            break
        steps = found[0]
    return steps
