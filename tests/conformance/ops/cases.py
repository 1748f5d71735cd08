"""The cases that can be run: each operation, module and optimizer, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from . import excuses, modules, neutral, operators, optimizers, running
from .running import Outcome, Way

_FAMILIES: tuple[tuple[dict[str, Any], ModuleType], ...] = (
    (operators.OPERATIONS, operators),
    (modules.MODULES, modules),
    (optimizers.OPTIMIZERS, optimizers),
)
# Compiled are calls of an operation and of a module, forward and backward.
COMPILED_KINDS = ("forward", "views", "inplace", "backward", "module", "module_backward")
KINDS = tuple(kind for _, family in _FAMILIES for kind in family.KINDS)
NAMES = tuple(name for known, _ in _FAMILIES for name in known)


@dataclass
class Choice:
    """A choice of kinds, and of dtypes by their names. An empty list of dtypes means all of them."""

    kinds: Sequence[str] = KINDS
    dtypes: Sequence[str] = ()
    way: str = Way.CPU.value
    backend: str = ""


@dataclass
class Failure:
    """The failures of one kind in one dtype."""

    kind: str
    dtype: str
    count: int
    text: str


@dataclass
class Done:
    """A case that was run."""

    name: str
    passed: Counter[str] = field(default_factory=Counter)
    failed: list[Failure] = field(default_factory=list)
    excused: list[Failure] = field(default_factory=list)


def chosen(parts: Sequence[str], part: tuple[int, int] = (1, 1)) -> list[str]:
    """Names that contain one of `parts`; of these every n-th, for the i-th of n slices."""
    names = [name for name in NAMES if not parts or any(one in name for one in parts)]
    return names[part[0] - 1 :: part[1]]


def run(name: str, choice: Choice) -> Done:
    """All checks of one name, in this process, which has the device."""
    known, family = next(pair for pair in _FAMILIES if name in pair[0])
    done = Done(name)
    running.choose(choice.way, choice.backend)
    for dtype in family.dtypes_of(known[name]):
        short = str(dtype).removeprefix("torch.")
        if not choice.dtypes or short in choice.dtypes:
            _count(done, short, family.check(known[name], dtype, choice.kinds), choice.way)
    return done


def _count(done: Done, dtype: str, outcomes: Iterator[Outcome], way: str) -> None:
    wrong: dict[tuple[str, bool], Failure] = {}
    for outcome in outcomes:
        if outcome.text is None:
            done.passed[outcome.kind] += 1
            continue
        reason = excuses.reason(done.name, outcome.kind, dtype, outcome.text, way)
        text = outcome.text if reason is None else reason
        failure = wrong.setdefault((outcome.kind, reason is None), Failure(outcome.kind, dtype, 0, text))
        failure.count += 1
    for (_, counts), failure in wrong.items():
        (done.failed if counts else done.excused).append(failure)


def prepare() -> None:
    """Once in each process that runs cases."""
    torch.set_num_threads(1)
    # Claims the device: a parent that had it could have no children that do.
    torch.tpu.is_available()
    neutral.prepare()
