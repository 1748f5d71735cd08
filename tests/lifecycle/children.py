"""Programs that start others: processes, threads, and themselves."""

TEXTS = {
    "an object that comes back from a spawned process": """
import multiprocessing
class Job: pass
def work(_):
    return Job()
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(type(pool.map(work, [3])[0]) is Job)
""",
    "objects that come back from each kind of process": """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
class Job:
    def __init__(self, number): self.number = number
def work(number):
    return Job(number + 1)
if __name__ == "__main__":
    for how in ("fork", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, [(type(one) is Job, one.number) for one in pool.map(work, [1, 2])])
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(pool.submit(work, 3).result().number)
""",
    "descriptors that a program inherits which it starts": """
import subprocess
print(subprocess.run(["ls", "/proc/self/fd"], close_fds=False, capture_output=True, text=True).stdout)
""",
    "a manager and shared memory": """
import multiprocessing
from multiprocessing import shared_memory
def work(shared): shared["child"] = multiprocessing.current_process().name
if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        shared = manager.dict()
        child = multiprocessing.Process(target=work, args=(shared,))
        child.start()
        child.join()
        print(dict(shared), child.exitcode)
    memory = shared_memory.SharedMemory(create=True, size=8)
    memory.buf[0] = 1
    memory.close()
    memory.unlink()
""",
    "a child of multiprocessing": """
import multiprocessing
def work():
    open("a", "w").write("x")
if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=work).start()
""",
    "a daemon of multiprocessing": """
import multiprocessing
if __name__ == "__main__":
    multiprocessing.Process(target=__import__("signal").pause, daemon=True).start()
    print(len(multiprocessing.active_children()))
""",
    "a child that fails": """
import multiprocessing
def work():
    raise ValueError("in the child")
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    print(child.exitcode)
""",
    "workers that load data": """
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.tensor(index), get_worker_info().id
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context=context)
        print(context, [(batch.tolist(), who.tolist()) for batch, who in loader])
    left = iter(DataLoader(Numbers(), 1, num_workers=1, persistent_workers=True))
    print(next(left))
""",
    "a fork that leaves": """
import atexit, sys
atexit.register(print, "the end of a process")
f = open("a", "w")
f.write("x")
sys.stdout.flush()
child = os.fork()
if child == 0:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "a fork that fails": """
import sys
child = os.fork()
if child == 0:
    raise ValueError("in the fork")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "a fork that goes on alone": """
ready, go = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.close(ready)
    open("late", "w").write("x")
    os.write(go, b"x")
    os._exit(0)
os.read(ready, 1)
os.waitpid(child, 0)
""",
    "a program that starts itself anew": """
import sys
if not os.path.exists("again"):
    os.mkdir("again")
    os.execv(sys.executable, sys.orig_argv)
print("the second time", sys.argv[1:])
""",
    "another program in its place": """
print("x", flush=True)
os.execv("/bin/sh", ["sh", "-c", "echo y; exit 5"])
""",
    "children of subprocess": """
import subprocess, sys
print(subprocess.run(["sh", "-c", "echo $0; exit 3"], stdout=subprocess.PIPE, text=True))
print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)"], capture_output=True).stdout)
subprocess.run(["sh", "-c", "echo err >&2"])
print(os.system("exit 4"), os.popen("echo popen").read())
""",
    "threads that fail": """
import threading
def work():
    raise ValueError("in the thread")
thread = threading.Thread(target=work)
thread.start()
thread.join()
threading.excepthook = lambda about: print("hook:", about.exc_value, about.thread.name)
thread = threading.Thread(target=work, name="mine")
thread.start()
thread.join()
""",
    "a thread that exits": """
import sys, threading
thread = threading.Thread(target=sys.exit, args=(3,))
thread.start()
thread.join()
print("goes on")
""",
    "a thread that interrupts the main one": """
import _thread, threading, time
try:
    threading.Thread(target=_thread.interrupt_main).start()
    while True:  # pause() would miss a signal that comes just before it
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted")
""",
    "signals that are handled": """
import signal, time
signal.signal(signal.SIGTERM, lambda number, frame: print(signal.Signals(number).name, frame.f_code.co_name))
signal.raise_signal(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
rang = []
signal.signal(signal.SIGALRM, lambda *about: rang.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not rang:
    time.sleep(0.01)
print(*rang)
def work(): print("by now")
signal.signal(signal.SIGCHLD, lambda *about: work())
if os.fork() == 0:
    os._exit(0)
os.wait()
""",
    "tasks that nobody waits for": """
import asyncio
async def forever():
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled")
async def main():
    asyncio.create_task(forever())
    await asyncio.sleep(0)
    child = await asyncio.create_subprocess_exec("echo", "x", stdout=asyncio.subprocess.PIPE)
    return await child.communicate()
print(asyncio.run(main()))
""",
    "a loop that is left alone": """
import asyncio
loop = asyncio.new_event_loop()
async def forever():
    await asyncio.Event().wait()
task = loop.create_task(forever(), name="mine")
loop.call_soon(loop.stop)
loop.run_forever()
""",
    "a pool of threads at the end": """
import atexit
from concurrent.futures import ThreadPoolExecutor
atexit.register(print, "atexit")
pool = ThreadPoolExecutor(1)
for number in range(3):
    pool.submit(print, number)
""",
}
