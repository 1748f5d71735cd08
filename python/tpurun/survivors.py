"""Going on without the ranks that were lost.

A process group that has lost a rank has failed for good. Its survivors agree on who they are through the
memory that the group shares, whoever died and wherever: no launcher, no store and no timeout is needed.

:func:`shrink` makes a group of the survivors; :func:`reform` makes them the world::

    try:
        train()
    except tpurun.RankLostError:
        rank = tpurun.reform()
        load_checkpoint()
        train()

Messages, and ``ranks`` of exceptions, keep the numbers that ranks had when the job began.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tpurun import _extension
from tpurun.backend import _world

__all__ = ["reform", "shrink"]


def shrink(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    *,
    lost: Iterable[int] = (),
) -> dist.ProcessGroup:
    """Make a process group of the members of ``group`` that are left, at its next epoch.

    All of them must call this. ``group``, the world if None, fails first if it has not yet; other groups are
    not touched. Ranks keep their order and get new numbers in the new group, which has the timeout of the old
    one. Can be repeated, on the old group or on the new one.

    Args:
        group: Of this backend.
        timeout: How long the others may take to come; the timeout of ``group`` if None.
        lost: Ranks of the world that are not waited for although their processes exist, besides those that
            the failure of ``group`` names as lost. It suffices that one rank names them. A rank that was
            given up in this way gets a ``RankLostError`` from its own call.

    Raises:
        CollectiveTimeoutError: Not all survivors came; ``ranks`` says who did not.
        RankLostError: The others have given up this rank.
        ValueError: ``lost`` names this rank or one that is no member, or ``group`` is of another backend.
    """
    group = dist.group.WORLD if group is None else group
    native = _native_of(group)
    first = {rank: at for at, rank in enumerate(_first_ranks_of_world())}
    left = _survivors(native, timeout, lost)
    ranks = [first[rank] for rank in left.global_ranks]
    backend, store = c10d._world.pg_map[group]
    # This call is what torch.distributed.new_group does, but without its store, which may be gone. Nor does
    # it need torch's names, which depend on how many groups each rank has made.
    shrunk, _ = c10d._new_process_group_helper(
        left.size(),
        left.rank(),
        ranks,
        backend,
        store,
        left.group_id,
        backend_options=left,
        timeout=left.options._timeout,
    )
    c10d._world.pg_group_ranks[shrunk] = {rank: at for at, rank in enumerate(ranks)}
    return shrunk


def reform(timeout: timedelta | None = None, *, lost: Iterable[int] = ()) -> int:
    """Make the ranks of the world that are left the world, and return this process's rank in it.

    All of them must call this. Destroys every process group, agrees on the survivors as :func:`shrink` does,
    sets ``RANK`` and ``WORLD_SIZE``, and initialises torch.distributed with the same backend and timeout. The
    store stays the same; where it went with rank 0 of the world, the new rank 0 opens another one, and
    ``MASTER_PORT`` changes.

    Args:
        timeout: How long the others may take to come; the timeout of the world if None.
        lost: As for :func:`shrink`.

    Raises:
        As :func:`shrink`; the world is as it was then.
    """
    world = dist.group.WORLD
    backend, store = c10d._world.pg_map[world]
    hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    lost_host = _first_ranks_of_world()[0]
    left = _survivors(_native_of(world), timeout, lost)
    if hosts_store and lost_host not in left.global_ranks:
        store = _new_store(left)
    dist.destroy_process_group()
    _world.adopt(left)
    os.environ.update(RANK=str(left.rank()), WORLD_SIZE=str(left.size()))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"epoch{left.epoch}", store),
        rank=left.rank(),
        world_size=left.size(),
        timeout=left.options._timeout,
        pg_options=left,
    )
    return left.rank()


def _survivors(native: Any, timeout: timedelta | None, lost: Iterable[int]) -> Any:
    first = _first_ranks_of_world()
    unknown = sorted(rank for rank in lost if not 0 <= rank < len(first))
    if unknown:
        raise ValueError(f"shrink: expected lost ranks from 0 to {len(first) - 1}, got {unknown[0]}")
    return native.survivors([first[rank] for rank in lost], timeout or native.options._timeout)


def _first_ranks_of_world() -> list[int]:
    """The ranks of the world, by their rank in the world that the job began with."""
    return _native_of(dist.group.WORLD).global_ranks


def _native_of(group: dist.ProcessGroup) -> Any:
    native = group._get_backend(torch.device("cpu"))
    if not isinstance(native, _extension.load().ProcessGroup):
        raise ValueError(f"shrink: expected a group of backend tpu_dist, got one of {native.name()}")
    return native


def _new_store(left: Any) -> dist.Store:
    """A store in the process of the first survivor, whose port the others learn from the group itself."""
    port = torch.zeros(1, dtype=torch.int64)
    is_host = left.rank() == 0
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if is_host:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    left.broadcast(port, 0).wait()
    if not is_host:
        store = dist.TCPStore(host, int(port.item()), is_master=False)
    os.environ["MASTER_PORT"] = str(store.port)
    return store
