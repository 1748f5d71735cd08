"""Programs that end, with something left to be done.

The exit code, the output and the files that are left must be the same.
"""

TEXTS = {
    "a text file that is never closed": 'f = open("a", "w"); f.write("x")',
    "a file of a function's global": """
def train():
    global log
    log = open("log", "a")
    print("step 1", file=log)
train()
""",
    "a file in a cycle": """
class Log:
    def __init__(self):
        self.me, self.file = self, open("a", "w")
Log().file.write("x")
""",
    "a compressed file": 'import gzip; f = gzip.GzipFile("a.gz", "wb", mtime=0); f.write(b"x" * 9)',
    "a file of C": """
import ctypes
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
c.fputs(b"x", ctypes.c_void_p(c.fopen(b"a", b"w")))
""",
    "a file that a module of the library holds": """
import json
json.log = open("a", "w")
json.log.write("x")
""",
    "a file of a hook in a module of the library": """
import warnings
log = open("a", "w")
warnings.showwarning = lambda *about: log.write("warned")
warnings.warn("w")
""",
    "a file in builtins": 'import builtins; builtins.log = open("a", "w"); log.write("x")',
    "another standard output": 'import sys; sys.stdout = open("a", "w"); print("x")',
    "temporary files": """
import tempfile
file = tempfile.NamedTemporaryFile(dir=".")
directory = tempfile.TemporaryDirectory(dir=".")
""",
    "a finalizer of a global": """
import os
class Board:
    def __del__(self):
        os.mkdir("closed")
board = Board()
keep = lambda: board
""",
    "a finalizer of what weakref watches": """
import weakref
class Watched: pass
watched = Watched()
weakref.finalize(watched, print, "finalized")
""",
    "functions for the end": "import atexit; atexit.register(print, 1); atexit.register(print, 2)",
    "a function for the end of C": """
import ctypes
c = ctypes.CDLL(None)
text = ctypes.create_string_buffer(b"said at the end")
c["__cxa_atexit"](c.puts, text, None)
""",
    "a function for the end that fails": "import atexit; atexit.register(lambda: 1 / 0)",
    "a thread that goes on": """
import threading, time
main = threading.main_thread()
def late():
    main.join()
    print("late")
threading.Thread(target=late).start()
""",
    "a daemon thread": """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
""",
    "an exit code": 'import sys; f = open("a", "w"); f.write("x"); sys.exit(3)',
    "an exit with a text": 'raise SystemExit("enough")',
    "an exception": 'f = open("a", "w"); f.write("x"); raise ValueError("no")',
    "an interrupt": 'f = open("a", "w"); f.write("x"); raise KeyboardInterrupt',
    "an end at once": 'import os; f = open("a", "w"); f.write("x"); os._exit(4)',
    "a generator that is left alone": """
def parts():
    try:
        yield 1
    finally:
        print("closed")
left = parts()
next(left)
""",
    "files of databases and archives": """
import sqlite3, zipfile
database = sqlite3.connect("a.db")
database.execute("create table t (x)")
database.execute("insert into t values (1)")
archive = zipfile.ZipFile("a.zip", "w")
archive.writestr(zipfile.ZipInfo("name"), "x" * 9)
""",
    "memory of a file": """
import mmap
with open("a", "w+b") as file:
    file.write(b"....")
    file.flush()
    memory = mmap.mmap(file.fileno(), 4)
memory[:2] = b"xy"
""",
    "records that a handler keeps": """
import logging, logging.handlers
target = logging.FileHandler("log")
logging.getLogger().addHandler(logging.handlers.MemoryHandler(100, target=target))
logging.getLogger().warning("kept")
""",
    "the order of the end": """
import atexit, multiprocessing.util, threading, weakref
class Watched:
    def __del__(self): print("deleted")
watched = Watched()
atexit.register(print, "first registered")
weakref.finalize(watched, print, "finalized")
atexit.register(print, "last registered")
multiprocessing.util.Finalize(None, print, ("multiprocessing",), exitpriority=1)
threading._register_atexit(print, "threads")
atexit.register(lambda: atexit.register(print, "registered at the end"))
""",
    "a finalizer that fails": """
import sys
class Board:
    def __del__(self): raise ValueError("deleted")
board = Board()
del board
sys.unraisablehook = lambda about: print("hook:", about.exc_value)
board = Board()
del board
""",
    "what is kept of the last exception": """
import atexit, sys
def look():
    print(repr(sys.last_value), sys.last_type, sys.last_traceback.tb_frame.f_code.co_name)
atexit.register(look)
raise ValueError("no")
""",
    "exceptions behind an exception": """
def load():
    raise KeyError("inner")
try:
    load()
except KeyError as error:
    failed = RuntimeError("step failed")
    failed.add_note("a note")
    raise failed from error
""",
    "an exception while another is handled": """
try:
    1 / 0
finally:
    raise OSError(2, "no such", "file")
""",
    "a group of exceptions": """
raise ExceptionGroup("two", [ValueError("a"), ExceptionGroup("b", [OSError(1)])])
""",
    "an exception that has no text": """
class Silent(Exception):
    def __str__(self): raise ValueError("in __str__")
raise Silent
""",
    "an exception that cannot be encoded": 'raise ValueError("half \\ud800")',
    "a recursion without an end": """
import sys
def again(): again()
try:
    again()
except RecursionError as error:
    print(error)
""",
    "another hook for exceptions": """
import sys
def hook(kind, error, trace):
    print("hook:", kind.__name__, error, trace.tb_frame.f_code.co_name, trace.tb_next)
sys.excepthook = hook
raise ValueError("no")
""",
    "a hook for exceptions that fails": """
import sys
def hook(*about): raise OSError("in the hook")
sys.excepthook = hook
raise ValueError("no")
""",
    "a hook for exceptions that looks around": """
import sys, traceback
def hook(*about):
    print(sys.exc_info(), traceback.format_exc(), sys.exception())
sys.excepthook = hook
raise ValueError("no")
""",
    "a hook for exceptions that exits": """
import sys
sys.excepthook = lambda *about: sys.exit(5)
raise ValueError("no")
""",
    "a hook for exceptions that ends": """
import sys
def hook(*about):
    print("hook", flush=True)
    os._exit(9)
sys.excepthook = hook
raise KeyboardInterrupt
""",
    "an interrupt whose hook exits": """
import sys
sys.excepthook = lambda *about: sys.exit("stopped by hand")
raise KeyboardInterrupt
""",
    "no hook for exceptions": """
import sys
del sys.excepthook
raise ValueError("no")
""",
    "an exit in an exception": """
import sys
try:
    raise ValueError("no")
except ValueError:
    sys.exit("stopped")
""",
    "an exit with None": 'import sys; print("x"); sys.exit()',
    "an exit with a large number": "import sys; sys.exit(256 + 3)",
    "an exit with a negative number": "import sys; sys.exit(-2)",
    "an exit with a huge number": "import sys; sys.exit(1 << 70)",
    "an exit with a number below all": "import sys; sys.exit(-(1 << 63) - 1)",
    "an exit with a text and no standard error": 'import sys; sys.stderr = None; sys.exit("text")',
    "an exit with True": "import sys; sys.exit(True)",
    "an exit with a tuple": "import sys; sys.exit((1, 2))",
    "an exit with an exception": 'import sys; sys.exit(ValueError("no"))',
    "an exit of a subclass": """
class Stop(SystemExit): pass
raise Stop(6)
""",
    "an exit in a function for the end": """
import atexit, sys
atexit.register(print, "goes on")
atexit.register(sys.exit, 7)
""",
    "an end in a function for the end": """
import atexit
atexit.register(lambda: os._exit(7))
print("x", flush=True)
""",
    "an abort": 'print("x", flush=True); os.abort()',
    "an end by a signal": """
import signal
print("x", flush=True)
signal.raise_signal(signal.SIGTERM)
""",
    "an end by a pipe that nobody reads": """
import signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
reader, writer = os.pipe()
os.close(reader)
os.write(writer, b"x")
""",
    "a standard output that is full": 'import sys; sys.stdout = open("/dev/full", "w"); print("x")',
    "a standard output that is closed": 'import sys; print("x"); sys.stdout.close()',
    "a descriptor 1 that is closed": 'print("x", flush=True); os.close(1)',
    "no standard output": "import sys; sys.stdout = None; print(1); sys.stderr = None; raise ValueError",
    "a module that is taken out": """
import sys
del sys.modules["__main__"]
f = open("a", "w")
f.write("x")
""",
    "an end within generators and contexts": """
import contextlib, sys
@contextlib.contextmanager
def inside():
    try:
        yield
    finally:
        print("left")
with inside():
    sys.exit(2)
""",
}
