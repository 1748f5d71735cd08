"""Imports torch once and forks every rank of this host from the result.

The launcher starts an interpreter that calls :func:`main` with one argument, ``{"fd": 5, ...}``. The
descriptor is one end of a stream socket that carries one JSON object per line; a request may come with
descriptors. Until it forks, this process keeps a single thread and touches no accelerator, or it refuses and
the launcher starts interpreters.
It then still holds the store of a job that wants one, as it does when it is told that nothing is forked.
With ``--warm`` the process that becomes a fork server is itself forked, by ``warm_server.py``.
"""

from __future__ import annotations

import array
import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

from tpurun import run_rank
from tpurun.device import _device
from tpurun.launch import _end, _environment, _threads

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STORE_TIMEOUT_S = 30
MAX_FDS_PER_REQUEST = 5
# Signals that ask a rank to end. The fork server itself ends when its agent does.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Descriptors of these mean that a driver is open, which does not survive a fork.
ACCELERATOR_FILES = ("/dev/nvidia", "/dev/accel", "/dev/vfio", "/dev/kfd", "/dev/dri", "/dev/neuron")


def main() -> None:
    """Imports, answers ``ready`` or ``refuse``, then serves until the agent closes the socket."""
    _end.prepare()
    options = json.loads(sys.argv[1])
    # The moments in this process that `tpurun --timings` shows.
    times = {"python_ns": now_ns()}
    _device.is_left_to_ranks = True
    become_subreaper()
    if os.getppid() != options["agent"]:
        os._exit(1)
    dispositions = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(options["fd"])
    try:
        with _environment.watched():
            preload(options, times)
        if options["forks"]:
            check_fork_is_sound()
    except Refusal as refusal:
        agent.tell(event="refuse", reason=str(refusal), quiet=refusal.is_quiet)
        if refusal.is_quiet:
            return
        serve_store(agent)
        return
    if not options["forks"]:
        agent.tell(event="ready", **times)
        serve_store(agent)
        return
    finalizers = share_with_forks()
    serve(agent, dispositions, times)
    for finalizer in finalizers:
        finalizer.atexit = True


def share_with_forks() -> list[weakref.finalize]:
    """Shares what is imported by now with all forks. Returns finalizers that are this process's to run."""
    _device.remember_modules()
    gc.collect()
    finalizers = keep_from_ranks()
    _end.share_modules()
    gc.freeze()
    return finalizers


def serve(agent: Agent, dispositions: dict, times: dict[str, int]) -> None:
    """Forks ranks until the agent closes its end, then sees to it that nothing of them is left."""
    Server(agent, dispositions).run(times)
    end_children()
    remove_control_group()


class Refusal(Exception):
    """Why ranks can not be forked from this process; quiet when nobody would want to know."""

    def __init__(self, reason: str, *, is_quiet: bool = False) -> None:
        super().__init__(reason)
        self.is_quiet = is_quiet


class Peer:
    """A process that speaks to this one over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.set_inheritable(False)
        self._bytes = bytearray()
        self._fds: list[int] = []

    def tell(self, **message: object) -> None:
        """Sends one line."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Also what has come with a request that was never finished."""
        self.socket.close()
        for fd in self._fds:
            os.close(fd)

    def requests(self, longest: int | None = None) -> list[tuple[dict, list[int]]] | None:
        """The complete requests that have arrived, each with its descriptors; None at the end.

        An unfinished one that is longer than that is a ValueError.
        """
        room = array.array("i", bytes(4 * MAX_FDS_PER_REQUEST))
        space = socket.CMSG_SPACE(len(room) * room.itemsize)
        data, ancillary, _flags, _address = self.socket.recvmsg(1 << 16, space)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            return None
        *lines, rest = bytes(self._bytes + data).split(b"\n")
        self._bytes = bytearray(rest)
        if longest is not None and len(rest) > longest:
            raise ValueError(f"expected a request of at most {longest} bytes")
        return [self._with_fds(json.loads(line)) for line in lines]

    def _with_fds(self, request: dict) -> tuple[dict, list[int]]:
        count = request.get("fds", 0)
        fds, self._fds = self._fds[:count], self._fds[count:]
        for fd in fds:
            os.set_inheritable(fd, False)
        return request, fds


class Agent(Peer):
    """The agent of the job. When it is gone this process ends, and all that it has started."""

    def __init__(self, fd: int) -> None:
        super().__init__(socket.socket(fileno=fd))

    def tell(self, **message: object) -> None:
        """Sends one line, or ends everything."""
        try:
            super().tell(**message)
        except OSError:
            end_children()
            os._exit(1)


class Server:
    """Forks on request and reports how the children end."""

    def __init__(self, agent: Agent, dispositions: dict) -> None:
        self.agent = agent
        self.dispositions = dispositions
        self.pid = os.getpid()
        self.ranks: dict[int, int] = {}
        # The process that holds the store of this world.
        self.store: int | None = None
        self.wakeup, wakeup_end = socket.socketpair()
        self.wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end

    def run(self, times: dict[str, int]) -> None:
        """Serves until the agent closes its end."""
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.agent.tell(event="ready", **times)
        while True:
            readable, _, _ = select.select([self.agent.socket, self.wakeup], [], [])
            if self.wakeup in readable:
                self.reap()
            if self.agent.socket in readable:
                requests = self.agent.requests()
                if requests is None:
                    return
                for request, fds in requests:
                    self.serve(request, fds)

    def serve(self, request: dict, fds: list[int]) -> None:
        """One request: the store, one rank, or the end of all that."""
        if request["op"] == "store":
            self.start_store(request["host"], request["port"])
        elif request["op"] == "clear":
            self.store = None
            end_children(self.on_end)
            self.agent.tell(event="cleared")
        else:
            self.start_rank(request, fds)
        for fd in fds:
            os.close(fd)

    def start_rank(self, request: dict, fds: list[int]) -> None:
        """Forks one rank; the child does not return from here."""
        rank = request["rank"]
        # Before, since the child may be the first to run.
        begun_ns = now_ns()
        # Ignored here. The child may be asked to end before it has undone that, so they wait for it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self.agent.tell(event="failed", rank=rank, reason=str(error))
            return
        if pid == 0:
            status = self.become_rank(request, fds, mask)
            _end.leave(status, run_rank.part_from_other_hosts if status == 0 else None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        set_process_group(pid)
        self.ranks[pid] = rank
        self.agent.tell(event="started", rank=rank, pid=pid, ns=begun_ns)

    def become_rank(self, request: dict, fds: list[int], mask: set[int]) -> int:
        """In the child: undoes what makes this process a server, then runs the program; its exit status.

        Signals that were held back for this process arrive as soon as it can answer them as a rank does.
        """
        try:
            _end.begin_rank()
            self.leave_server()
            for target, fd in enumerate(fds[:3]):
                os.dup2(fd, target)
                os.close(fd)
            # Ours alone: OpenBLAS must not start threads in the server.
            os.environ.pop("OPENBLAS_NUM_THREADS", None)
            os.environ.update(request["env"])
            os.environ["TPURUN_CONTROL_FD"] = str(fds[3])
            os.environ["TPURUN_BOARD_FD"] = str(fds[4])
            run_rank.use_whole_lines()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            take_own_randomness()
            _threads.use_threads_of_environment()
            program = request["program"]
            if program["cwd"] is not None:
                os.chdir(program["cwd"])
            return run_rank.run(program["target"], program["args"], is_module=program["module"])
        except BaseException as error:
            sys.__excepthook__(*sys.exc_info())
            return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    def start_store(self, host: str, port: int) -> None:
        """Forks the process that holds the rendezvous store, so that no rank's death takes it away."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self.leave_server()
            hold_store(host, port, writer)
        os.close(writer)
        set_process_group(pid)
        with os.fdopen(reader, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], STORE_TIMEOUT_S)
            answer = json.loads(pipe.readline() or b"{}") if ready else {}
        if "port" in answer:
            self.store = pid
            stop_asking_for_host_names(host, answer["port"])
        reason = answer.get("reason", "it did not start")
        self.agent.tell(event="store", port=answer.get("port"), reason=reason, pid=self.store)

    def leave_server(self) -> None:
        """First thing in every child."""
        set_process_group(0)
        die_with_parent(self.pid)
        # CPython gives the main thread of a fork its new identity, and the number of the old one.
        threading.main_thread()._set_native_id()
        signal.set_wakeup_fd(-1)
        for number, disposition in self.dispositions.items():
            if disposition is not None and signal.getsignal(number) is not disposition:
                signal.signal(number, disposition)
        for connection in (self.agent.socket, self.wakeup, self._wakeup_end):
            connection.close()

    def reap(self) -> None:
        """Reports every child that has ended."""
        try:
            while self.wakeup.recv(4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.on_end(pid, status)

    def on_end(self, pid: int, status: int) -> None:
        """Reports the end of a child when it is a rank, or the store."""
        rank = self.ranks.pop(pid, None)
        code = os.waitstatus_to_exitcode(status)
        if rank is not None:
            self.agent.tell(event="exited", rank=rank, code=max(code, 0), signal=max(-code, 0))
        elif pid == self.store:
            self.agent.tell(event="storeended", code=max(code, 0), signal=max(-code, 0))


# The modules of ours that nearly every rank needs. The native part is only loaded before the fork, and runs
# nothing.
OURS = (
    *("tpurun.device._uses", "tpurun.backend._shared", "tpurun.backend._shortcuts"),
    *("tpurun._build", "tpurun._C"),
)


def preload(options: dict, times: dict[str, int]) -> None:
    """Imports what all ranks will import, and notes when torch is there."""
    if importlib.util.find_spec("torch") is None:
        raise Refusal("torch is not installed", is_quiet=True)
    import_or_refuse("torch")
    import_or_refuse("torch.distributed")
    times["torch_ns"] = now_ns()
    if not options["forks"]:
        return
    for name in options["preload"]:
        import_or_refuse(name)
    import_quietly([*modules_of(options["targets"]), *OURS])


def modules_of(targets: list[str]) -> list[str]:
    """The modules of torch that these programs name, in their order, each once."""
    return list(dict.fromkeys(name for target in targets for name in torch_modules_of(target)))


def import_quietly(names: list[str]) -> None:
    """Imports what can be: the program itself will say what is wrong with the others."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def now_ns() -> int:
    """The clock of the board."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def import_or_refuse(name: str) -> None:
    """A module that the ranks rely on."""
    try:
        importlib.import_module(name)
    except Exception as error:
        raise Refusal(f"cannot import {name}: {type(error).__name__}: {error}") from error


def torch_modules_of(path: str) -> list[str]:
    """The modules of torch that the program names, so that they are imported once and not by every rank.

    The program is read, not run. An optimizer's constructor imports torch._dynamo: 4 s of CPU in each rank.
    """
    try:
        with open(path, "rb") as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return []
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names[node.module] = None
            if "optim" in {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}:
                names["torch._dynamo"] = None
        elif isinstance(node, ast.Attribute) and node.attr in ("optim", "compile"):
            names["torch._dynamo"] = None
    return [name for name in names if name.startswith("torch.")]


def check_fork_is_sound() -> None:
    """Threads do not survive a fork, and neither does the state of a driver."""
    if (threads := count_threads()) != 1:
        raise Refusal(f"an imported module started threads ({threads - 1} more than expected)")
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(ACCELERATOR_FILES):
            raise Refusal(f"an imported module opened {target}")
    torch = sys.modules["torch"]
    for device in ("cuda", "xpu", "tpu"):
        module = getattr(torch, device, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            raise Refusal(f"an imported module initialised torch.{device}")


def count_threads() -> int:
    """Threads of this process as the kernel sees them; one that was joined may take a moment to go."""
    deadline = time.monotonic() + 0.1
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        os.sched_yield()
    return count


def hold_store(host: str, port: int, writer: int) -> None:
    """In a child: serves the store until the job ends; never returns."""
    _store, answer = open_store(host, port)
    os.write(writer, json.dumps(answer).encode() + b"\n")
    os.close(writer)
    while "port" in answer:
        signal.pause()
    os._exit(1)


def serve_store(agent: Agent) -> None:
    """Holds the store in this process until the agent closes its end: there is nobody to fork for."""
    stores = []
    while (requests := agent.requests()) is not None:
        for request, _fds in requests:
            store, answer = open_store(request["host"], request["port"])
            stores.append(store)
            agent.tell(event="store", port=answer.get("port"), reason=answer.get("reason", ""))


def open_store(host: str, port: int) -> tuple[object, dict]:
    """The rendezvous store on this port, or on a free one for 0, and what there is to say of it."""
    from torch.distributed import TCPStore

    try:
        # Our own socket, because c10d's would listen on every interface of the host.
        listener = socket.create_server((host, port))
        port, fd = listener.getsockname()[1], listener.detach()
        with failing_host_names():
            store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=fd)
    except Exception as error:
        return None, {"reason": " ".join(str(error).split())}
    return store, {"port": store.port}


def stop_asking_for_host_names(host: str, port: int) -> None:
    """Spares the ranks c10d's reverse lookups, which stall each of them for seconds if no resolver answers.

    c10d asks for the name of every peer, only to log it, until one lookup fails for want of an answer; then
    it logs addresses for the rest of the process, and of its forks. Here is that failure. The resolver's
    settings belong to a thread, so those of the ranks stay as they are.
    """
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    # Threads without a name are numbered, and the first one is the program's.
    connect = threading.Thread(
        target=TCPStore, name="tpurun-store", args=(host, port), kwargs={"timeout": timeout}
    )
    with failing_host_names():
        connect.start()
        connect.join()
    count_threads()


@contextlib.contextmanager
def failing_host_names() -> Iterator[None]:
    """Makes the resolver give up at once in threads that start to use it, and hides c10d's warning of it."""
    before = os.environ.get("RES_OPTIONS")
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.environ["RES_OPTIONS"] = "attempts:0"
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
        del os.environ["RES_OPTIONS"]
        if before is not None:
            os.environ["RES_OPTIONS"] = before


def keep_from_ranks() -> list[weakref.finalize]:
    """Finalizers of what was made before the fork are for this process to run, not for every rank.

    Torch's alone take every operator of a library apart, on pages that a rank would have to copy: 28 MB each.
    """
    # There is no public way to find them; their attribute is public.
    finalizers = [one for one in list(getattr(weakref.finalize, "_registry", ())) if one.atexit]
    for finalizer in finalizers:
        finalizer.atexit = False
    return finalizers


def take_own_randomness() -> None:
    """Separate processes would draw different numbers; only random reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    sys.modules["torch"].default_generator.seed()


def set_process_group(pid: int) -> None:
    """Both sides of a fork do it, so that neither has to wait; the child may already be gone."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)


def become_subreaper() -> None:
    """Makes this process adopt what a rank leaves behind. It outlives the agent for as long as that takes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(on_end: Callable[[int, int], None] = lambda pid, status: None) -> None:
    """Ends all that descends from this process: when a child dies, what it has started is adopted."""
    while True:
        for pid in children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            # One at least, then those that have ended with it.
            ended = os.waitpid(-1, 0)
            while ended[0] != 0:
                on_end(*ended)
                ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return


def children() -> list[int]:
    """The children of this process, adopted ones too; also those that have ended."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children") as pids:
            return [int(pid) for pid in pids.read().split()]
    except OSError:
        # Many kernels are built without this file.
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and parent_of(name) == own]


def parent_of(pid: str) -> int:
    """The parent of a process; -1 when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name, in parentheses, may contain anything.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return -1


def remove_control_group() -> None:
    """The job's, which the agent made and put us into; the agent or its front removes it if one is left."""
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/mountinfo") as mounts:
            mount = next(line.split()[4] for line in mounts if " - cgroup2 " in line)
        with open("/proc/self/cgroup") as groups:
            path = mount + next(line[3:].rstrip("\n") for line in groups if line.startswith("0::"))
        if os.path.basename(path).startswith("tpurun-"):
            with open(os.path.join(os.path.dirname(path), "cgroup.procs"), "w") as processes:
                processes.write(str(os.getpid()))
            os.rmdir(path)


def die_with_parent(parent: int) -> None:
    """No orphans, however the parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
