"""Random programs, each from its seed alone."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from . import contents, shapes
from .formats import BOOL, COMPLEX, FLOAT, FORMATS, INTEGER, OPAQUE
from .program import Group, Message, Program, Step
from .reduction import OPS

MOST_STEPS = 10


class World(NamedTuple):
    """How many ranks, and who starts them; of `fork` nobody but us."""

    launcher: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks by {self.launcher}"


# How often each is drawn: few ranks more often than many, which take the machine longer.
WORLDS = {
    World("fork", 2): 5,
    World("fork", 3): 4,
    World("fork", 4): 4,
    World("fork", 6): 2,
    World("tpurun", 3): 2,
    World("tpurun", 5): 2,
    World("tpurun", 8): 1,
}

# Forms of each kind of step, and how often it is drawn.
KINDS = {
    "all_reduce": (9, ("plain", "plain", "functional", "functional_in_place")),
    "all_reduce_coalesced": (4, ("plain", "manager", "functional")),
    "broadcast": (4, ("plain", "plain", "functional")),
    "reduce": (4, ("plain",)),
    "all_gather": (4, ("plain",)),
    "all_gather_lists": (2, ("plain",)),
    "all_gather_single": (5, ("single", "into_tensor", "functional")),
    "all_gather_single_coalesced": (3, ("manager", "functional")),
    "gather": (3, ("plain",)),
    "gather_single": (1, ("single", "into_tensor")),
    "scatter": (3, ("plain",)),
    "reduce_scatter": (4, ("plain",)),
    "reduce_scatter_single": (5, ("single", "tensor", "functional")),
    "reduce_scatter_single_coalesced": (3, ("manager", "functional")),
    "all_to_all": (3, ("plain",)),
    "all_to_all_single": (5, ("plain", "plain", "functional")),
    "barrier": (2, ("plain", "monitored")),
    "messages": (6, ("nonblocking", "batch", "blocking", "any_source")),
    "refused": (1, ("op", "root", "dtypes", "room", "count", "overlapping")),
}
FUNCTIONAL_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def program(seed: int) -> Program:
    """The program of this seed."""
    random = Random(seed)
    ranks = world_of(seed).ranks
    groups = _groups(random, ranks)
    settings = _settings(random)
    meets = random.random() < 0.7
    steps = _Steps(random, groups, settings).draw(random.randint(1, MOST_STEPS))
    return Program(seed, ranks, groups, steps, settings, meets)


def world_of(seed: int) -> World:
    """Draws the world that the program of a seed runs in."""
    return Random(f"world {seed}").choices(list(WORLDS), list(WORLDS.values()))[0]


def _settings(random: Random) -> dict[str, str]:
    settings = {}
    if random.random() < 0.6:
        # The least: what takes several rounds then has a few KiB.
        settings["TPURUN_STAGING_BYTES"] = str(256 << 10)
    if random.random() < 0.25:
        settings["TPURUN_ALGORITHM"] = random.choice(["ring", "bucket"])
    if random.random() < 0.1:
        settings["TPURUN_VERIFY_RESULTS"] = "1"
    if random.random() < 0.1:
        settings["TPURUN_MATCH"] = "strict"
    return settings


def _groups(random: Random, ranks: int) -> tuple[Group, ...]:
    world = tuple(range(ranks))
    groups = [Group(world, random.choice(["default", "default", "new"]))]
    while len(groups) < 4 and random.random() < 0.6:
        luck = random.random()
        if luck < 0.15:
            members = [random.randrange(ranks)]
        elif luck < 0.4:
            # Within another one.
            parent = random.choice(groups).ranks
            members = random.sample(parent, random.randint(1, len(parent)))
        else:
            members = random.sample(world, random.randint(2, ranks))
        how = random.choice(["new", "new", "local", "enumerated"])
        if how == "enumerated" or random.random() < 0.6:
            members.sort()
        groups.append(Group(tuple(members), how))
    return tuple(groups)


class _Steps:
    def __init__(self, random: Random, groups: tuple[Group, ...], settings: dict[str, str]) -> None:
        self.random = random
        self.groups = groups
        # Others than the flat algorithm may combine in another order.
        self.is_any_order = "TPURUN_ALGORITHM" in settings

    def draw(self, count: int) -> tuple[Step, ...]:
        weights = [weight for weight, _ in KINDS.values()]
        return tuple(map(self.step, range(count), self.random.choices(list(KINDS), weights, k=count)))

    def step(self, index: int, kind: str) -> Step:
        random = self.random
        group = random.randrange(len(self.groups))
        if kind == "messages" and len(self.groups[group].ranks) < 2:
            kind = "all_reduce"
        form = random.choice(KINDS[kind][1])
        self.size = len(self.groups[group].ranks)
        details = getattr(self, f"_{kind}", self._alike)(kind, form)
        is_async = random.random() < 0.5 and kind != "refused" and form != "monitored"
        if form == "blocking":
            is_async = False
        return Step(
            index,
            kind,
            form,
            group,
            is_async=is_async,
            wait=random.choice(["work", "work", "future", "then", "poll"]),
            root=random.randrange(self.size),
            **details,
        )

    def _dtype(self) -> str:
        return self.random.choice(["float32", "bfloat16", *FORMATS])

    def _moved(self) -> dict:
        mode = contents.CONSTANT if self.random.random() < 0.1 else contents.BITS
        dtype = self._dtype()
        # Negated and conjugated views are of numbers.
        if self.random.random() < 0.2:
            mode = contents.WHOLE
        return {"dtype": dtype, "mode": mode}

    def _reduction(self, form: str, *, is_viewed: bool = False) -> dict:
        """`is_viewed`: torch passes complex tensors on as pairs of reals, as all functional forms do."""
        random = self.random
        dtype = random.choice([name for name in ("float32", *FORMATS) if FORMATS[name].family != OPAQUE])
        family = FORMATS[dtype].family
        ops = [op for op in OPS[family] if not form.startswith("functional") or op in FUNCTIONAL_OPS]
        if (is_viewed or form == "functional") and family == COMPLEX:
            ops = [op for op in ops if op != "PRODUCT"]
        op = random.choice(ops)
        factor = random.choice([0.5, 2.0, 0.25]) if self.is_any_order else random.choice([0.5, 0.1, -3.0])
        return {"dtype": dtype, "op": op, "factor": factor, "mode": self._mode(family, op)}

    def _mode(self, family: str, op: str) -> str:
        exact = contents.UNITS if op == "PRODUCT" else contents.WHOLE
        if self.random.random() < 0.1 and op != "PRODUCT":
            return contents.CONSTANT
        if family in (INTEGER, BOOL):
            return contents.BITS
        if self.is_any_order:
            return exact
        assert family in (FLOAT, COMPLEX)
        return self.random.choice([contents.BITS, contents.FINE, contents.FINE, exact])

    def _shape(self, dtype: str, shares: int = 1) -> tuple[int, ...]:
        return shapes.shape(self.random, shapes.count(self.random, FORMATS[dtype].bytes, shares))

    def _rowed(self, dtype: str, shares: int) -> tuple[int, ...]:
        """A shape with rows."""
        return self._shape(dtype, shares) or (1,)

    def _alike(self, kind: str, form: str) -> dict:
        details = self._moved()
        return details | {"shapes": (self._shape(details["dtype"]),)}

    def _all_reduce(self, kind: str, form: str) -> dict:
        details = self._reduction(form, is_viewed=True)
        return details | {"shapes": (self._shape(details["dtype"]),)}

    def _reduce(self, kind: str, form: str) -> dict:
        details = self._reduction(form)
        return details | {"shapes": (self._shape(details["dtype"]),)}

    def _all_reduce_coalesced(self, kind: str, form: str) -> dict:
        details = self._reduction(form, is_viewed=True)
        return details | {"shapes": self._several(details["dtype"], self._shape)}

    def _several(self, dtype: str, draw) -> tuple:
        return tuple(draw(dtype, 4) for _ in range(self.random.randint(1, 4)))

    def _uneven(self, kind: str, form: str) -> dict:
        details = self._moved()
        return details | self._rows(details["dtype"])

    def _rows(self, dtype: str) -> dict:
        random = self.random
        if random.random() < 0.4:
            shape = self._rowed(dtype, self.size)
            rows = shapes.rows(random, self.size, max(1, shape[0]))
            return {"shapes": (shape,), "rows": rows, "is_in_place": random.random() < 0.15}
        return {"shapes": (self._shape(dtype, self.size),), "is_in_place": random.random() < 0.15}

    _all_gather = _gather = _scatter = _uneven

    def _all_gather_lists(self, kind: str, form: str) -> dict:
        details = self._moved()
        return details | {"shapes": self._several(details["dtype"], self._shape)}

    def _reduce_scatter(self, kind: str, form: str) -> dict:
        details = self._reduction(form)
        return details | self._rows(details["dtype"])

    def _single(self) -> dict:
        return {
            "is_in_place": self.random.random() < 0.2,
            "is_stacked": self.random.random() < 0.3,
        }

    def _all_gather_single(self, kind: str, form: str) -> dict:
        details = self._moved()
        draw = self._gathered(form, details["dtype"])
        return details | self._single() | {"shapes": (draw(details["dtype"], self.size),)}

    def _gathered(self, form: str, dtype: str) -> Callable[[str, int], tuple[int, ...]]:
        """Where torch gathers complex numbers as pairs of reals, it fails for a single one without a row."""
        return self._rowed if form == "functional" and dtype.startswith("complex") else self._shape

    def _gather_single(self, kind: str, form: str) -> dict:
        return self._all_gather_single(kind, form) | {"is_in_place": False}

    def _all_gather_single_coalesced(self, kind: str, form: str) -> dict:
        details = self._moved()
        draw = self._gathered(form, details["dtype"])
        return details | self._single() | {"shapes": self._several(details["dtype"], draw)}

    def _reduce_scatter_single(self, kind: str, form: str) -> dict:
        details = self._reduction(form)
        return details | self._single() | {"shapes": (self._rowed(details["dtype"], self.size),)}

    def _reduce_scatter_single_coalesced(self, kind: str, form: str) -> dict:
        details = self._reduction(form)
        return details | self._single() | {"shapes": self._several(details["dtype"], self._rowed)}

    def _all_to_all(self, kind: str, form: str) -> dict:
        details = self._moved()
        shape = self._rowed(details["dtype"], self.size * 2)
        most = max(1, shape[0])
        if self.random.random() < 0.4:
            rows = (most,) * self.size**2
        else:
            rows = shapes.rows(self.random, self.size**2, most)
        return details | {"shapes": (shape,), "rows": rows}

    _all_to_all_single = _all_to_all

    def _barrier(self, kind: str, form: str) -> dict:
        return {}

    def _refused(self, kind: str, form: str) -> dict:
        return {"shapes": ((4,),), "mode": contents.WHOLE}

    def _messages(self, kind: str, form: str) -> dict:
        random = self.random
        mode = random.choice([contents.BITS, contents.BITS, contents.WHOLE])
        if form == "any_source":
            target, dtype = random.randrange(self.size), self._dtype()
            count = shapes.count(random, FORMATS[dtype].bytes, self.size)
            messages = [
                Message(source, target, 7, dtype, count) for source in range(self.size) if source != target
            ]
            return {"mode": mode, "messages": tuple(messages), "dtype": dtype}
        return {"mode": mode, "messages": tuple(self._message() for _ in range(random.randint(1, 6)))}

    def _message(self) -> Message:
        dtype = self._dtype()
        source, target = self.random.sample(range(self.size), 2)
        count = shapes.count(self.random, FORMATS[dtype].bytes, 2)
        return Message(source, target, self.random.randrange(3), dtype, count)
