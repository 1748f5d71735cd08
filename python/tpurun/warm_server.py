"""A process that has imported torch and outlives the jobs that it serves: ``tpurun --warm``.

The launcher starts an interpreter that calls :func:`main` with one argument, ``{"listener": 5, ...}``; this
process listens there until nobody has come for ten minutes. Each job that comes gets a fork of it that
becomes its fork server, as if an interpreter had just been started for it: with the environment, directory,
streams and limits of that job. A process cannot change everything about itself. The launcher compares the
rest, which decides the server that a job may use (``launcher/src/ranks/warm/mod.rs``). This process looks
whether a file has changed.

Both sides speak lines of JSON, each of these requests over a connection of its own::

    {"op": "check", "circumstances": ".."} -> {"event": "fresh"}, or {"event": "stale", ..} and its end
    {"op": "job", ..}                      -> {"event": "forked", ..} and its end, or {"event": "refused", ..}
    {"op": "status"}                       -> {"event": "status", "pid": 6, ..}
    {"op": "stop"}                         -> {"event": "stopped"}, and no job gets this process any more
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from tpurun import fork_server
from tpurun.device import _device
from tpurun.fork_server import Refusal, now_ns
from tpurun.launch import _end, _environment

LOOK_EVERY_S = 5
# Below this part of the machine's memory, what this process holds is better given back.
LEAST_AVAILABLE = 0.1
# Connections that have not said what they want, and the longest that one may say.
MAX_WAITING = 64
MAX_LINE = 1 << 20


def main() -> None:
    """Imports, then serves until nobody needs this process."""
    _end.prepare()
    options = json.loads(sys.argv[1])
    leave_command(options)
    _device.is_left_to_ranks = True
    dispositions = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number in fork_server.STOPPING:
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=options["listener"])
    listener.set_inheritable(False)
    # Again, as who connects sees the process that has called it last.
    listener.listen(MAX_WAITING)
    server = WarmServer(listener, options, dispositions)
    # The launcher waits for the end of this pipe, which says that this process listens.
    os.close(options["told"])
    job = None
    try:
        server.warm_up()
        job = server.run()
    finally:
        if job is None:
            server.leave()
    if job is not None:
        serve_job(server, job)


def serve_job(server: WarmServer, job: Job) -> NoReturn:
    """In a fork: what an interpreter does that the agent has started, up to its end."""
    own, status = os.getpid(), 1
    try:
        times = {"python_ns": now_ns(), "torch_ns": now_ns()}
        agent = server.become_fork_server(job)
        fork_server.serve(agent, server.dispositions, times)
        status = 0
    except BaseException:
        if os.getpid() != own:
            raise  # a rank, which ends as an interpreter does
        sys.__excepthook__(*sys.exc_info())
    # A fork leaves by `_exit`, because what the warm server has registered for its end is the warm server's
    # to do.
    os._exit(status)


def leave_command(options: dict) -> None:
    """Becomes a process of its own, which keeps nothing of the command but where its output goes."""
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    kept = sorted((0, 1, 2, options["listener"], options["told"]))
    for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)
    # This process adopts what a fork server leaves behind that has died.
    fork_server.become_subreaper()


class Stale(Exception):
    """Why no job may have a fork of this process any more."""


class Job(NamedTuple):
    """A job asks for a fork server with this output, which speaks to the agent over this socket."""

    peer: fork_server.Peer
    request: dict
    output: int
    agent: int


class WarmServer:
    """Forks a server for every job, and ends what it may leave behind."""

    def __init__(self, listener: socket.socket, options: dict, dispositions: dict) -> None:
        self.listener = listener
        self.options = options
        self.dispositions = dispositions
        self.began_ns = now_ns()
        self.environment = dict(os.environ)
        self.files: dict[str, tuple[int, ...]] = {}
        self.finalizers: list = []
        self.waiting: list[fork_server.Peer] = []
        self.asked: list[Job] = []
        self.tried: set[str] = set()
        # The processes that serve jobs.
        self.serving: set[int] = set()
        self.served = 0
        self.last_use = time.monotonic()
        self.stale: str | None = None
        self.is_listed = True
        self.place = state_of(options["path"])
        self.wakeup, self.wakeup_end = socket.socketpair()
        for end in (self.wakeup, self.wakeup_end):
            end.setblocking(False)

    def warm_up(self) -> None:
        """Imports what every job imports. The process that has started this one sees what it prints."""
        preload = {"forks": True, "preload": self.options["preload"], "targets": []}
        try:
            with _environment.watched():
                fork_server.preload(preload, {})
            self.settle()
        except Refusal as refusal:
            self.stale = str(refusal)
        # A reader of the command's output waits until nobody can write to it any more.
        with open(os.devnull, "r+b") as null:
            for fd in (0, 1, 2):
                os.dup2(null.fileno(), fd)
        os.chdir("/")

    def settle(self) -> None:
        """After imports: looks whether a fork is sound, and shares what there is with all forks."""
        fork_server.check_fork_is_sound()
        self.finalizers += fork_server.share_with_forks()
        self.files = dict(imported_files(self.files))

    def run(self) -> Job | None:
        """Serves until there is nothing more to do; returns the job in each fork."""
        signal.set_wakeup_fd(self.wakeup_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        while not self.is_over():
            readable, _, _ = select.select(self.sources(), [], [], LOOK_EVERY_S)
            if self.wakeup in readable:
                self.reap()
            if self.listener in readable:
                self.accept()
            for peer in [peer for peer in self.waiting if peer.socket in readable]:
                self.hear(peer)
            while self.asked:
                job = self.asked.pop()
                if self.begin(job):
                    return job
        return None

    def sources(self) -> list[socket.socket]:
        """Returns the sockets that may have something for this process."""
        listening = [self.listener] if self.is_listed else []
        return [self.wakeup, *listening, *(peer.socket for peer in self.waiting)]

    def is_over(self) -> bool:
        """Whether nobody needs this process, or the machine needs its memory."""
        if self.serving:
            self.last_use = time.monotonic()
            return False
        idle = time.monotonic() - self.last_use
        is_tight = idle >= LOOK_EVERY_S and memory_is_short()
        return not self.is_listed or is_tight or idle >= self.options["idle_s"]

    def leave(self) -> None:
        """No job gets this process any more. It still ends what servers of jobs may leave behind."""
        if self.is_listed:
            self.is_listed = False
            self.listener.close()
            # A command that found this process stopped has put another one in its place.
            if state_of(self.options["path"]) == self.place:
                os.unlink(self.options["path"])
        for finalizer in self.finalizers:
            finalizer.atexit = True

    def accept(self) -> None:
        """Takes a connection of this user; to all others the socket's folder is closed, too."""
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            _pid, uid, _gid = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            if uid != os.geteuid() or len(self.waiting) >= MAX_WAITING:
                connection.close()
            else:
                # One that does not read its answers keeps nobody waiting.
                connection.settimeout(1)
                self.waiting.append(fork_server.Peer(connection))

    def hear(self, peer: fork_server.Peer) -> None:
        """Answers what has come on a connection. One that ends, or talks nonsense, is closed."""
        try:
            requests = peer.requests(MAX_LINE)
            for request, fds in requests or []:
                self.answer(peer, request, fds)
        except Exception:
            # The peer said something that no tpurun says, and is not answered.
            requests = None
        if requests is None:
            self.waiting.remove(peer)
            peer.close()

    def answer(self, peer: fork_server.Peer, request: dict, fds: list[int]) -> None:
        """One request."""
        op = request["op"]
        if op == "check":
            self.check(peer, request["circumstances"])
        elif op == "job":
            output, agent = fds
            self.asked.append(Job(peer, request, output, agent))
        elif op == "status":
            peer.tell(event="status", **self.status())
        elif op == "stop":
            self.leave()
            peer.tell(event="stopped", jobs=len(self.serving))

    def check(self, peer: fork_server.Peer, circumstances: str) -> None:
        """Says whether this process is what a new one would be, and makes room for a new one where not."""
        try:
            self.look(circumstances)
        except Stale as stale:
            self.leave()
            peer.tell(event="stale", reason=str(stale))
        else:
            peer.tell(event="fresh")

    def look(self, circumstances: str) -> None:
        """Raises :class:`Stale` when a new process would be another one."""
        if self.stale is not None:
            raise Stale(self.stale)
        if circumstances != self.options["circumstances"]:
            raise Stale("it was started in other circumstances")
        for path, state in self.files.items():
            if state_of(path) != state:
                raise Stale(f"{path} has changed")

    def status(self) -> dict:
        """Returns what ``tpurun warm`` shows."""
        return {
            "pid": os.getpid(),
            "python": sys.executable,
            "age_s": (now_ns() - self.began_ns) // 10**9,
            "idle_s": 0 if self.serving else int(time.monotonic() - self.last_use),
            "idle_limit_s": self.options["idle_s"],
            "jobs": len(self.serving),
            "served": self.served,
            "preload": self.options["preload"],
        }

    def begin(self, job: Job) -> bool:
        """Forks a fork server for a job; whether this is the fork."""
        pid = 0
        try:
            self.import_for(job.request["targets"], job.output)
            if (pid := os.fork()) == 0:
                return True
            fork_server.set_process_group(pid)
            self.serving.add(pid)
            self.served += 1
            job.peer.tell(event="forked", pid=pid)
        except (OSError, Refusal, KeyError, TypeError) as error:
            if isinstance(error, Refusal):
                self.stale = str(error)
            with contextlib.suppress(OSError):
                job.peer.tell(event="refused", reason=str(error))
        for fd in (job.output, job.agent):
            os.close(fd)
        return False

    def import_for(self, targets: list[str], output: int) -> None:
        """Imports the modules of torch that these programs name, so that the next job has them, too."""
        missing = set(fork_server.modules_of(targets)) - sys.modules.keys() - self.tried
        if missing:
            self.tried |= missing
            with output_to(output), _environment.watched():
                fork_server.import_quietly(sorted(missing))
            self.settle()

    def become_fork_server(self, job: Job) -> fork_server.Agent:
        """In a fork: takes what is the job's for what is the warm server's; its agent."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self.dispositions[signal.SIGCHLD])
        for mine in (*self.sources(), self.wakeup_end):
            mine.close()
        for other in self.asked:
            os.close(other.output)
            os.close(other.agent)
        os.dup2(job.output, 1)
        os.dup2(job.output, 2)
        os.close(job.output)
        self.take_environment(job.request["env"])
        os.chdir(job.request["cwd"])
        resource.setrlimit(resource.RLIMIT_NOFILE, job.request["open_files"])
        fork_server.set_process_group(0)
        fork_server.become_subreaper()
        return fork_server.Agent(job.agent)

    def take_environment(self, variables: dict[str, str]) -> None:
        """The agent's variables, with what modules have changed of them when they were imported."""
        before, now = self.environment, dict(os.environ)
        names = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        os.environ.clear()
        os.environ.update(variables)
        for name in names:
            if name in now:
                os.environ[name] = now[name]
            else:
                os.environ.pop(name, None)

    def reap(self) -> None:
        """Notes which servers have ended, and ends what came to this process from them."""
        with contextlib.suppress(BlockingIOError):
            while self.wakeup.recv(4096):
                pass
        while True:
            with contextlib.suppress(ChildProcessError):
                while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                    self.serving.discard(pid)
            left = [pid for pid in fork_server.children() if pid not in self.serving]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                self.serving.discard(os.waitpid(-1, 0)[0])


def imported_files(known: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The files that modules were imported from and libraries mapped from, and the folders they lie in."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths |= {path for line in maps if (path := line.split(maxsplit=5)[-1].rstrip("\n")).startswith("/")}
    paths = {path for path in paths if isinstance(path, str) and not path.startswith(("/dev/", "/memfd:"))}
    # The folders of the path show files that are installed or taken away beside these.
    for path in (*paths, *(place for place in sys.path if os.path.isdir(place))):
        if (state := known.get(path) or state_of(path)) is not None:
            yield path, state


def state_of(path: str) -> tuple[int, ...] | None:
    """Returns what changes of a file when it is written or replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def output_to(fd: int) -> Iterator[None]:
    """Sends what is printed within there."""
    kept = [os.dup(1), os.dup(2)]
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    try:
        yield
    finally:
        for target, old in enumerate(kept, 1):
            os.dup2(old, target)
            os.close(old)


def memory_is_short() -> bool:
    """Whether the machine has little memory left that programs could have."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    available = found.get("MemAvailable")
    return available is not None and available < LEAST_AVAILABLE * found["MemTotal"]
