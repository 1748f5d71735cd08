"""How a process comes to have device ``tpu``, and why a program that never says ``tpu`` does not get it.

Once torch knows a device of that name, it is the accelerator of the process, and programs that are written
for whatever accelerator there is change what they do. So the name is claimed by whoever asks for it: a
program that uses it as a device, as far as ``_uses`` can see, the first use of ``torch.tpu`` that is no mere
question, ``tpurun --device tpu``, or ``TPURUN_DEVICE=1``. ``TPURUN_DEVICE=0`` keeps it from everybody.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tpurun import _chip_rules, _extension, _torch_tpu, _variables

SWITCH = "TPURUN_DEVICE"
# As many as torch can count.
MAX_DEVICES = 127
_is_claimed = False
# Where ranks are forked from, the device is theirs to claim.
is_left_to_ranks = False


def announce() -> None:
    """Put ``torch.tpu`` in place, which claims the device when something of it is used; cheap."""
    if is_left_to_ranks:
        return
    import torch

    if hasattr(torch, "tpu") or _torch_tpu.is_in_charge():
        return
    global _seed_at_start
    _seed_at_start = torch.initial_seed()
    placeholder = _Unclaimed("torch.tpu")
    torch.tpu = placeholder
    sys.modules.setdefault("torch.tpu", placeholder)
    if _variables.switch(SWITCH):
        claim()


def _is_off() -> bool:
    return _variables.switch(SWITCH) is False


def claim_if_named(arguments: list[str], text: str | None = None) -> None:
    """Claim the device when the program uses it, and later when one of its modules does that it imports.

    Its ``text`` is that of the file that runs as ``__main__``, unless given.
    """
    if _is_off() or _is_claimed or is_left_to_ranks or not _is_built():
        return
    from tpurun.device._uses import Program

    program = Program(list(arguments), dict(os.environ))
    source = _text_of_program() if text is None else text.encode()
    if program.says_device() or any(_uses_device(program, text) for text in (source, *_own_texts())):
        claim()
    else:
        watcher = _OwnImports(program)
        # It finds what the one that looks through sys.path finds, which comes last.
        places = [at for at, one in enumerate(sys.meta_path) if one is importlib.machinery.PathFinder]
        sys.meta_path.insert(places[0] if places else len(sys.meta_path), watcher)


def _uses_device(program: Any, text: bytes) -> bool:
    """Whether the program uses the device when this module is one of its own."""
    try:
        return program.add(text)
    except Exception:
        # No text may raise an exception here, because Python could run the program all the same.
        return False


# The last module that was imported before ranks were forked.
_last_before: str | None = None


def remember_modules() -> None:
    """Notes that the modules imported so far are none of the program's."""
    global _last_before
    _last_before = next(reversed(sys.modules), None)


def _own_texts() -> Iterator[bytes]:
    """Those of modules that the program has imported already."""
    # Ranks that look at each of a thousand modules get a copy of the memory that each lies in.
    newest = itertools.takewhile(lambda item: item[0] != _last_before, reversed(sys.modules.items()))
    for name, module in list(newest):
        if name not in ("__main__", "__mp_main__") and _is_own(getattr(module, "__file__", None)):
            yield _text_of(module)


def _is_own(path: object) -> bool:
    """Whether a module is the program's: a text that was neither installed nor comes with the interpreter."""
    if not isinstance(path, str) or not path.endswith(".py"):
        return False
    return not any(part in path for part in _INSTALLED) and not path.startswith(_homes())


_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def _homes() -> tuple[str, ...]:
    """Where modules of the interpreter and of tpurun are. To ask for it takes a third of a millisecond."""
    return (sysconfig.get_path("stdlib") + os.sep, _PACKAGE + os.sep)


class _OwnImports(importlib.abc.MetaPathFinder):
    """Reads modules of the program before they run, until the device is claimed."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._seen: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        origin = None if spec is None or not spec.has_location else spec.origin
        if origin is not None and origin not in self._seen and _is_own(origin):
            self._seen.add(origin)
            self._read(origin)
        return spec

    def _read(self, path: str) -> None:
        if not _is_claimed and not _is_off() and _uses_device(self._program, _text_in(path)):
            claim()
        if _is_claimed and self in sys.meta_path:
            sys.meta_path.remove(self)


def claim_if_interpreter_names_it() -> None:
    """The same for a program that was given to the interpreter, as a file, a module or a text."""
    arguments = sys.argv[1:]
    if sys.argv[:1] == ["-c"]:
        claim_if_named(arguments, sys.orig_argv[-len(sys.argv)].removeprefix("-c"))
    else:
        claim_if_named(arguments)


def claim() -> None:
    """Give this process device ``tpu``; does nothing when it has it."""
    global _is_claimed
    if _is_claimed:
        return
    if _is_off():
        raise RuntimeError(_why_off())
    if _torch_tpu.is_in_the_way():
        raise RuntimeError(_torch_tpu.why_in_the_way())
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(
            f"tpurun: expected that nobody has claimed PyTorch's device for out-of-tree backends, but it is "
            f"{taken!r} here; uninstall that backend, or set {SWITCH}=0 to run without device tpu"
        )
    from tpurun.backend import _backend

    native = _extension.load()
    native.claim_device(_devices(), _memory_bytes())
    _is_claimed = True
    # The others count on what this process has begun.
    atexit.register(native.settle_device)
    # From here on it is the accelerator, even of a torch that could have CUDA.
    torch.utils.rename_privateuse1_backend("tpu")
    # The module needs the name when it is imported.
    from tpurun import tpu as module

    sys.modules["torch.tpu"] = module
    if isinstance(getattr(torch, "tpu", None), _Unclaimed):
        del torch.tpu
    torch._register_device_module("tpu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _seed(module, torch.initial_seed())
    _backend.serve_device(claim)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        warnings.warn(
            "tpurun: device tpu was first used after init_process_group(): the groups that there are serve "
            f"CPU tensors alone; use torch.tpu before, or set {SWITCH}=1",
            stacklevel=3,
        )


def is_claimed() -> bool:
    """Whether this process has the device."""
    return _is_claimed


# The seed of torch when the program began, and the last one for the device alone with that of torch then.
_seed_at_start: int | None = None
_seed_before: tuple[int, int] | None = None


def _seed(module: ModuleType, of_torch: int) -> None:
    """Seed the generators as if the device had been there when the program seeded torch."""
    if _seed_before is not None and _seed_before[1] == of_torch:
        module.manual_seed_all(_seed_before[0])
    elif _seed_at_start not in (None, of_torch):
        module.manual_seed_all(of_torch)


def _remember_seed(seed: int) -> None:
    global _seed_before
    import torch

    _seed_before = int(seed), torch.initial_seed()


def _can_be_had() -> bool:
    """Whether a claim would succeed."""
    import torch

    is_free = torch._C._get_privateuse1_backend_name() == "privateuseone"
    return not _is_off() and is_free and _is_built()


def _nothing(_device: Any = None) -> None:
    """There is nothing yet that could be waited for or given back."""


# Libraries ask these questions of every accelerator that there is, so they are answered without the device.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "_is_in_bad_fork": lambda: False,
    "current_device": lambda: 0,
    "device_count": lambda: _devices() if _can_be_had() else 0,
    "empty_cache": _nothing,
    "is_available": _can_be_had,
    "is_bf16_supported": lambda _including_emulation=True: _can_be_had(),
    "is_initialized": lambda: False,
    "manual_seed": _remember_seed,
    "manual_seed_all": _remember_seed,
    "memory_allocated": lambda _device=None: 0,
    "synchronize": _nothing,
}


def _answer(name: str) -> Callable[..., Any]:
    """Answers as long as there is no device, also for those who keep the function."""

    def answer(*arguments: Any, **named: Any) -> Any:
        if _is_claimed:
            return getattr(sys.modules["torch.tpu"], name)(*arguments, **named)
        return _ANSWERS[name](*arguments, **named)

    answer.__name__ = answer.__qualname__ = name
    return answer


# The text with which torch refuses a device name that nobody has claimed.
_REFUSED = re.compile(r"device string: '?tpu\b|\(tagged with tpu\b")


def note_on_refusal(error: BaseException) -> str | None:
    """Returns advice where torch refused the name because the program did not show that it uses it."""
    if _is_claimed or is_left_to_ranks or "torch" not in sys.modules:
        return None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RuntimeError) and _REFUSED.search(str(link)):
            return _why_refused()
        link = link.__cause__ or link.__context__
    return None


def _why_refused() -> str:
    if _torch_tpu.is_in_the_way():
        return _torch_tpu.why_in_the_way()
    try:
        if _is_off():
            return _why_off()
    except RuntimeError as error:  # no value of a switch
        return str(error)
    return (
        f"tpurun: nothing in the program showed that it uses device tpu; start it with --device tpu, or with "
        f"{SWITCH}=1, to have it"
    )


def _why_off() -> str:
    said = f"{SWITCH}={os.environ[SWITCH]}"
    return f"tpurun: device tpu is switched off by {said}; unset it, or use --device tpu, to have it"


class _Unclaimed(ModuleType):
    """Stands for ``torch.tpu`` until something of it is used."""

    # Its submodules are found without the device.
    __path__ = (os.path.join(_PACKAGE, "tpu"),)

    def __getattr__(self, name: str) -> Any:
        # Not for those who only look around, as import machinery and inspect do.
        if name.startswith("__"):
            raise AttributeError(name)
        if _chip_rules.are_on():
            _chip_rules.check_name(name, sys._getframe(1))
        # A person at a prompt who asks is going to use it, and there is no text that would say so.
        if not _is_claimed and name in _ANSWERS and not hasattr(sys, "ps1"):
            return _chip_rules.guarded(name, _answer(name))
        claim()
        return getattr(sys.modules["torch.tpu"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            claim()
            setattr(sys.modules["torch.tpu"], name, value)


def _devices() -> int:
    """How many names the device has.

    A rank may call its device ``tpu:LOCAL_RANK``, as scripts for other accelerators do. TPURUN_DEVICES is for
    a program that starts its ranks itself, as many as there are devices.
    """
    if _chip_rules.are_on():
        return _named_devices()  # a rank has one device there
    return max(_ranks_of_host(), _named_devices())


def _ranks_of_host() -> int:
    try:
        return max(1, min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MAX_DEVICES))
    except ValueError:
        return 1


def _named_devices() -> int:
    given = os.environ.get("TPURUN_DEVICES")
    if not given:
        return 1
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MAX_DEVICES):
        raise RuntimeError(
            f"tpurun: expected TPURUN_DEVICES as a number from 1 to {MAX_DEVICES}, got {given!r}; it is how "
            "many devices tpu:0, tpu:1, .. a program may name"
        )
    return int(given)


def _memory_bytes() -> int:
    """Returns the size that TPURUN_HBM says ("16GiB"), else all the memory of the host."""
    given = _variables.size("TPURUN_HBM")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if given is None else given


def _is_built() -> bool:
    """A source copy without compiled parts has no device, and need not say so to those who did not ask."""
    return importlib.util.find_spec("tpurun._build") is not None


def _text_of_program() -> bytes:
    main = sys.modules.get("__main__")
    process = sys.modules.get("multiprocessing.process")
    if process is None or not getattr(process.current_process(), "_inheriting", False):
        return _text_of(main)
    # Spawned by multiprocessing, which imports the program before it makes it the main module.
    return _text_in(sys.argv[0]) if sys.argv[:1] and sys.argv[0].endswith(".py") else b""


def _text_of(program: ModuleType | None) -> bytes:
    path = getattr(program, "__file__", None)
    return _text_in(path) if isinstance(path, str) and path.endswith(".py") else b""


def _text_in(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
