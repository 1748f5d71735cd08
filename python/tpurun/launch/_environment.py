"""Variables that a program assigns before it imports torch, in a rank that was forked with torch imported.

An interpreter of its own would import torch after the assignment, and torch would read it. So a forked rank
hides torch until the program imports it, and looks then at what the program has assigned: some variables can
still be applied, and one line names those that were read before the fork.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.abc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tpurun.launch import _threads

# Read by C and C++ when torch is loaded, which nobody can watch.
_READ_BY_LIBRARIES = re.compile(
    r"(OMP|GOMP|KMP|MKL|OPENBLAS)_|TORCH_(CPP_LOG_LEVEL|ALLOW_TF32_CUBLAS_OVERRIDE)$|ATEN_CPU_CAPABILITY$"
)
# Imports read these, too, but what they stand for is looked up again when it is needed.
_READ_AGAIN = frozenset({"HOME", "LNAME", "LOGNAME", "PATH", "TORCHINDUCTOR_CACHE_DIR", "USER", "USERNAME"})
# Variables that imported modules have read in the process that ranks are forked from.
_read: set[str] = set()
_FROM_TORCH = re.compile(r"^[ \t]*from[ \t]+(torch(?:\.\w+)+)[ \t]+import\b", re.MULTILINE)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Notes which variables are read within."""
    kind: Any = type(os.environ)
    get = kind.__getitem__

    def get_and_note(self: Any, name: Any) -> Any:
        if isinstance(name, str):
            _read.add(name)
        return get(self, name)

    kind.__getitem__ = get_and_note
    try:
        yield
    finally:
        kind.__getitem__ = get


def at_first_import_of_torch(source: str, then: Callable[[], None]) -> None:
    """Hides torch until somebody imports it, and calls `then` when torch is back.

    The `source` of the program says which modules of torch it imports without a word of torch itself.
    """
    names = ["torch", *_FROM_TORCH.findall(source)]
    hidden = {name: sys.modules.pop(name) for name in dict.fromkeys(names) if name in sys.modules}
    sys.meta_path.insert(0, _FirstImport(hidden, then))


class _FirstImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules that were imported before, once."""

    def __init__(self, hidden: dict[str, ModuleType], then: Callable[[], None]) -> None:
        self._hidden = hidden
        self._specs = {name: module.__spec__ for name, module in hidden.items()}
        self._then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Some only ask whether torch is installed, and where.
        if (spec := self._specs.get(name)) is None:
            return None
        spec = copy.copy(spec)
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        for name, one in self._hidden.items():
            one.__spec__ = self._specs[name]
            sys.modules.setdefault(name, one)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
            self._then()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_specs" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._specs["torch"].loader, name)


def apply(before: dict[str, str]) -> None:
    """Does what torch would have done with the variables that differ from those from before."""
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    applied: set[str] = set()
    for names, act in _ACTIONS:
        mine = {name for name in changed if names.fullmatch(name)}
        if not mine:
            continue
        applied |= mine
        try:
            act()
        except Exception as error:
            # An interpreter of its own would stop at the import of torch.
            print(f"tpurun: {', '.join(sorted(mine))}: {type(error).__name__}: {error}", file=sys.stderr)
    missed = {name for name in changed - applied - _READ_AGAIN if _was_read(name)}
    # All ranks of a program assign the same.
    if missed and os.environ.get("ROLE_RANK", "0") == "0":
        print(_missed_line(sorted(missed)), file=sys.stderr, flush=True)


def _was_read(name: str) -> bool:
    return name in _read or _READ_BY_LIBRARIES.match(name) is not None


def _missed_line(names: list[str]) -> str:
    them = "it" if len(names) == 1 else "them"
    return (
        f"tpurun: {', '.join(names)}: the program assigns {them} before it imports torch, but ranks are "
        f"forked from a process that has imported torch and read {them}; use --spawn, or set {them} for "
        "tpurun itself"
    )


def _apply_threads() -> None:
    import torch

    threads = _threads.threads_in("MKL_NUM_THREADS") if torch.backends.mkl.is_available() else None
    _threads.use_threads_of_environment(threads)


def _apply_debug_level() -> None:
    from torch import distributed

    if distributed.is_available():
        distributed.set_debug_level_from_env()


def _apply_logs() -> None:
    from torch import _logging

    _logging._internal._init_logs()


def _apply_jit() -> None:
    from torch.jit import _state

    _state._enabled.__init__()


def _apply_compile_switch() -> None:
    # An import that comes later reads the variable itself.
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        config.disable = os.environ.get("TORCH_COMPILE_DISABLE", "0") == "1"


def _apply_temporary_folder() -> None:
    if (tempfile := sys.modules.get("tempfile")) is not None:
        tempfile.tempdir = None


def _is_read_when_used() -> None:
    """The device and groups read theirs when they begin, which is after this."""


_ACTIONS = [
    (re.compile(names), act)
    for names, act in (
        (r"(OMP|MKL|OPENBLAS)_NUM_THREADS", _apply_threads),
        (r"TORCH_DISTRIBUTED_DEBUG", _apply_debug_level),
        (r"TORCH_LOGS(_FORMAT|_OUT|_TRACE_ID_FILTER)?|TORCH_D?TRACE", _apply_logs),
        (r"PYTORCH_JIT", _apply_jit),
        (r"TORCH_COMPILE_DISABLE", _apply_compile_switch),
        (r"TMPDIR|TEMP|TMP", _apply_temporary_folder),
        (r"TPURUN_\w+", _is_read_when_used),
    )
]
