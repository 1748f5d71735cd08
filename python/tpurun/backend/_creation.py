"""How a process group of this backend begins."""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any

from tpurun import _chip_rules, _extension, _marks
from tpurun.backend import _membership, _world

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Backend


def create(options: Any, pg_options: Any, kind: Any = None) -> Backend:
    """Build this rank's end of a group, of class `kind`; returns when all its ranks have come."""
    from tpurun.backend import _shared, _shortcuts

    _world.check_is_own()
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
    _world.adopt_newer()
    timeout = options.timeout if pg_options is None else pg_options._timeout
    if options.global_ranks_in_group:
        ranks, is_beyond_job = list(options.global_ranks_in_group), _world.is_beyond_job
        rank = ranks[options.group_rank]
        site = re.sub(r", by tpurun's \w+$", "", native.call_site())
        _membership.check(options.store, options.group_id, ranks, _world.epoch, rank, site)
        ranks = _world.at_the_start(ranks)
    else:  # The world itself, or what is made like one, lists no ranks.
        ranks, is_beyond_job = _world.number(options, timeout)
    group = (kind or native.ProcessGroup)(
        options.store,
        options.group_rank,
        options.group_size,
        ranks,
        options.group_id,
        timeout,
        _world.epoch,
        is_beyond_job,
    )
    _marks.reach(_marks.GROUP_CREATED)
    if options.process_group is not None:
        _made[options.process_group] = group
    return group


# By the group of torch that each is for; torch keeps the C++ half alone, and shows another Python object.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
