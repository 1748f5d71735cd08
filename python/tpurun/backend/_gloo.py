"""Groups that a program asks Gloo for, or nobody: ``tpurun --backend-for gloo`` makes them of this backend.

The names stay those of Gloo: ``get_backend()`` answers ``gloo``, which libraries compare with, and
``isinstance(.., ProcessGroupGloo)`` holds. Only what serves the group is another one. Groups that other
backends serve are noted for the launcher, which sees nothing of what happens in them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

from tpurun import _extension
from tpurun.backend import _creation, _foreign

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Backend

VARIABLE = "TPURUN_BACKEND_FOR"
# As libraries write them: without a backend torch means Gloo where there are only CPUs.
NAMES = ("gloo", "undefined", "")


def is_ours() -> bool:
    """Whether this backend serves groups of Gloo.

    Raises:
        ValueError: The variable has another value than ``gloo``.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "gloo"):
        raise ValueError(f"{VARIABLE}: expected gloo, or nothing, given {value}")
    return value == "gloo"


def take_over(c10d: Any) -> None:
    """Decide, whenever a program makes a group of Gloo, who serves it; and note groups of others."""
    # Torch before 2.15 makes its groups of Gloo where nobody can take part.
    can_serve = hasattr(c10d, "_create_gloo_process_group")
    if can_serve:
        c10d.Backend._plugins["GLOO"] = c10d.Backend._BackendPlugin(_create, True)
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def make_and_note(*arguments: Any, **options: Any) -> Any:
        if is_ours() and not can_serve:
            raise ValueError(f"{VARIABLE}: expected torch 2.15 or later, given {c10d.torch.__version__}")
        made = make(*arguments, **options)
        with contextlib.suppress(Exception):
            _note_served(c10d, made[0])
        return made

    c10d._new_process_group_helper = make_and_note
    for name in ("_unregister_process_group", "_unregister_all_process_groups"):
        if (forget := getattr(c10d, name, None)) is not None:
            setattr(c10d, name, _noting(c10d, forget))


def _create(options: Any, pg_options: Any) -> Backend:
    from torch.distributed import distributed_c10d as c10d

    native = _extension.load() if is_ours() else None
    # Its ranks come and go, which only Gloo can.
    if native is None or getattr(options, "enable_reconfigure", False):
        _foreign.note(options.group_id, "gloo", options.group_size)  # before it waits for the other ranks
        return c10d._create_gloo_process_group(options, pg_options)
    # Options for Gloo mean nothing here, and Gloo ignores them, too.
    survivors = pg_options if isinstance(pg_options, native.ProcessGroup) else None
    return _creation.create(options, survivors, _kind(native))


def _kind(native: Any) -> Any:
    """A class of groups that pass for those of Gloo."""
    global _for_gloo
    if _for_gloo is None:
        from torch.distributed import distributed_c10d as c10d

        class ProcessGroupForGloo(native.ProcessGroup):
            @property
            def __class__(self) -> Any:
                return c10d.ProcessGroupGloo

            def __getattr__(self, name: str) -> Any:
                raise AttributeError(
                    f"{name}: expected what every backend has, given an attribute of ProcessGroupGloo; "
                    f"this group is of tpu_dist ({VARIABLE}=gloo)"
                )

        _for_gloo = ProcessGroupForGloo
    return _for_gloo


_for_gloo: Any = None


def _noting(c10d: Any, forget: Any) -> Any:
    def forget_and_note(*arguments: Any) -> Any:
        done = forget(*arguments)
        with contextlib.suppress(Exception):
            _foreign.forget_others(set(c10d._world.pg_names.values()))
        return done

    return forget_and_note


def _note_served(c10d: Any, group: Any) -> None:
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return
    backends = {group._get_backend(device).name() for device in group._device_types} - {"tpu_dist"}
    if backends:
        _foreign.note(group.group_name, ", ".join(sorted(backends)), group.size())
