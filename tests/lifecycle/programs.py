"""The programs: each a text, run in an empty directory that only it writes to.

What must be the same is the exit code, the standard output and the files that are left.
"""

PROGRAMS = {
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
    "a compressed file": 'import gzip; f = gzip.open("a.gz", "wb", mtime=0); f.write(b"x" * 9)',
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
    "an object that comes back from a spawned process": """
import multiprocessing
class Job: pass
def work(_):
    return Job()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.map(work, [3])[0]) is Job)
""",
    "a child of multiprocessing": """
import multiprocessing
def work():
    open("a", "w").write("x")
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work).start()
""",
    "a program that starts itself anew": """
import os, sys
if not os.path.exists("again"):
    os.mkdir("again")
    os.execv(sys.executable, sys.orig_argv)
print("the second time", sys.argv[1:])
""",
    "names of the main module": """
import sys
main = sys.modules["__main__"]
print(__name__, main.__builtins__ is sys.modules["builtins"], main.__annotations__, __spec__, __package__)
print(sys.path[0] == __import__("os").path.dirname(__file__), "" in sys.path, sys.flags.safe_path)
""",
    "a module of the working directory": 'import json; print(json.loads("1"))',
}
