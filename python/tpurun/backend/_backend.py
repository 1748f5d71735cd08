"""How torch.distributed finds the backend, and how a process group of it begins."""

from __future__ import annotations

import os
import re
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tpurun import _chip_rules, _extension, _marks, _rank_files, _torch_tpu
from tpurun.backend import NAMES, _alone, _gloo, _membership, _ray

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Backend


def register() -> None:
    """Register the names; cheap, and repeatable."""
    import torch.distributed as dist

    if not dist.is_available() or all(name.upper() in dist.Backend._plugins for name in NAMES):
        return
    if _torch_tpu.is_in_charge():
        print(
            "tpurun: torch_tpu and its chips are here; device tpu, tpu_dist and tpu are left to it",
            file=sys.stderr,
        )
        return
    # CPU tensors only, until somebody claims the device: torch refuses a device name that nobody has. Gloo
    # stays the default backend of the CPU, whoever serves it.
    _offer(["cpu"])
    _inherit_timeouts(dist.distributed_c10d)
    _alone.watch(dist.distributed_c10d)
    _gloo.take_over(dist.distributed_c10d)
    # The engine records what every rank does. Torch's recorder would hook each call for 2 to 5 us more.
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(recorders, set):
        recorders.update(NAMES)
    os.register_at_fork(after_in_child=_remember_world_of_parent)
    _chip_rules.follow(_check_collectives)
    _ray.stand_in()


def serve_device() -> None:
    """Offer the backends for tensors on ``tpu``, too; the first is what such programs get by default."""
    import torch.distributed as dist

    if dist.is_available():
        register()
        _offer(["cpu", "tpu"])


def _offer(devices: list[str]) -> None:
    import torch.distributed as dist

    for name in NAMES:
        dist.Backend.register_backend(name, create, extended_api=True, devices=devices)


def _inherit_timeouts(c10d: Any) -> None:
    """Make groups that are given no timeout have that of the world, instead of half an hour."""
    default = getattr(c10d, "_get_default_timeout", None)
    if default is None:
        return

    def of_the_world(backend: str) -> timedelta:
        ours = (*NAMES, *_gloo.NAMES) if _gloo.is_ours() else NAMES
        if not any(name in ours for name in re.split("[:,]", str(backend))):
            return default(backend)
        _check_world_is_own()
        world = _native_world()
        if world is None:
            return default(backend)
        return world.options._timeout

    c10d._get_default_timeout = of_the_world


def _native_world() -> Any:
    """This rank's end of the world, if that is of this backend."""
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
    return _native_world() is not None


def create(options: Any, pg_options: Any, kind: Any = None) -> Backend:
    """Build this rank's end of a group, of class `kind`; returns when all its ranks have come."""
    from tpurun.backend import _shared, _shortcuts

    _check_world_is_own()
    native = _extension.load()
    _shared.serve_wrappers()
    if _chip_rules.begin():
        _chip_rules.check_group(options.group_size, is_first=not options.global_ranks_in_group)
    else:
        _shortcuts.install(native.Shortcut)
    if isinstance(pg_options, native.ProcessGroup):
        return pg_options  # survivors, who have met already
    if options.process_group is not None and options.process_group in _made:
        return _made[options.process_group]  # for the tensors of another device
    world = _native_world()
    if world is not None and world.epoch > _epoch:
        adopt(world)  # torch.distributed.shrink_group made it
    timeout = options.timeout if pg_options is None else pg_options._timeout
    if options.global_ranks_in_group:
        ranks, is_beyond_job = list(options.global_ranks_in_group), _is_beyond_job
        site = re.sub(r", by tpurun's \w+$", "", native.call_site())
        _membership.check(options.store, options.group_id, ranks, _epoch, ranks[options.group_rank], site)
        ranks = _at_the_start(ranks)
    else:  # The world itself, or what is made like one, lists no ranks.
        ranks, is_beyond_job = _number_the_world(options, timeout)
    group = (kind or native.ProcessGroup)(
        options.store,
        options.group_rank,
        options.group_size,
        ranks,
        options.group_id,
        timeout,
        _epoch,
        is_beyond_job,
    )
    _marks.reach(_marks.GROUP_CREATED)
    if options.process_group is not None:
        _made[options.process_group] = group
    return group


# By the group of torch that each is for; torch keeps the C++ half alone, and shows another Python object.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# In a fork: the world that it has from its parent, the rank. It may leave it and make another.
_world_of_parent: Any = None


def _remember_world_of_parent() -> None:
    global _world_of_parent
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    _world_of_parent = c10d.GroupMember.WORLD if c10d is not None else None


def _check_world_is_own() -> None:
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
_epoch = 0
# The ranks of a world that only some ranks of a job make, as the launcher numbers them.
_launched_as: list[int] | None = None
# Whether the world has ranks that are not of this job, so that the launcher cannot bring its groups together.
_is_beyond_job = False


def adopt(world: Any) -> None:
    """Make the members of this group the world that later groups are part of."""
    global _first_ranks, _epoch
    _first_ranks, _epoch = world.global_ranks, world.epoch


def _at_the_start(ranks: list[int]) -> list[int]:
    known_as = _launched_as if _first_ranks is None else _first_ranks
    return ranks if known_as is None else [known_as[rank] for rank in ranks]


def _number_the_world(options: Any, timeout: timedelta) -> tuple[list[int], bool]:
    """Find out how the launcher numbers the ranks of a world, and whether some are not of this job.

    Libraries make worlds beside the default one, too; groups made later are parts of the default one.
    """
    global _launched_as, _is_beyond_job
    import torch.distributed as dist

    # A store can be used again: the n-th world that a rank makes with it has names of its own.
    times = options.store.add(f"tpurun/worlds/{options.group_rank}", 1)
    launched_as, is_beyond_job = None, False
    if _first_ranks is None:
        launched_as, is_beyond_job = _ask_the_world(options, f"tpurun/world-{times}", timeout)
    if not dist.is_initialized():
        _launched_as, _is_beyond_job = launched_as, is_beyond_job
        _membership.begin_world(times)
    known_as = launched_as if _first_ranks is None else _first_ranks
    return [rank if known_as is None else known_as[rank] for rank in range(options.group_size)], is_beyond_job


def _ask_the_world(options: Any, prefix: str, timeout: timedelta) -> tuple[list[int] | None, bool]:
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
        _gloo.note(options.group_id, "tpu_dist of several jobs", size)
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


def _check_collectives(is_on: bool) -> None:
    """Apply the rules of chips to collectives, in processes where the rules have ever been on."""
    if is_on or "tpurun.backend._chip_collectives" in sys.modules:
        from tpurun.backend import _chip_collectives

        _chip_collectives.apply(is_on)
