"""Runs the program of one rank as ``python script args`` or ``python -m module args`` would.

The launcher starts a rank without the fork server as an interpreter that calls :func:`main`; a rank that was
forked calls :func:`run` instead. Either way an exception is printed as usual and also described in the file
that TORCHELASTIC_ERROR_FILE names, which the report is made from.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType, TracebackType

from tpurun import _marks, _rank_files, stacks
from tpurun.backend import _alone
from tpurun.device import _device
from tpurun.launch import _debugger, _end, _environment

MAX_MESSAGE_CHARS = 8192
# The launcher reads files of up to a megabyte.
MAX_STACK_CHARS = 65536
# Exceptions that are looked at behind the one that ended the program.
MAX_CHAIN = 256
# Modules that an interpreter has imported before it comes to a program, and that no path changes.
AT_START = frozenset({*sys.builtin_module_names, "encodings"})
PR_SET_PDEATHSIG = 1
# The exit status that the interpreter makes of a number that C cannot hold.
NO_STATUS = 255


def main() -> None:
    """Runs what the command line names and leaves with its exit status."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    if is_module:
        del arguments[0]
    use_whole_lines()
    die_with_agent()
    keep_from_children()
    _end.leave(run(arguments[0], arguments[1:], is_module=is_module))


def use_whole_lines() -> None:
    """A pipe would be written to in blocks: late on the screen, and lost when the rank is killed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def keep_from_children() -> None:
    """Programs that this rank starts do not inherit what the launcher has opened for the rank."""
    for name in ("TPURUN_CONTROL_FD", "TPURUN_BOARD_FD"):
        with contextlib.suppress(KeyError, ValueError, OSError):
            os.set_inheritable(int(os.environ[name]), False)


def die_with_agent() -> None:
    """Leaves no rank behind that is a process of its own, however its agent ends.

    The agent may be killed before it can end the rank, and its front with it. A rank that another program has
    started, such as a debugger, is left alone: the system sends the signal when a thread ends, and that of
    another program may end at any time.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        control = int(os.environ["TPURUN_CONTROL_FD"])
        with socket.socket(fileno=os.dup(control)) as end:
            options = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            agent, _, _ = struct.unpack("3i", options)
            if os.getppid() == agent:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            # The agent may have ended before that, and is not the parent any more.
            watched = select.poll()
            watched.register(end, 0)
            if any(events & select.POLLHUP for _, events in watched.poll(0)):
                os._exit(1)


def run(target: str, arguments: list[str], *, is_module: bool) -> int:
    """As :func:`run_program`, and tells the launcher: threads of the program may keep the process."""
    status = run_program(target, arguments, is_module=is_module)
    if status == 0:
        say_alone()
    say_ended(status)
    return status


def run_program(target: str, arguments: list[str], *, is_module: bool) -> int:
    """Runs the program in a fresh ``__main__`` and returns its exit status, or ``-SIGINT``."""
    # A process that the program forks inherits our descriptors, but is not this rank: the engine compares.
    os.environ["TPURUN_RANK_PID"] = str(os.getpid())
    stacks.register()
    _debugger.prepare()
    sys.argv = [target, *arguments]
    # A program that starts itself anew does it with these words.
    sys.orig_argv = [sys.executable, *interpreter_flags(), *(["-m"] if is_module else []), target, *arguments]
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main_module
    # multiprocessing has made it another name of the __main__ that imported it, for objects that come back
    # from processes which it spawns.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main_module
    before = dict(os.environ)
    try:
        code = load_module(main_module, target) if is_module else load_script(main_module, target)
        _device.is_left_to_ranks = False
        if "torch" in sys.modules:
            _environment.at_first_import_of_torch(text_of(main_module), lambda: as_imported(before))
        _marks.reach(_marks.SCRIPT_ENTERED)
        exec(code, main_module.__dict__)
    except SystemExit as stop:
        return exit_status(stop)
    except BaseException as error:
        failed = error
    else:
        return 0
    return status_of(failed)


def status_of(error: BaseException) -> int:
    """Records and shows what ended the program; the exit status, or ``-SIGINT``."""
    own = without_our_frames(error.__traceback__)
    note = note_on(error)
    if _rank_files.is_rank():
        with library_first():
            record(error, own, note)
    stop = show(error.with_traceback(own))
    if stop is not None:
        return exit_status(stop)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def show(error: BaseException) -> SystemExit | None:
    """Shows what ended the program through its hook, as an interpreter does; returns the exit that the hook
    may ask for."""
    about = (type(error), error, error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = about
    sys.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        say("sys.excepthook is missing")
        hook = sys.__excepthook__
    try:
        hook(*about)
    except SystemExit as stop:
        return stop
    except BaseException as failed:
        say("Error in sys.excepthook:")
        # From the hook on, without the call above.
        trace = failed.__traceback__ and failed.__traceback__.tb_next
        sys.__excepthook__(type(failed), failed.with_traceback(trace), trace)
        say("\nOriginal exception was:")
        sys.__excepthook__(*about)
    return None


def say(text: object) -> None:
    """Writes a line to the standard error, also where the program has put nothing in its place."""
    # A closed or full stream, or a text whose __str__ raises.
    with contextlib.suppress(BaseException):
        print(text, file=sys.__stderr__ if sys.stderr is None else sys.stderr, flush=True)


def interpreter_flags() -> list[str]:
    """The options of this interpreter, without the program that it was given."""
    # It stands before our own -c.
    return sys.orig_argv[1 : sys.orig_argv.index("-c")] if "-c" in sys.orig_argv else []


def as_imported(before: dict[str, str]) -> None:
    """Does what the import of torch does for a program, where torch was imported before it assigned
    variables."""
    _environment.apply(before)
    _device.announce()
    _device.claim_if_named(sys.argv[1:])


def text_of(main_module: ModuleType) -> str:
    """The program as it was written, or nothing where only its code is there."""
    return _device._text_of(main_module).decode("utf-8", "replace")


def part_from_other_hosts() -> None:
    """Waits until other hosts have what they need of this rank, as the teardown of an interpreter does."""
    distributed = sys.modules.get("torch.distributed")
    if "TPURUN_HOST" in os.environ and distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def load_script(main_module: ModuleType, path: str) -> CodeType:
    """The code of a script, or of the ``__main__`` of a directory or zip file."""
    if not sys.flags.safe_path and not is_importable_container(path):
        begin_path_with(os.path.dirname(os.path.realpath(path)))
    if is_importable_container(path):
        begin_path_with(path)
        return load_module(main_module, "__main__", shown_as=path)
    path = os.path.abspath(path)
    main_module.__file__ = path
    main_module.__cached__ = None
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        main_module.__loader__ = loader
        return loader.get_code("__main__")
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with open(path, "rb") as source:
        return compile(source.read(), path, "exec", dont_inherit=True)


def load_module(main_module: ModuleType, name: str, shown_as: str | None = None) -> CodeType:
    """The code of a module found on sys.path, as ``python -m`` finds it."""
    # Our own modules, as tpurun.bench, import nothing from where they are started.
    if shown_as is None and not sys.flags.safe_path and not name.startswith("tpurun."):
        begin_path_with(os.getcwd())
    if name == "__main__":
        spec = importlib.machinery.PathFinder.find_spec(name, sys.path[:1])
    else:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None or (code := spec.loader.get_code(spec.name)) is None:
        sys.exit(f"{sys.executable}: No module named {name}")
    main_module.__spec__ = spec
    main_module.__package__ = spec.parent
    main_module.__loader__ = spec.loader
    main_module.__file__ = spec.origin
    main_module.__cached__ = spec.cached
    sys.argv[0] = shown_as or spec.origin or name
    return code


def begin_path_with(folder: str) -> None:
    """Puts the program's folder first, also before modules of the standard library that are imported already:
    the program has not imported them."""
    sys.path.insert(0, folder)
    try:
        names = {entry.partition(".")[0] for entry in os.listdir(folder)}
    except OSError:
        return
    for name in names & sys.stdlib_module_names & sys.modules.keys():
        if name in AT_START or importlib.machinery.FrozenImporter.find_spec(name) is not None:
            continue
        found = importlib.machinery.PathFinder.find_spec(name, [folder])
        # A folder without __init__ comes after every module.
        if found is not None and found.loader is not None and found.origin != origin_of(name):
            for known in [known for known in sys.modules if known.partition(".")[0] == name]:
                _forgotten[known] = sys.modules.pop(known)


# Modules of the library under names that the program has its own modules for.
_forgotten: dict[str, ModuleType] = {}


@contextlib.contextmanager
def library_first() -> Iterator[None]:
    """Finds the library's modules before the program's, so that our own imports, such as `ast` for a
    traceback, get none of the program's."""
    path, own = sys.path, {name: sys.modules.get(name) for name in _forgotten}
    sys.path = path[1:]
    sys.modules.update(_forgotten)
    try:
        yield
    finally:
        sys.path = path
        for name, module in own.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def origin_of(name: str) -> str | None:
    return getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)


def is_importable_container(path: str) -> bool:
    """A directory or zip file, which ``python path`` would search for ``__main__``."""
    if os.path.isdir(path):
        return True
    return path.endswith((".zip", ".pyz", ".egg")) and pkgutil.get_importer(path) is not None


def exit_status(stop: SystemExit) -> int:
    """Returns the exit status that the interpreter makes of the argument of sys.exit."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF if -1 << 63 <= stop.code < 1 << 63 else NO_STATUS
    say(stop.code)
    return 1


def without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback from the first line of the program on."""

    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename == __file__ or frame.f_globals.get("__name__", "").startswith(
            "importlib"
        )

    while tb is not None and is_ours(tb.tb_frame):
        tb = tb.tb_next
    return tb


def note_on(error: BaseException) -> str | None:
    """Adds what tpurun knows about an error to it, where that is more than the error says."""
    try:
        note = _device.note_on_refusal(error)
        if note is not None:
            error.add_note(note)
    except BaseException:
        # Exceptions of the program may do anything when they are looked at.
        return None
    return note


def record(error: BaseException, tb: TracebackType | None, note: str | None = None) -> None:
    """Leaves word for the launcher: torchrun's contract, and beside it what the report shows."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = message_of(error) if note is None else f"{message_of(error)}\n{note}"
    name = type(error).__qualname__
    entry = {
        "message": {
            "message": f"{name}: {message}",
            "extraInfo": {"py_callstack": stack_of(error, tb), "timestamp": str(int(time.time()))},
        },
        "exception": {"type": name, "message": message, **place_of(error, tb)},
    }
    if program := os.environ.get("TPURUN_PROGRAM"):
        entry["exception"]["program"] = program
    if (ranks := guilty_of(error)) is not None:
        entry["exception"]["ranks"] = ranks
    if (engine := engine_error_behind(error)) is not None:
        entry["exception"]["engine"] = engine
    # Half of a pair of surrogates, in a name or a path, is no text that the launcher could read.
    _rank_files.write_whole(path, json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace"))


def message_of(error: BaseException) -> str:
    """Returns the text of the exception, even if its class fails to make one."""
    try:
        return str(error)[:MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()
    except BaseException as failed:
        return f"<its text cannot be had: __str__ raised {type(failed).__qualname__}>"


def stack_of(error: BaseException, tb: TracebackType | None) -> str:
    """The traceback as the interpreter prints it, cut in the middle where it is very long."""
    try:
        stack = "".join(traceback.format_exception(type(error), error, tb))
    except BaseException as failed:
        return f"<the traceback cannot be had: {type(failed).__qualname__}>"
    stack = stack.encode("utf-8", "backslashreplace").decode()
    half = MAX_STACK_CHARS // 2
    return stack if len(stack) <= MAX_STACK_CHARS else f"{stack[:half]}\n[...]\n{stack[-half:]}"


def guilty_of(error: BaseException) -> list[int] | None:
    """The guilty ranks, when the error knows better than "the one that raised it"."""
    try:
        ranks = getattr(error, "ranks", None)
    except BaseException:
        return None
    if not isinstance(ranks, (list, tuple)):
        return None
    return [rank for rank in ranks if isinstance(rank, int) and 0 <= rank < 1 << 32]


def engine_error_behind(error: BaseException) -> dict[str, object] | None:
    """The error of a collective that this one was raised from, or while that one was handled."""
    errors = sys.modules.get("tpurun.errors")
    if errors is None or isinstance(error, errors._CollectiveError):
        return None
    seen: set[int] = set()
    waiting = [(error, True)]
    while waiting and len(seen) < MAX_CHAIN:
        link, is_explicit = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        if isinstance(link, errors._CollectiveError):
            age_ms = int((time.monotonic() - link.made_at) * 1000)
            engine = {"type": type(link).__qualname__, "message": message_of(link), "ranks": guilty_of(link)}
            return {**engine, "explicit": is_explicit, "age_ms": max(age_ms, 0)}
        if isinstance(link, BaseExceptionGroup):
            waiting.extend((one, is_explicit) for one in link.exceptions)
        if link.__cause__ is not None:
            waiting.append((link.__cause__, is_explicit))
        elif link.__context__ is not None:
            waiting.append((link.__context__, False))
    return None


def say_ended(status: int) -> None:
    """Lets the launcher know that the program is over, which the end of the process may be long after."""
    _rank_files.tell("ended", str(status).encode())


def say_alone() -> None:
    """Lets the launcher know that this rank made no process group, and the libraries that it has imported."""
    if not _rank_files.is_rank():
        return
    libraries = _alone.libraries_alone(_device._text_of(sys.modules.get("__main__")))
    if libraries is not None:
        _rank_files.tell("alone", " ".join(libraries).encode())


def place_of(error: BaseException, tb: TracebackType | None) -> dict[str, object]:
    """The innermost line of the user's own code, else the innermost line."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        source = (error.text or "").strip()
        return {"file": error.filename, "line": error.lineno, "function": "<module>", "source": source}
    frames = traceback.extract_tb(tb)
    if not frames:
        return {}
    own = [frame for frame in frames if not is_library(frame.filename)]
    frame = (own or frames)[-1]
    return {"file": frame.filename, "line": frame.lineno, "function": frame.name, "source": frame.line}


def is_library(path: str) -> bool:
    """Code that the user has installed rather than written."""
    homes = (sysconfig.get_path("stdlib"), os.path.dirname(__file__))
    installed = ("/site-packages/", "/dist-packages/")
    return path.startswith(("<", *(f"{home}/" for home in homes))) or any(part in path for part in installed)
