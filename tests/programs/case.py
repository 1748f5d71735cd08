"""A program is a function, and a `Case` is what the function is given."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tools.compiling import DEVICE

FAMILIES = (
    "ddp",
    "ddp_hooks",
    "join",
    "zero_redundancy",
    "fsdp2",
    "fsdp2_gradients",
    "dtensor",
    "tensor_parallel",
    "pipeline",
    "checkpoint",
    "elastic_store",
    "compile",
)
# How operations run: one by one, traced and compiled in trainings, or deferred and fused.
WAYS = ("strict", "compiled", "fused")
# Far above what any program needs: who is late here is stuck.
TIMEOUT = timedelta(seconds=180)


@dataclass
class Case:
    """One program on one rank of a job, which may have more ranks than the program uses."""

    backend: str
    rank: int
    folder: Path
    """Shared by the ranks, and by the programs of one family."""
    store: dist.Store
    """Of this program alone."""
    _worlds: int = field(default=0, init=False)

    @contextmanager
    def world(self, ranks: int) -> Iterator[bool]:
        """A world of the first ranks of the job; yields whether this rank is in it. All ranks come here."""
        self._worlds += 1
        if self.rank >= ranks:
            yield False
            return
        store = dist.PrefixStore(f"world {self._worlds}", self.store)
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=ranks, timeout=TIMEOUT)
        try:
            yield True
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Program:
    """Raises what is wrong, on the rank that finds it."""

    name: str
    """The family and the function, `ddp/plain`."""
    ranks: int
    body: Callable[[Case], None]
    makes_worlds: bool
    sizes: tuple[int, ...]
    """The numbers of ranks that it is written for."""
    devices: tuple[str, ...]
    """Those that it can run on."""

    def run(self, case: Case) -> None:
        """All ranks of the job come here."""
        if self.makes_worlds:
            self.body(case)
            return
        with case.world(self.ranks) as is_member:
            if is_member:
                self.body(case)

    def at(self, ranks: int) -> Program:
        """The same with another number of ranks."""
        return replace(self, ranks=ranks)


def program(
    ranks: int,
    *,
    sizes: tuple[int, ...] | None = None,
    makes_worlds: bool = False,
    devices: tuple[str, ...] = ("cpu", "tpu"),
) -> Callable[[Callable[[Case], None]], Program]:
    """Makes a program of a function that runs on every rank of a world of `ranks`, or that makes its own
    worlds, none larger than that. Unless it says otherwise, one for 4 ranks is for 1, 8 and 16, too."""
    if sizes is None:
        sizes = (1, 4, 8, 16) if ranks == 4 and not makes_worlds else (ranks,)

    def make(body: Callable[[Case], None]) -> Program:
        name = f"{body.__module__.rpartition('.')[2]}/{body.__name__}"
        return Program(name, ranks, body, makes_worlds, sizes, devices)

    return make


@dataclass
class _Chosen:
    compiler: str = ""


_chosen = _Chosen()


@contextmanager
def running(way: str, compiler: str) -> Iterator[None]:
    """Lets programs run in one of the `WAYS`."""
    if way == "fused":
        with getattr(torch, DEVICE).set_eager_mode("DEFER_AND_FUSE"):
            yield
        return
    if way != "compiled":
        yield
        return
    _chosen.compiler = compiler
    try:
        yield
    finally:
        _chosen.compiler = ""


def called(model: Callable[..., object]) -> Callable[..., object]:
    """The model as it is called in a training: compiled, where programs are."""
    if not _chosen.compiler:
        return model
    torch._dynamo.reset()

    # Dynamo begins to trace in a function of ours, not in one of torch's.
    def forward(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    compiled = torch.compile(forward, backend=_chosen.compiler)

    def with_tiny_buckets(*args: object, **kwargs: object) -> object:
        """Dynamo wants that DDP's first bucket is the smallest, and programs have tiny ones."""
        first, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 1
        try:
            return compiled(*args, **kwargs)
        finally:
            dist._DEFAULT_FIRST_BUCKET_BYTES = first

    return with_tiny_buckets


def here() -> str:
    """The device that this rank's program is for, where tensors are made unless it says otherwise."""
    return torch.get_default_device().type


def programs_of(family: str) -> list[Program]:
    """The programs of a family, in the order of its file."""
    module = importlib.import_module(f"{__package__}.{family}")
    return [value for value in vars(module).values() if isinstance(value, Program)]
