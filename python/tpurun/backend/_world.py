"""The world of this process: whether it is of this backend, and how the launcher numbers its ranks.

A program may make a world of some ranks of its job, of ranks of several jobs, and after a loss one of the
ranks that are left. The launcher, its logs and all messages know a rank by its number in the job.
"""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import timedelta
from typing import Any

from tpurun import _extension, _rank_files
from tpurun.backend import _foreign, _membership


def of_this_backend() -> Any:
    """This rank's end of the world, or None where another backend serves it."""
    import torch
    import torch.distributed as dist

    native = _extension.loaded()
    if native is None or not dist.is_initialized():
        return None
    backends = dist.group.WORLD._device_types
    for kind in sorted(backends, key=lambda device: device.type):
        world = dist.group.WORLD._get_backend(torch.device(kind.type))
        if isinstance(world, native.ProcessGroup):
            return world
    return None


def serves_cpu() -> bool:
    """Whether the world's collectives on CPU tensors are of this backend."""
    return of_this_backend() is not None


# The world that a fork has from its parent, the rank. The fork may leave it and make another.
_world_of_parent: Any = None


def remember_as_parents() -> None:
    """In a fork of a rank: the world that there is belongs to the rank."""
    global _world_of_parent
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    _world_of_parent = c10d.GroupMember.WORLD if c10d is not None else None


def check_is_own() -> None:
    """Refuse to make a group in the place of the rank, of which this process is a fork."""
    import torch.distributed as dist

    if _world_of_parent is not None and dist.is_initialized() and dist.group.WORLD is _world_of_parent:
        raise ValueError(
            f"new_group: expected the process that is rank {dist.get_rank()}, given process {os.getpid()}, "
            "a fork of it, which has no part in the groups of its parent; make the group in the rank, or "
            "leave its world with destroy_process_group() first and make another one"
        )


# Since ranks were lost and the others formed a new world: its ranks by their rank in the one before all, by
# which the launcher, its logs and all messages know them; and how often that happened.
_first_ranks: list[int] | None = None
epoch = 0
# The ranks of a world that only some ranks of a job make, as the launcher numbers them.
_launched_as: list[int] | None = None
# Whether the world has ranks that are not of this job, so that the launcher cannot bring its groups together.
is_beyond_job = False


def adopt(world: Any) -> None:
    """Make the members of this group the world that later groups are part of."""
    global _first_ranks, epoch
    _first_ranks, epoch = world.global_ranks, world.epoch


def adopt_newer() -> None:
    """The same with the world that torch.distributed.shrink_group has made."""
    world = of_this_backend()
    if world is not None and world.epoch > epoch:
        adopt(world)


def at_the_start(ranks: list[int]) -> list[int]:
    """The numbers of these ranks of the world in the world that the job began with."""
    known_as = _launched_as if _first_ranks is None else _first_ranks
    return ranks if known_as is None else [known_as[rank] for rank in ranks]


def number(options: Any, timeout: timedelta) -> tuple[list[int], bool]:
    """Find out how the launcher numbers the ranks of a world, and whether some are not of this job.

    Libraries make worlds beside the default one, too; groups made later are parts of the default one.
    """
    global _launched_as, is_beyond_job
    import torch.distributed as dist

    # A store can be used again: the n-th world that a rank makes with it has names of its own.
    times = options.store.add(f"tpurun/worlds/{options.group_rank}", 1)
    launched_as, is_beyond = None, False
    if _first_ranks is None:
        launched_as, is_beyond = _ask_the_ranks(options, f"tpurun/world-{times}", timeout)
    if not dist.is_initialized():
        _launched_as, is_beyond_job = launched_as, is_beyond
        _membership.begin_world(times)
    known_as = launched_as if _first_ranks is None else _first_ranks
    return [rank if known_as is None else known_as[rank] for rank in range(options.group_size)], is_beyond


def _ask_the_ranks(options: Any, prefix: str, timeout: timedelta) -> tuple[list[int] | None, bool]:
    """The launcher's numbers where they are others, and whether some ranks are not of this job."""
    rank, size = options.group_rank, options.group_size
    place = _place_in_job()
    if place is not None:
        own, of_job, job = place
        refusal = ValueError(
            f"init_process_group: expected rank={own}, the RANK of this process, or a world of fewer than "
            f"all {of_job} ranks, given rank={rank}"
        )
        if size == of_job and _is_store_of_job(options.store):
            if rank != own:
                raise refusal
            return None, False
    if place is None:
        options.store.set(f"{prefix}/rank-{rank}", "")
        return None, False
    places = _gather(options, prefix, f"{own} {job}", timeout)
    if any(one.partition(" ")[2] != job for one in places):
        _foreign.note(options.group_id, "tpu_dist of several jobs", size)
        return None, True
    if size == of_job and rank != own:
        raise refusal
    return [int(one.partition(" ")[0]) for one in places], False


def _place_in_job() -> tuple[int, int, str] | None:
    """The rank of this process as the launcher numbers it, of how many, and the name of the job."""
    # A process that a rank forked has the same variables.
    if not _rank_files.is_rank():
        return None
    given = os.environ.get("TPURUN_JOB", "")
    # The name has the path of the run directory in it.
    if (match := re.fullmatch(r"([0-9]+)/([0-9]+) (.+)", given, re.DOTALL)) is None:
        expected = "RANK/RANKS ID as tpurun sets it for each rank"
        raise ValueError(f"TPURUN_JOB: expected {expected}, given {given!r}; keep it in the environment")
    return int(match[1]), int(match[2]), match[3]


def _is_store_of_job(store: Any) -> bool:
    """Whether it is the launcher's, at which nobody but the ranks of the job meets."""
    inner = getattr(store, "_underlying_non_prefix_store", None)
    at = (getattr(inner, "host", None), str(getattr(inner, "port", "")))
    return at == (os.environ.get("MASTER_ADDR"), os.environ.get("TPURUN_STORE_PORT"))


def _gather(options: Any, prefix: str, own: str, timeout: timedelta) -> list[str]:
    """Returns what each rank of a world says. The first one collects it, so that each takes part a few times
    only."""
    store, rank, size = options.store, options.group_rank, options.group_size
    keys = [f"{prefix}/rank-{other}" for other in range(size)]
    store.set(keys[rank], own)
    deadline = time.monotonic() + timeout.total_seconds()
    if rank > 0:
        have_come = _comes(store, f"{prefix}/all", deadline)
    elif have_come := all(_comes(store, key, deadline) for key in keys):
        store.set(f"{prefix}/all", "\n".join(store.get(key).decode() for key in keys))
    if have_come:
        return store.get(f"{prefix}/all").decode().split("\n")
    from tpurun.errors import CollectiveTimeoutError

    missing = [str(other) for other, key in enumerate(keys) if not store.check([key])] or ["0"]
    noun = "rank" if len(missing) == 1 else "ranks"
    raise CollectiveTimeoutError(
        f"Timed out after {timeout.total_seconds():g}s creating group {options.group_id}: "
        f"{size - len(missing)} of {size} ranks came, missing {noun} {', '.join(missing)}"
    )


def _comes(store: Any, key: str, deadline: float) -> bool:
    import torch.distributed as dist

    left = max(deadline - time.monotonic(), 0.001)
    try:
        store.wait([key], timedelta(seconds=left))
    except dist.DistStoreError:
        return False
    return True
