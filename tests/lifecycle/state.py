"""Programs that look at what an interpreter has at its start, or that change it."""

from .program import Program

# Launchers add variables: the contract of torchrun, those that tpurun's own processes need, and the threads
# of torch.
CONTRACT = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
]

TEXTS = {
    "the environment, here and in a child": f"""
import subprocess, sys
contract = {CONTRACT}
show = '''
import os
for name, value in sorted(os.environ.items()):
    if name not in {{}} and not name.startswith(("TPURUN_", "TORCHELASTIC_")):
        print(name, "=", value)
'''.format(contract)
exec(show)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", show])
""",
    "variables that are set, for children and for C": """
import ctypes, subprocess, sys
os.environ["COLOUR"] = "green"
del os.environ["HOME"]
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(getenv(b"COLOUR"), getenv(b"HOME"), flush=True)
subprocess.run([sys.executable, "-c", "import os; print(os.environ['COLOUR'], 'HOME' in os.environ)"])
""",
    "names of the main module": """
import sys
main = sys.modules["__main__"]
print(__name__, main.__builtins__ is sys.modules["builtins"], main.__annotations__, __spec__, __package__)
print(sys.path[0] == os.path.dirname(__file__), "" in sys.path, sys.flags.safe_path)
print(sorted(vars(main)), type(__loader__), __cached__, __doc__)
import __main__
print(__main__ is main, main.os is os)
""",
    "the command line": """
import sys
print(sys.argv, sys.orig_argv[-2:], os.path.samefile(sys.executable, sys.orig_argv[0]))
""",
    "flags and options": """
import sys
print(sys.flags, sys._xoptions, sys.warnoptions, sys.dont_write_bytecode, sys.pycache_prefix)
""",
    "the path": """
import sys
print(sys.path[1:], sys.prefix, sys.exec_prefix, sys.base_prefix)
""",
    "the working directory and the mask of files": """
import stat
print(os.getcwd() == os.path.realpath(os.curdir), oct(os.umask(0o077)))
open("mine", "w").close()
print(oct(stat.S_IMODE(os.stat("mine").st_mode)))
""",
    "limits, priority and cores": """
import resource
print([(name, resource.getrlimit(getattr(resource, name))) for name in dir(resource) if "RLIMIT" in name])
print(os.nice(0), sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0))
""",
    "handlers and masks of signals": """
import signal
# tpurun hears SIGHUP for its ranks, so that nohup is for tpurun.
for number in sorted(signal.valid_signals() - {signal.SIGHUP}):
    print(number, signal.getsignal(number))
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.set_wakeup_fd(-1), signal.getitimer(0))
""",
    "signals of a child": """
import subprocess
shown = subprocess.run(["grep", "^Sig[BI]", "/proc/self/status"], capture_output=True, text=True).stdout
for line in shown.splitlines():
    # Signals 32 and 33 are the C library's own.
    print(line.split(":")[0], hex(int(line.split(":")[1], 16) & ~(3 << 31)))
""",
    "threads and processes": """
import multiprocessing, threading
print(threading.enumerate() == [threading.main_thread()], threading.active_count())
print(threading.main_thread().native_id == os.getpid(), threading.current_thread().name)
print(multiprocessing.current_process(), multiprocessing.parent_process())
print(multiprocessing.get_start_method(allow_none=True), multiprocessing.active_children())
""",
    "names that are counted": """
import asyncio, multiprocessing, threading
from concurrent.futures import ThreadPoolExecutor
def work(): pass
print(threading.Thread(target=work).name, multiprocessing.Process(target=work).name)
with ThreadPoolExecutor(1) as pool:
    print(pool.submit(threading.current_thread).result().name)
async def main():
    return asyncio.current_task().get_name()
print(asyncio.run(main()))
""",
    "the collector of garbage": """
import gc
print(gc.isenabled(), gc.get_threshold(), gc.callbacks, gc.garbage, gc.get_debug())
class Node: pass
node = Node()
node.me = node
del node
print(gc.collect() > 0)
""",
    "warnings": """
import sys, warnings
for _ in range(2):
    warnings.warn("once")
    warnings.warn("old", DeprecationWarning)
warnings.simplefilter("error")
try:
    warnings.warn("an error now")
except UserWarning as error:
    print(error)
""",
    "loggers": """
import logging
print(logging.root, logging.root.handlers, logging.root.manager.disable, logging.lastResort)
logging.getLogger("train").warning("without a handler")
logging.getLogger("train").info("not shown")
logging.basicConfig(format="%(levelname)s:%(processName)s:%(threadName)s:%(filename)s:%(message)s")
logging.getLogger("train").error("with one")
""",
    "hooks of sys": """
import sys, threading
print(sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace())
print(sys.unraisablehook is sys.__unraisablehook__, sys.breakpointhook is sys.__breakpointhook__)
print(threading.excepthook is threading.__excepthook__, sys.getprofile(), sys.getrecursionlimit())
print(sys.getswitchinterval(), hasattr(sys, "last_value"), hasattr(sys, "ps1"), sys.exc_info())
""",
    "the handler of faults": """
import faulthandler
print(faulthandler.is_enabled())
faulthandler.enable()
print(faulthandler.is_enabled())
""",
    "locale, encodings and time": """
import locale, sys, time
print(locale.setlocale(locale.LC_ALL), locale.getlocale(), locale.getpreferredencoding(), time.tzname)
print(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), sys.getdefaultencoding())
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.name, stream.fileno(), stream.encoding, stream.errors, stream.isatty(), stream.mode)
""",
    "contexts": """
import contextvars, decimal
print(len(contextvars.copy_context()), decimal.getcontext())
""",
    "random numbers of a seed": """
import random
random.seed(7)
print(random.random(), random.Random(7).random(), hash(12.5), hash((1, 2)))
""",
    "the standard input": """
import sys
print(repr(sys.stdin.read()), os.read(0, 1))
try:
    input()
except EOFError as error:
    print(error)
""",
    "builtins": """
import builtins
print(sorted(vars(builtins)))
""",
    "a class of the main module": """
import copy, dataclasses, inspect, pickle, typing
@dataclasses.dataclass
class Batch:
    size: "int"
one = Batch(3)
data = pickle.dumps(one)
open("batch", "wb").write(data)
print(pickle.loads(data) == one, type(pickle.loads(data)) is Batch, copy.deepcopy(one), Batch.__module__)
print(inspect.getsource(Batch), inspect.getmodule(Batch).__name__, typing.get_type_hints(Batch))
""",
    "a module of the working directory": """
open("json.py", "w").write("print('imported')")
import json
print(json.loads("1"))
""",
    "annotations of the future": """from __future__ import annotations
def f(x: nowhere): pass
print(f.__annotations__)
""",
    "another encoding": '# -*- coding: latin-1 -*-\nprint(ascii("\u00e9"))\n',
    "bytes on the standard output": """
import sys
sys.stdout.buffer.write(b"\\xff\\xfe\\n")
sys.stdout.buffer.flush()
os.write(1, b"straight\\n")
print("\u00e9", "\\udce9".encode("utf-8", "surrogateescape"))
sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace")
print("\u00e9")
""",
    "descriptors are closed that it does not know": """
os.closerange(3, 4096)
open("a", "w").write(str(os.open(".", os.O_RDONLY)))
print("goes on")
""",
}

OTHERS = {
    "variables of the interpreter": Program(
        """
import sys
assert False, "left out"
print(__debug__, sys.flags, hash("x"), sys.stdout.encoding, sys.stdout.errors)
breakpoint()
""",
        env={
            "PYTHONHASHSEED": "3",
            "PYTHONOPTIMIZE": "1",
            "PYTHONIOENCODING": "latin-1:replace",
            "PYTHONBREAKPOINT": "0",
            "PYTHONDEVMODE": "1",
        },
    ),
    "variables for warnings": Program(
        'import sys, warnings; print(sys.warnoptions); warnings.warn("w")',
        env={"PYTHONWARNINGS": "error::UserWarning", "PYTHONFAULTHANDLER": "1"},
    ),
}
