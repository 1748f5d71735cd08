"""Eager modes: when operations run, and what waits for a result that is not there yet.

Operations run one after the other on the thread that calls them. Collectives may go on meanwhile: in
``DEFER_NEVER`` (Strict, the default) what needs their result waits for it; in
``DEFER_NEVER_AND_LAUNCH_BLOCKING`` (Debug) ``Work.wait()`` does, so that an error is raised where it was
waited for. ``TORCH_TPU_LAUNCH_BLOCKING=1`` begins in Debug.

In ``DEFER_AND_FUSE`` (Fused) pointwise operations are recorded. They run together, with the bits of Strict,
before any other operation runs and before memory is looked at. ``TORCH_TPU_DEFER_AND_FUSE=1`` begins in
Fused.

In Debug, a result with NaN or Inf that was computed from finite numbers is a warning at that line, and so is
a large one that comes of spreading a small one. ``TORCH_TPU_ENABLE_DEBUG_CHECKS`` decides for all modes: 1
on, 0 off.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
from types import TracebackType
from typing import Any

import torch

from tpurun import _C as _native

_TRUE = ("1", "true", "on", "yes")


class EagerMode(enum.IntEnum):
    """The modes, under TorchTPU's names."""

    DEFER_NEVER = 0
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 1
    DEFER_AND_FUSE = 2


def known(mode: object) -> EagerMode:
    """The mode of that value or name; ValueError when there is none."""
    try:
        found = EagerMode[mode] if isinstance(mode, str) else EagerMode(mode)
    except (KeyError, ValueError):
        names = ", ".join(one.name for one in EagerMode)
        raise ValueError(f"tpurun: expected an eager mode ({names}), got {mode!r}") from None
    return found


_has_told = False


def _tell_that_modes_are_not_compiled() -> None:
    global _has_told
    if not _has_told:
        _has_told = True
        print(
            "tpurun: a compiled function sets an eager mode; it runs operation by operation there, because a "
            "program has no mode",
            file=sys.stderr,
        )


# As torch.compiler.assume_constant_result does it, which would import the compiler: tracing then calls it.
_tell_that_modes_are_not_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _watch_pointers() -> None:
    """Have what is deferred run before Python gets a pointer to memory, which no operation is."""

    def watch(owner: type, name: str) -> None:
        asked = getattr(owner, name)

        @functools.wraps(asked)
        def after_all(self: Any, *args: Any, **kwargs: Any) -> Any:
            _native.run_deferred()
            return asked(self, *args, **kwargs)

        setattr(owner, name, after_all)

    watch(torch.Tensor, "data_ptr")
    watch(torch.Tensor, "untyped_storage")
    watch(torch.Tensor, "__dlpack__")
    watch(torch.UntypedStorage, "data_ptr")


def choose(mode: EagerMode) -> None:
    """Choose the mode of the process."""
    if mode is EagerMode.DEFER_AND_FUSE:
        _watch_pointers()
    _native.set_process_mode(int(mode))


class set_eager_mode:
    """Chooses the mode of this thread for a block; the innermost counts.

    Refused within ``torch.compile``: Dynamo then leaves the function as it is, and says so with
    ``fullgraph=True``.
    """

    def __init__(self, mode: EagerMode | str) -> None:
        self.mode = known(mode)

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            _tell_that_modes_are_not_compiled()
            raise RuntimeError(
                "tpurun: expected set_eager_mode outside of torch.compile; compiled code has no mode"
            )
        if self.mode is EagerMode.DEFER_AND_FUSE:
            _watch_pointers()
        _native.push_thread_mode(int(self.mode))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _native.pop_thread_mode()


_IN_DEBUG, _NEVER, _ALWAYS = range(3)  # when results are looked at


def begin() -> None:
    """Set what the environment says."""

    def said(name: str) -> str:
        return os.environ.get(f"TORCH_TPU_{name}", os.environ.get(f"TPU_{name}", "")).lower()

    def is_on(name: str) -> bool:
        return said(name) in _TRUE

    if is_on("DEFER_AND_FUSE"):
        choose(EagerMode.DEFER_AND_FUSE)
    if is_on("LAUNCH_BLOCKING"):
        choose(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING)
    if said("ENABLE_DEBUG_CHECKS"):
        _native.set_debug_checks(_ALWAYS if is_on("ENABLE_DEBUG_CHECKS") else _NEVER)
