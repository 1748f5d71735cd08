"""The oracle says what every rank's tensors hold before and after a step, from the program alone.

Places are ranks of the step's group. Where tensors of a step are named, `calls.py` knows them by these names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from .contents import contents, mixed
from .formats import FORMATS, Format
from .program import Message, Program, Shape, Step
from .reduction import reduced


@dataclass(frozen=True)
class Held:
    """A tensor of one rank. Contents are raw elements in order; None are bytes of no importance."""

    name: str
    form: Format
    shape: Shape
    before: np.ndarray | None
    after: np.ndarray | None
    """None where it must stay what it was."""
    inside: tuple[str, int] | None = None
    """The tensor that it is a part of, and from which element on."""

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass
class Effects:
    """Everything of one rank in one step."""

    held: list[Held] = field(default_factory=list)
    returned: list[tuple[Shape, np.ndarray]] = field(default_factory=list)
    """New tensors, by the functional forms."""
    candidates: dict[int, np.ndarray] = field(default_factory=dict)
    """What is received from whom, where it is not known from whom."""

    def take(self, name: str, form: Format, shape: Shape, before: np.ndarray) -> None:
        """A tensor that is only read."""
        self.held.append(Held(name, form, shape, before, None))

    def give(self, name: str, form: Format, shape: Shape, after: np.ndarray) -> None:
        """A tensor that is only written."""
        self.held.append(Held(name, form, shape, None, after))


class Oracle:
    """One step of a program, in the place of one rank."""

    def __init__(self, program: Program, step: Step, place: int) -> None:
        self.seed = program.seed
        self.step = step
        self.place = place
        self.places = range(len(program.groups[step.group].ranks))
        self.size = len(self.places)
        self.form = FORMATS[step.dtype]
        self.is_functional = step.form == "functional"

    def effects(self) -> Effects:
        effects = Effects()
        getattr(self, f"_{self.step.kind.removesuffix('_coalesced')}")(effects)
        return effects

    def value(self, part: int, place: int, count: int, form: Format | None = None) -> np.ndarray:
        """Returns what the rank in this place gives as its tensor number `part`."""
        key = mixed(self.seed, self.step.index, part, place)
        return contents(form or self.form, self.step.mode, key, count)

    def reduced(self, operands: list[np.ndarray]) -> np.ndarray:
        return reduced(self.form, self.step.op, operands, self.step.factor)

    def _all_reduce(self, effects: Effects) -> None:
        for part, shape in enumerate(self.step.shapes):
            operands = [self.value(part, place, prod(shape)) for place in self.places]
            after = self.reduced(operands)
            self._replaced(effects, f"x{part}", shape, operands[self.place], after)

    def _replaced(
        self, effects: Effects, name: str, shape: Shape, before: np.ndarray, after: np.ndarray
    ) -> None:
        """In place, or as a new tensor."""
        if self.is_functional:
            effects.take(name, self.form, shape, before)
            effects.returned.append((shape, after))
        else:
            effects.held.append(Held(name, self.form, shape, before, after))

    def _broadcast(self, effects: Effects) -> None:
        (shape,) = self.step.shapes
        before = self.value(0, self.place, prod(shape))
        self._replaced(effects, "x0", shape, before, self.value(0, self.step.root, prod(shape)))

    def _reduce(self, effects: Effects) -> None:
        (shape,) = self.step.shapes
        operands = [self.value(0, place, prod(shape)) for place in self.places]
        after = self.reduced(operands) if self.place == self.step.root else None
        effects.held.append(Held("x0", self.form, shape, operands[self.place], after))

    def _all_gather(self, effects: Effects, *, is_receiver: bool = True) -> None:
        shape = self.step.shape_of(self.place)
        mine = self.value(0, self.place, prod(shape))
        if is_receiver:
            for place in self.places:
                shape_there = self.step.shape_of(place)
                after = self.value(0, place, prod(shape_there))
                before = mine if self.step.is_in_place and place == self.place else None
                effects.held.append(Held(f"out{place}", self.form, shape_there, before, after))
        if not (is_receiver and self.step.is_in_place):
            effects.take("in0", self.form, shape, mine)

    def _gather(self, effects: Effects) -> None:
        self._all_gather(effects, is_receiver=self.place == self.step.root)

    def _all_gather_lists(self, effects: Effects) -> None:
        for part, shape in enumerate(self.step.shapes):
            effects.take(f"in{part}", self.form, shape, self.value(part, self.place, prod(shape)))
            for place in self.places:
                after = self.value(part, place, prod(shape))
                effects.give(f"out{place}.{part}", self.form, shape, after)

    def _all_gather_single(self, effects: Effects, *, is_receiver: bool = True) -> None:
        for part, shape in enumerate(self.step.shapes):
            values = [self.value(part, place, prod(shape)) for place in self.places]
            whole, after = self._whole(shape), np.concatenate(values)
            if self.is_functional:
                effects.returned.append((self._concatenated(shape), after))
                effects.take(f"in{part}", self.form, shape, values[self.place])
                continue
            name, start = f"out{part}", self.place * prod(shape)
            if not is_receiver:
                effects.take(f"in{part}", self.form, shape, values[self.place])
            elif self.step.is_in_place:
                before = np.zeros_like(after)
                before[start : start + prod(shape)] = values[self.place]
                effects.held.append(Held(name, self.form, whole, before, after))
                effects.held.append(Held(f"in{part}", self.form, shape, None, None, (name, start)))
            else:
                effects.take(f"in{part}", self.form, shape, values[self.place])
                effects.give(name, self.form, whole, after)

    def _gather_single(self, effects: Effects) -> None:
        self._all_gather_single(effects, is_receiver=self.place == self.step.root)

    def _whole(self, shape: Shape) -> Shape:
        """A tensor of one such for each rank."""
        return (self.size, *shape) if self.step.is_stacked else self._concatenated(shape)

    def _concatenated(self, shape: Shape) -> Shape:
        return (self.size * shape[0], *shape[1:]) if shape else (self.size,)

    def _scatter(self, effects: Effects) -> None:
        step = self.step
        mine = step.shape_of(self.place)
        after = self.value(self.place, step.root, prod(mine))
        if self.place == step.root:
            for place in self.places:
                shape = step.shape_of(place)
                effects.take(f"in{place}", self.form, shape, self.value(place, step.root, prod(shape)))
        if not (self.place == step.root and step.is_in_place):
            effects.give("out0", self.form, mine, after)

    def _reduce_scatter(self, effects: Effects) -> None:
        step = self.step
        mine = step.shape_of(self.place)
        after = self.reduced([self.value(self.place, place, prod(mine)) for place in self.places])
        for part in self.places:
            shape = step.shape_of(part)
            result = after if step.is_in_place and part == self.place else None
            value = self.value(part, self.place, prod(shape))
            effects.held.append(Held(f"in{part}", self.form, shape, value, result))
        if not step.is_in_place:
            effects.give("out0", self.form, mine, after)

    def _reduce_scatter_single(self, effects: Effects) -> None:
        for part, shape in enumerate(self.step.shapes):
            count = prod(shape)
            mine = slice(self.place * count, (self.place + 1) * count)
            operands = [self.value(part, place, count * self.size) for place in self.places]
            after = self.reduced([operand[mine] for operand in operands])
            whole, given = self._whole(shape), operands[self.place]
            if self.is_functional:
                effects.take(f"in{part}", self.form, self._concatenated(shape), given)
                effects.returned.append((shape, after))
            elif self.step.is_in_place:
                left = given.copy()
                left[mine] = after
                effects.held.append(Held(f"in{part}", self.form, whole, given, left))
                place = (f"in{part}", mine.start)
                effects.held.append(Held(f"out{part}", self.form, shape, None, None, place))
            else:
                effects.take(f"in{part}", self.form, whole, given)
                effects.give(f"out{part}", self.form, shape, after)

    def sent(self, source: int, target: int) -> int:
        """Rows, in an all_to_all."""
        return self.step.rows[source * self.size + target]

    def _parts(self, source: int) -> list[np.ndarray]:
        """Returns what the rank in this place gives to each rank."""
        width = prod(self.step.shapes[0][1:])
        return [self.value(to, source, self.sent(source, to) * width) for to in self.places]

    def _all_to_all(self, effects: Effects) -> None:
        inner = self.step.shapes[0][1:]
        for to, value in enumerate(self._parts(self.place)):
            effects.take(f"in{to}", self.form, (self.sent(self.place, to), *inner), value)
        for source in self.places:
            after = self._parts(source)[self.place]
            effects.give(f"out{source}", self.form, (self.sent(source, self.place), *inner), after)

    def _all_to_all_single(self, effects: Effects) -> None:
        inner = self.step.shapes[0][1:]
        given = sum(self.sent(self.place, to) for to in self.places)
        gotten = sum(self.sent(source, self.place) for source in self.places)
        effects.take("in0", self.form, (given, *inner), np.concatenate(self._parts(self.place)))
        after = np.concatenate([self._parts(source)[self.place] for source in self.places])
        if self.is_functional:
            effects.returned.append(((gotten, *inner), after))
        else:
            effects.give("out0", self.form, (gotten, *inner), after)

    def _messages(self, effects: Effects) -> None:
        for index, message in enumerate(self.step.messages):
            form = FORMATS[message.dtype]
            content = self.value(index, message.source, message.count, form)
            if message.source == self.place:
                effects.take(f"message{index}", form, (message.count,), content)
            if message.target == self.place:
                if self.step.form == "any_source":
                    effects.candidates[message.source] = content
                effects.give(f"message{index}", form, (message.count,), content)

    def _refused(self, effects: Effects) -> None:
        (shape,) = self.step.shapes
        effects.take("x0", self.form, shape, self.value(0, self.place, prod(shape)))
        effects.take("x1", self.form, shape, self.value(1, self.place, prod(shape)))

    def _barrier(self, effects: Effects) -> None:
        """Moves nothing."""


def involves(message: Message, place: int) -> bool:
    return place in (message.source, message.target)
