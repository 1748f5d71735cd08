"""The rules of chips: the table of what TorchTPU refuses and this device allows, the switch, and names of
``torch.tpu``.

The rules are off by default. ``TPURUN_CHIP_RULES=1`` turns them on from the start, and
``torch.tpu.strict_chip_rules`` at any time, for the whole process. The rules about collectives are applied in
``backend/_chip_collectives.py``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from tpurun import _variables

VARIABLE = "TPURUN_CHIP_RULES"
# TorchTPU's own: with it, functions that are the framework's can be called by programs.
LEGACY = "TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS"
VERSION = "TorchTPU 0.2.0"


@dataclass(frozen=True)
class Rule:
    """One thing that TorchTPU refuses; the error has the type that it has there."""

    name: str
    refused: str
    reason: str
    instead: str
    error: type[Exception] = RuntimeError


RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "set-device-argument",
            "`torch.tpu.set_device` of anything but an int, `tpu` or a `torch.device` (`1.0`, `None`)",
            "there a device is an int, the string 'tpu' or a torch.device",
            "give it one of these, or leave the call out",
            TypeError,
        ),
        Rule(
            "one-device",
            "a device other than `0`, `'tpu'`, `torch.device('tpu')`, `torch.device('tpu:0')` in "
            "`torch.tpu.set_device`, `device`, `get_rng_state`, `set_rng_state`; with `TPURUN_CHIP_RULES=1` "
            "`tpu:1` anywhere",
            "a process has exactly one TPU device there, of index 0, and cannot change it",
            "say 'tpu' on every rank",
            ValueError,
        ),
        Rule(
            "framework-function",
            "calls by others than torch of `torch.tpu.current_device`, `current_stream`, `device`, "
            "`device_count`, `get_rng_state`, `initial_seed`, `is_available`, `set_device`, `set_stream`, "
            "`synchronize`",
            "it is internal there, and only PyTorch itself may call it",
            f"use torch.accelerator, or set {LEGACY}=1, here and there",
        ),
        Rule(
            "absent-name",
            "names that TorchTPU's `torch.tpu` does not have: `memory_allocated`, `empty_cache`, `seed`, ...",
            "torch.tpu has no such name there",
            "use torch.accelerator, or ask hasattr first",
            AttributeError,
        ),
        Rule(
            "stream-query",
            "`torch.tpu.Stream.query`",
            "a stream cannot be asked there whether its work is done",
            "use synchronize(), or ask a torch.tpu.Event",
            NotImplementedError,
        ),
        Rule(
            "first-group",
            "a first process group of fewer ranks than `WORLD_SIZE`",
            "the first group must be of all ranks there",
            "call init_process_group with the whole world, and new_group for its parts",
        ),
        Rule(
            "group-size",
            "a process group whose size does not divide that of the world",
            "the number of chips must be a multiple of a group's size there",
            "make groups of equal size that have all ranks among them",
        ),
        Rule(
            "group-partition",
            "a collective of a group, unless every rank has made one group of that size at the same place in "
            "its list of groups",
            "groups that are incomplete or overlap are not supported in SPMD there",
            "have every rank make the same list of groups, which has each rank once (dist.new_subgroups, "
            "init_device_mesh)",
        ),
        Rule(
            "split",
            "`split_group`",
            "its groups cannot be split there",
            "use new_group",
        ),
        Rule(
            "shrink",
            "`shrink_group`",
            "its groups cannot be shrunk there",
            "start the job again without the rank",
            TypeError,
        ),
        Rule(
            "cpu-tensor",
            "a collective of this backend on CPU tensors",
            "its backend serves tensors on tpu alone there",
            "move the tensor to tpu, or use init_process_group('cpu:gloo,tpu:tpu_dist')",
        ),
        Rule(
            "sparse",
            "collectives of sparse tensors",
            "its tensors are strided there",
            "use to_dense() first",
        ),
        Rule(
            "unsupported",
            "`dist.reduce`, `all_reduce_coalesced`, `all_gather_coalesced`, `gather_into_tensor`, "
            "`monitored_barrier`, `recv` from any rank",
            "its backend does not have this operation there",
            "use all_reduce, all_gather_into_tensor, gather, recv with src, or barrier",
        ),
        Rule(
            "reduce-op",
            "`PREMUL_SUM`; there are `SUM`, `AVG`, `PRODUCT`, `MIN`, `MAX`, `BAND`, `BOR`, `BXOR`",
            "the reduction is not supported there",
            "multiply first, and use ReduceOp.SUM",
        ),
        Rule(
            "uneven-list",
            "`all_gather`, `gather`, `scatter`, `reduce_scatter` between tensors of different shapes",
            "all tensors of such a collective must have the same shape there",
            "pad them to one shape",
        ),
        Rule(
            "all-gather-shape",
            "`all_gather_into_tensor` into another shape than those of `cat` and `stack`, of any size",
            "the output must have the shape of the inputs side by side or stacked there",
            "give the output one of these shapes, and view it afterwards",
        ),
        Rule(
            "reduce-scatter-shape",
            "`reduce_scatter_tensor` from another shape than those of `cat` and `stack`, of any size",
            "the input must have the shape of the outputs side by side or stacked there",
            "view the input in one of these shapes first",
        ),
        Rule(
            "all-to-all-shape",
            "`all_to_all_single` and `all_to_all` between tensors that differ in more than their first "
            "dimension, or, with equal splits, in any",
            "only the first dimension may differ there, and only with uneven splits",
            "give both the same shape but for the first dimension",
        ),
        Rule(
            "barrier-device",
            "`barrier(device_ids=..)` with anything but `[0]`",
            "a process has one device there, of index 0",
            "leave device_ids out",
            NotImplementedError,
        ),
        Rule(
            "barrier-timeout",
            "`barrier` with a timeout of its own",
            "a barrier has no timeout there",
            "leave it out",
            NotImplementedError,
        ),
    )
}

_NAMES_THERE = frozenset(
    [
        "EagerMode",
        "Event",
        "Precision",
        "Stream",
        "allow_excess_precision",
        "compiler",
        "current_device",
        "current_stream",
        "default_generators",
        "default_stream",
        "device",
        "device_count",
        "device_of",
        "distributed",
        "eager_mode",
        "get_amp_supported_dtype",
        "get_device_name",
        "get_device_properties",
        "get_rng_state",
        "initial_seed",
        "is_available",
        "is_initialized",
        "manual_seed",
        "manual_seed_all",
        "ops",
        "precision",
        "set_device",
        "set_eager_mode",
        "set_rng_state",
        "set_stream",
        "stream",
        "synchronize",
        "topology_aware_mesh",
    ]
)
# The names of the same functions in torch.accelerator.
_OF_FRAMEWORK = {
    "current_device": "current_device_index",
    "current_stream": "current_stream",
    "device": "device_index",
    "device_count": "device_count",
    "get_rng_state": "random.get_rng_state",
    "initial_seed": "random.initial_seed",
    "is_available": "is_available",
    "set_device": "set_device_index",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}
_FROM_TORCH_2_13 = ("get_rng_state", "initial_seed")

_chosen: bool | None = None


def are_on() -> bool:
    """Whether this process is as strict as chips."""
    return bool(_variables.switch(VARIABLE)) if _chosen is None else _chosen


def refuse(name: str, call: str, expected: str, given: str) -> Exception:
    """The error of a rule."""
    rule = RULES[name]
    return rule.error(
        f"tpurun: {call}: expected {expected}, given {given}; {VERSION} refuses it: {rule.reason}; "
        f"{rule.instead} (chip rule {name}; {VARIABLE}=0 allows it here)"
    )


def check_group(size: int, is_first: bool) -> None:
    """Refuse a process group that chips would not have."""
    world = size if is_first else _world_size()
    if is_first and os.environ.get("WORLD_SIZE", str(size)) != str(size):
        ranks = os.environ["WORLD_SIZE"]
        raise refuse("first-group", "init_process_group", f"world_size={ranks} (WORLD_SIZE)", str(size))
    if world % size != 0:
        raise refuse("group-size", "new_group", f"a size that divides the {world} ranks", f"{size} ranks")


def _world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size()


def begin() -> bool:
    """Apply the rules to what there is in this process by now; returns whether they are on. Repeatable."""
    is_on = are_on()
    for apply in _followers:
        apply(is_on)
    return is_on


_followers: list[Callable[[bool], None]] = []


def follow(apply: Callable[[bool], None]) -> None:
    """Have `apply` called with whether the rules are on, whenever they begin to count or may have changed."""
    if apply not in _followers:
        _followers.append(apply)


class Switch:
    """``torch.tpu.strict_chip_rules``: true when the rules are on.

    ``torch.tpu.strict_chip_rules(True)`` and ``= True`` turn them on, for all threads;
    ``with torch.tpu.strict_chip_rules():`` does so for a block.
    """

    def __init__(self, before: bool | None = None) -> None:
        self._before = [before]

    def __bool__(self) -> bool:
        return are_on()

    def __repr__(self) -> str:
        return f"<torch.tpu.strict_chip_rules: {'on' if self else 'off'}>"

    def __call__(self, mode: bool = True) -> Switch:
        before = _chosen
        choose(mode)
        return Switch(before)

    def __enter__(self) -> Switch:
        if self is switch:  # without a call
            self._before.append(_chosen)
            choose(True)
        return self

    def __exit__(self, *_: object) -> None:
        choose(self._before.pop())


def choose(mode: bool | None) -> None:
    """Turn the rules on or off; None leaves it to the environment."""
    global _chosen
    if mode is not None and not isinstance(mode, (bool, Switch)):
        raise TypeError(f"torch.tpu.strict_chip_rules: expected True or False, given {mode!r}")
    _chosen = None if mode is None else bool(mode)
    begin()


switch = Switch()


def check_name(name: str, frame: FrameType) -> None:
    """Refuse a name of ``torch.tpu`` that is not there on chips."""
    if name.startswith("_") or name in _NAMES_THERE or name == "strict_chip_rules":
        return
    if not _is_framework(frame):
        raise refuse("absent-name", f"torch.tpu.{name}", f"one of {len(_NAMES_THERE)} names", repr(name))


def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is on chips, where only the framework may call some, and arguments are checked."""
    check = _ARGUMENTS.get(name)
    if name not in _OF_FRAMEWORK and check is None:
        return function

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        is_ours = _is_framework(sys._getframe(1))
        if are_on() and not is_ours:
            if check is not None:
                check(name, *arguments, **named)
            _check_caller(name)
        return function(*arguments, **named)

    return checked


def _check_caller(name: str) -> None:
    if name not in _OF_FRAMEWORK or os.environ.get(LEGACY, "0").lower() in ("1", "true", "yes", "on"):
        return
    import torch

    if name in _FROM_TORCH_2_13 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return
    instead = f"torch.accelerator.{_OF_FRAMEWORK[name]}"
    raise refuse("framework-function", f"torch.tpu.{name}", instead, "a call that is not PyTorch's")


def _is_framework(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__") or ""
    return module in ("torch", "tpurun") or module.startswith(("torch.", "tpurun."))


def _check_set_device(name: str, device: Any = None) -> None:
    import torch

    if not isinstance(device, (int, str, torch.device)):
        raise refuse("set-device-argument", f"torch.tpu.{name}", "0 or 'tpu'", repr(device))
    _check_one_device(name, device)


def _check_one_device(name: str, device: Any) -> None:
    import torch

    if isinstance(device, int):
        is_own = device == 0
    elif isinstance(device, str):
        is_own = device == "tpu"  # no index is taken there in a string
    else:
        is_own = isinstance(device, torch.device) and device.type == "tpu" and device.index in (None, 0)
    if not is_own:
        raise refuse("one-device", f"torch.tpu.{name}", "0 or 'tpu'", repr(device))


def _check_device(name: str, device: Any = None) -> None:
    if device is not None and not (isinstance(device, int) and device < 0):
        _check_one_device(name, device)


def _check_get_rng_state(name: str, device: Any = "tpu") -> None:
    _check_one_device(name, device)


def _check_set_rng_state(name: str, new_state: Any = None, device: Any = "tpu") -> None:
    _check_one_device(name, device)


_ARGUMENTS: dict[str, Callable[..., None]] = {
    "device": _check_device,
    "set_device": _check_set_device,
    "get_rng_state": _check_get_rng_state,
    "set_rng_state": _check_set_rng_state,
}


def strict(kind: type[ModuleType]) -> type[ModuleType]:
    """The class of the module ``torch.tpu`` while the rules are on."""

    class Strict(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            check_name(name, sys._getframe(1))
            found = super().__getattribute__(name)
            return guarded(name, found) if name in _OF_FRAMEWORK or name in _ARGUMENTS else found

    Strict.__name__ = Strict.__qualname__ = kind.__name__
    return Strict


def check_stream_query() -> None:
    """Refuse to ask a stream."""
    if are_on():
        raise refuse("stream-query", "torch.tpu.Stream.query", "synchronize()", "a question")
