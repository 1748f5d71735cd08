"""A program: groups of ranks, and steps that they take in turn. `generate.py` makes it from one number."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Some ranks of the world, in the order that they are counted in."""

    ranks: tuple[int, ...]
    how: str
    """How it is made: `default` (the world itself), `new`, `local` (by its members alone), `enumerated`, or
    `split` from the group before it."""

    def __str__(self) -> str:
        return f"{self.how} {list(self.ranks)}"


@dataclass(frozen=True)
class Message:
    """From one rank of a group to another, by their places in it."""

    source: int
    target: int
    tag: int
    dtype: str
    count: int

    def __str__(self) -> str:
        return f"{self.source}->{self.target} tag {self.tag} {self.dtype}[{self.count}]"


@dataclass(frozen=True)
class Step:
    """One operation of one group."""

    index: int
    kind: str
    form: str
    """Which of the functions of torch.distributed that do the same."""
    group: int
    is_async: bool = False
    wait: str = "work"
    """How an asynchronous one is waited for: `work`, `future`, `then` (a callback of it), `poll`."""
    dtype: str = "float32"
    op: str = "SUM"
    factor: float = 1.0
    root: int = 0
    """A place in the group."""
    mode: str = "bits"
    """What the tensors hold, see `contents.py`."""
    shapes: tuple[Shape, ...] = ()
    """Of the tensors that one rank gives; or of what each rank gets of them, where they are scattered."""
    rows: tuple[int, ...] = ()
    """Where ranks differ: how many rows each has; for all_to_all how many go from which to which."""
    is_in_place: bool = False
    """What a rank keeps is the same memory in the input and the output."""
    is_stacked: bool = False
    """A tensor for all ranks has one dimension more, instead of as many times the rows."""
    messages: tuple[Message, ...] = ()

    def shape_of(self, place: int) -> Shape:
        """Returns the shape of the one tensor whose rows differ from rank to rank."""
        return (self.rows[place], *self.shapes[0][1:]) if self.rows else self.shapes[0]

    def __str__(self) -> str:
        words = [f"{self.index:>3}", f"async/{self.wait}" if self.is_async else "sync", self.kind, self.form]
        words.append(f"g{self.group}")
        if self.kind in MOVES_NOTHING:
            return " ".join(words)
        if self.messages:
            return " ".join(words) + " " + ", ".join(map(str, self.messages))
        if self.kind in REDUCING:
            words.append(self.op + (f"*{self.factor}" if self.op == "PREMUL_SUM" else ""))
        words.append(self.dtype)
        words += map(str, self.shapes)
        if self.rows:
            words.append(f"rows {list(self.rows)}")
        if self.kind in ROOTED:
            words.append(f"root {self.root}")
        words += [self.mode, *["in place"] * self.is_in_place, *["stacked"] * self.is_stacked]
        return " ".join(words)


MOVES_NOTHING = ("barrier", "refused")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
ROOTED = ("broadcast", "reduce", "gather", "gather_single", "scatter")


@dataclass(frozen=True)
class Program:
    """Everything the ranks do between two meetings."""

    seed: int
    ranks: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    """TPURUN_* variables that its groups are made with."""
    meets_before_parting: bool = True
    """Whether ranks destroy the groups only when all are done."""

    def only(self, kept: Collection[int] | None) -> Program:
        """The same without the other steps."""
        if kept is None:
            return self
        return replace(self, steps=tuple(step for step in self.steps if step.index in kept))

    def __str__(self) -> str:
        settings = "".join(f" {name}={value}" for name, value in self.settings.items())
        parting = "" if self.meets_before_parting else ", parts without meeting"
        used = {step.group for step in self.steps}
        groups = [f"  g{index} {group}" for index, group in enumerate(self.groups) if index in used]
        return "\n".join(
            [f"program {self.seed} on {self.ranks} ranks{settings}{parting}", *groups]
            + [f"  {step}" for step in self.steps]
        )
