"""These programs do what torch.distributed.elastic does with the store of a job, which is the launcher's
under tpurun."""

from __future__ import annotations

import re

import torch
from torch.distributed.elastic.utils.store import barrier, get_all, synchronize

from .case import Case, program
from .compare import same

RANKS = 4


@program(ranks=RANKS, makes_worlds=True)
def everybody_learns_all(case: Case) -> None:
    """`synchronize`: what each rank says, in the order of ranks."""
    if case.rank < RANKS:
        mine = bytes([case.rank]) * 1000 * case.rank
        said = synchronize(case.store, mine, case.rank, RANKS, "words/")
        assert said == [bytes([rank]) * 1000 * rank for rank in range(RANKS)], [len(word) for word in said]
        assert get_all(case.store, case.rank, "words/", RANKS) == said


@program(ranks=RANKS, makes_worlds=True)
def nobody_passes_early(case: Case) -> None:
    """`barrier`: whoever passes finds that all have come."""
    if case.rank < RANKS:
        for turn in range(5):
            case.store.add(f"came {turn}", 1)
            barrier(case.store, RANKS, f"turn {turn}", barrier_timeout=60, rank=case.rank)
            assert case.store.add(f"came {turn}", 0) == RANKS


@program(ranks=RANKS, makes_worlds=True)
def who_is_missing_is_named(case: Case) -> None:
    """A rank that does not come ends the barrier of the others; rank 0 learns which."""
    if case.rank >= RANKS - 1:
        return
    barrier(case.store, RANKS - 1, "all but the last", barrier_timeout=60)
    try:
        barrier(case.store, RANKS, "all", barrier_timeout=1, rank=case.rank, trace_timeout=1)
    except torch._C._DistStoreError as error:
        named = str(error)
    else:
        raise AssertionError("the barrier opened for three of four")
    if case.rank == 0:
        assert re.search(rf"missing_ranks=\[.*{RANKS - 1}\]", named), named


@program(ranks=RANKS, sizes=(RANKS,))
def beside_a_process_group(case: Case) -> None:
    """The store of the default group takes user's keys while collectives run over the same ranks."""
    store = torch.distributed.distributed_c10d._get_default_store()
    total = torch.ones(3)
    work = torch.distributed.all_reduce(total, async_op=True)
    said = synchronize(store, str(case.rank).encode(), case.rank, RANKS, "beside/")
    work.wait()
    assert said == [str(rank).encode() for rank in range(RANKS)], said
    same("sum", total, torch.full((3,), float(RANKS)))
