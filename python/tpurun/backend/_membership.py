"""Whether the ranks make the same groups, in the same order.

Torch names a group by how many a rank has made before. Ranks whose groups differ meet under one name, and
each waits for others that will never come to its group. So the first rank to make a group writes down which,
and the others compare.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Which of the worlds that the ranks have made through this store it is: names begin anew with every one.
_world = 0


def begin_world(number: int) -> None:
    """From here on groups are parts of this world."""
    global _world
    _world = number


def check(store: Any, name: str, ranks: Sequence[int], epoch: int, rank: int, site: str) -> None:
    """Refuse a group that shares ranks with another one of the same name.

    Raises:
        CollectiveMismatchError: says who made which group, and where.
    """
    own = json.dumps([rank, list(ranks), site])
    try:
        found = store.compare_set(f"tpurun/members/{_world}.{epoch}", "", own)
        other, theirs, there = json.loads(found)
        shares_ranks = not set(theirs).isdisjoint(ranks)
    except (RuntimeError, ValueError, TypeError):
        return  # a store that can not compare, or that somebody else writes: the group only waits longer
    if theirs == list(ranks) or not shares_ranks:
        return
    from tpurun.errors import CollectiveMismatchError

    raise CollectiveMismatchError(
        f"group {name}: rank {rank} made new_group({_shown(ranks)}){_at(site)}, "
        f"rank {other} made new_group({_shown(theirs)}){_at(there)}; "
        "all ranks must make the same groups in the same order",
        (),
    )


_SHOWN = 16


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[: _SHOWN // 2]))}, .. {len(ranks)} ranks]"


def _at(site: str) -> str:
    return f" at {site}" if site else ""
