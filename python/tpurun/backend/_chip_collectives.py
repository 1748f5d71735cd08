"""Refuses the collectives that TorchTPU refuses, while the rules of ``_chip_rules`` are on.

Every collective passes torch's dispatcher, whether dist, DDP, DTensor or compiled code asks for it. There
each operation is looked at before it goes to the backend.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.library import Library

from tpurun import _chip_rules, _extension
from tpurun.backend import NAMES, _shortcuts

_KEY = "BackendSelect"  # every operation passes it, whatever its tensors and modes are
_library: Library | None = None


def _supports_splitting(_group: Any) -> bool:
    if sys._getframe(1).f_code.co_name == "split_group":
        given = "a group to be split"
        raise _chip_rules.refuse("split", "split_group", "new_group", given)
    return False


def _shrink(_group: Any, excluded: Any, *_others: Any) -> Any:
    raise _chip_rules.refuse("shrink", "shrink_group", "a group as it is", f"one without {[*excluded]}")


def apply(is_on: bool) -> None:
    """Look at collectives from now on, or no longer. Repeatable."""
    global _library
    _groups.watch()
    if is_on and _library is None:
        _shortcuts.remove()
        native = _extension.load()
        native.ProcessGroup.supports_splitting = property(_supports_splitting)
        native.ProcessGroup.shrink = _shrink
        _library = Library("c10d", "IMPL")
        for name, (called, check) in _CHECKS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                _library.impl(name, _checked(packet.default, called, check), _KEY)
    elif not is_on and _library is not None:
        _library._destroy()
        _library = None
        native = _extension.load()
        del native.ProcessGroup.supports_splitting, native.ProcessGroup.shrink
        _shortcuts.install(native.Shortcut)


class _Call:
    """A collective that was asked for, under the name that it has in torch.distributed."""

    def __init__(self, name: str, operation: Any, arguments: Sequence[Any]) -> None:
        self.name = name
        names = [argument.name for argument in operation._schema.arguments]
        self.given = dict(zip(names, arguments, strict=False))
        self.group = dist.ProcessGroup.unbox(self.given["process_group"])
        self.size = self.group.size()

    def tensors(self) -> Iterator[torch.Tensor]:
        for one in self.given.values():
            yield from _tensors_in(one)

    def is_ours(self, device: torch.device) -> bool:
        """Whether this backend serves the device in this group."""
        try:
            backend = self.group._get_backend(torch.device(device.type))
        except RuntimeError:
            return False  # torch will say so
        backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        native = _extension.loaded()
        return native is not None and isinstance(backend, native.ProcessGroup)

    def refuse(self, rule: str, expected: str, given: object) -> Exception:
        return _chip_rules.refuse(rule, self.name, expected, str(given))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _checked(operation: Any, name: str, check: Callable[[_Call], None]) -> Callable[..., Any]:
    without = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def look(*arguments: Any) -> Any:
        _look(_Call(name, operation, arguments), check)
        with torch._C._ExcludeDispatchKeyGuard(without):
            return operation(*arguments)

    # The frame is part of torch's dispatch to those who look for the program's line.
    torch_home = os.path.dirname(torch.__file__)
    here = os.path.join(torch_home, os.path.relpath(__file__, torch_home))
    look.__code__ = look.__code__.replace(co_filename=here)
    return look


def _look(call: _Call, check: Callable[[_Call], None]) -> None:
    tensors = list(call.tensors())
    devices = {one.device.type for one in tensors}
    if not any(call.is_ours(torch.device(kind)) for kind in devices & {"cpu", "tpu"}):
        return
    if "cpu" in devices and call.name not in ("barrier", "monitored_barrier"):
        if _is_for_objects():
            return  # there their bytes go through tensors on tpu
        raise call.refuse("cpu-tensor", "tensors on tpu", "tensors on cpu")
    for one in tensors:
        if one.layout != torch.strided:
            raise call.refuse("sparse", "torch.strided", one.layout)
    check(call)
    _groups.check(call)


def _is_for_objects() -> bool:
    """Whether a function that takes Python objects, or one of tpurun's own, made the tensors."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module == "torch.distributed.distributed_c10d" and "object" in frame.f_code.co_name:
            return True
        if module.startswith("tpurun.") and module != __name__:
            return not module.startswith("tpurun.tpu.ops")
        if not (module == __name__ or module.startswith("torch.")):
            return False
        frame = frame.f_back
    return False


class _Groups:
    """The groups that this process has seen made, in order.

    On chips the k-th groups of all ranks are made together: they must be of one size and have each rank once.
    """

    def __init__(self) -> None:
        self._made: dict[int, list[tuple[int, ...]]] = {}  # by rank
        self._place: dict[tuple[int, ...], int] = {}  # of the newest group of these ranks
        self._is_watching = False
        self._are_all_seen = True
        self._world: Any = None

    def watch(self) -> None:
        """See the groups that are made from now on."""
        from torch.distributed import distributed_c10d

        inner = getattr(distributed_c10d, "_new_group_with_tag", None)
        if self._is_watching or inner is None:
            return
        self._is_watching = True
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def make(*arguments: Any, **named: Any) -> Any:
            made = inner(*arguments, **named)
            self._remember(signature.bind(*arguments, **named).arguments)
            return made

        distributed_c10d._new_group_with_tag = make

    def _remember(self, given: dict[str, Any]) -> None:
        if self._world is not dist.group.WORLD:
            self._made, self._place, self._world = {}, {}, dist.group.WORLD
            self._are_all_seen = True
        backend, ranks = given.get("backend"), given.get("ranks")
        if backend is not None and not any(name in NAMES for name in re.split("[:,]", str(backend))):
            return
        # Then only its members take part, and nobody else hears of it.
        self._are_all_seen &= not given.get("use_local_synchronization", False)
        size = dist.get_world_size()
        members = tuple(sorted(range(size) if ranks is None else ranks))
        if len(members) == size:
            return
        for rank in members:
            self._made.setdefault(rank, []).append(members)
        self._place[members] = len(self._made[members[0]]) - 1

    def check(self, call: _Call) -> None:
        """Refuse a collective of a group that could not have been made."""
        if not self._are_all_seen or self._world is not dist.group.WORLD or call.group is dist.group.WORLD:
            return
        members = tuple(sorted(dist.get_process_group_ranks(call.group)))
        place = self._place.get(members)
        if place is None:
            return  # made before the rules were on
        together = [self._made.get(rank, [])[place : place + 1] for rank in range(dist.get_world_size())]
        missing = [rank for rank, groups in enumerate(together) if not groups]
        others = [groups[0] for groups in together if groups]
        is_whole = all(len(one) == len(members) and others.count(one) == len(one) for one in others)
        if missing or not is_whole:
            lists = ", ".join(str([*one]) for one in dict.fromkeys(others))
            without = f", and none with rank {', '.join(map(str, missing))}" if missing else ""
            raise call.refuse(
                "group-partition", "groups of one size that have each rank once", lists + without
            )


_groups = _Groups()


def _shape(tensor: torch.Tensor) -> list[int]:
    return [*tensor.shape]


def _unsupported(call: _Call) -> None:
    given = "recv from any rank" if call.name == "recv" else call.name
    raise call.refuse("unsupported", "an operation that its backend has", given)


def _nothing(call: _Call) -> None:
    """There is nothing more to look at."""


_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def _check_reduction(call: _Call) -> None:
    op = dist.ReduceOp.unbox(call.given["reduce_op"])
    kind = next(
        (name for name in (*_REDUCTIONS, "PREMUL_SUM") if op == getattr(dist.ReduceOp, name)), str(op)
    )
    if kind not in _REDUCTIONS:
        raise call.refuse("reduce-op", "one of " + ", ".join(_REDUCTIONS), kind)


def _check_even(call: _Call, tensors: Sequence[torch.Tensor], single: torch.Tensor) -> None:
    shapes = [_shape(one) for one in (*tensors, single)]
    uneven = next((shape for shape in shapes if shape != shapes[0]), None)
    if uneven is not None:
        raise call.refuse("uneven-list", f"all tensors of shape {shapes[0]}", uneven)


def _all_gather(call: _Call) -> None:
    for outputs, single in zip(call.given["output_tensors"], call.given["input_tensors"], strict=False):
        _check_even(call, outputs, single)


def _gather(call: _Call) -> None:
    if call.group.rank() == call.given["root_rank"]:
        _all_gather(call)


def _scatter(call: _Call) -> None:
    if call.group.rank() == call.given["root_rank"]:
        _check_even(call, call.given["input_tensors"][0], call.given["output_tensors"][0])


def _reduce_scatter(call: _Call) -> None:
    for inputs, single in zip(call.given["input_tensors"], call.given["output_tensors"], strict=False):
        _check_reduction(call)
        _check_even(call, inputs, single)


def _shapes_of_whole(part: torch.Tensor, size: int) -> tuple[list[int], list[int]]:
    """Those of all parts side by side, and stacked."""
    beside = [size * part.shape[0], *part.shape[1:]] if part.dim() else [size]
    return beside, [size, *part.shape]


def _check_whole(call: _Call, rule: str, whole: torch.Tensor, part: torch.Tensor) -> None:
    beside, stacked = _shapes_of_whole(part, call.size)
    if _shape(whole) not in (beside, stacked):
        expected = f"{beside} or {stacked} for {call.size} ranks with {_shape(part)}"
        raise call.refuse(rule, expected, _shape(whole))


def _all_gather_into_tensor(call: _Call) -> None:
    for whole, part in _pairs(call, ("output_tensor", "input_tensor"), ("outputs", "inputs")):
        _check_whole(call, "all-gather-shape", whole, part)


def _reduce_scatter_tensor(call: _Call) -> None:
    for part, whole in _pairs(call, ("output_tensor", "input_tensor"), ("outputs", "inputs")):
        _check_reduction(call)
        _check_whole(call, "reduce-scatter-shape", whole, part)


def _pairs(call: _Call, *names: tuple[str, str]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs with their inputs, of an operation on one tensor or on lists of them."""
    output, inputs = next(pair for pair in names if pair[0] in call.given)
    yield from zip(_tensors_in(call.given[output]), _tensors_in(call.given[inputs]), strict=False)


def _all_to_all_single(call: _Call) -> None:
    output, given = call.given["output"], call.given["input"]
    splits = [call.given["output_split_sizes"], call.given["input_split_sizes"]]
    is_even = all(len(set(sizes)) <= 1 for sizes in splits)
    if is_even and output.shape != given.shape:
        raise call.refuse("all-to-all-shape", f"an output of shape {_shape(given)}", _shape(output))
    _check_trailing(call, [given, output])


def _all_to_all(call: _Call) -> None:
    _check_trailing(call, [*call.given["input_tensors"], *call.given["output_tensors"]])


def _check_trailing(call: _Call, tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    for one in tensors:
        if one.dim() != first.dim() or one.shape[1:] != first.shape[1:]:
            expected = f"shapes that differ from {_shape(first)} in the first dimension at most"
            raise call.refuse("all-to-all-shape", expected, _shape(one))


def _barrier(call: _Call) -> None:
    device_ids, timeout = call.given["device_ids"], call.given.get("timeout", -1)
    if [*device_ids] not in ([], [0]):
        raise call.refuse("barrier-device", "no device_ids", [*device_ids])
    if timeout != -1:
        raise call.refuse("barrier-timeout", "no timeout", f"{timeout} ms")


_CHECKS: dict[str, tuple[str, Callable[[_Call], None]]] = {
    "_allgather_base_": ("all_gather_into_tensor", _all_gather_into_tensor),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", _reduce_scatter_tensor),
    "allgather_": ("all_gather", _all_gather),
    "allgather_coalesced_": ("all_gather_coalesced", _unsupported),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor", _all_gather_into_tensor),
    "allreduce_": ("all_reduce", _check_reduction),
    "allreduce_coalesced_": ("all_reduce_coalesced", _unsupported),
    "alltoall_": ("all_to_all", _all_to_all),
    "alltoall_base_": ("all_to_all_single", _all_to_all_single),
    "barrier": ("barrier", _barrier),
    "broadcast_": ("broadcast", _nothing),
    "gather_": ("gather", _gather),
    "gather_into_tensor_": ("gather_into_tensor", _unsupported),
    "monitored_barrier_": ("monitored_barrier", _unsupported),
    "recv_": ("recv", _nothing),
    "recv_any_source_": ("recv", _unsupported),
    "reduce_": ("reduce", _unsupported),
    "reduce_scatter_": ("reduce_scatter", _reduce_scatter),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", _reduce_scatter_tensor),
    "scatter_": ("scatter", _scatter),
    "send": ("send", _nothing),
}
