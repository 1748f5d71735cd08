"""Fork servers that outlive their command: used where they are what a new one would be, else not."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools.jobs import FOREIGN, TPURUN

LIMIT_S = 60
PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print(int(x), os.getcwd(), sys.argv[1:], os.environ.get("WORD"))
"""
# Says that it runs, and ends when it is told to.
WAITS = """
import os, pathlib, time
import torch.distributed as dist
dist.init_process_group("tpu_dist")
dist.barrier()
pathlib.Path(f"runs-{dist.get_rank()}").write_text(f"{os.getpid()} {os.getppid()}")
while not os.path.exists("go"):
    time.sleep(0.01)
"""


class Warm:
    """A user with a directory, who starts jobs one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cwd = root / "cwd"
        (root / "run").mkdir(mode=0o700)
        self.cwd.mkdir()
        self.env = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        self.env |= {"XDG_RUNTIME_DIR": str(root / "run"), "PYTHONDONTWRITEBYTECODE": "1"}
        (self.cwd / "program.py").write_text(PROGRAM)
        (self.cwd / "waits.py").write_text(WAITS)

    def begin(self, *words: object, before: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*before, *map(str, words)],
            cwd=self.cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: object, **options) -> tuple[str, str]:
        """Returns what `tpurun --warm -n 2 ..` writes, without the blanks before a rank. The command has to
        succeed."""
        return self.finish(self.begin(TPURUN, "--warm", "-n", 2, *words, **options))

    def finish(self, job: subprocess.Popen) -> tuple[str, str]:
        out, err = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, (out, err)
        return out.lstrip(), err

    def command(self, *words: str) -> tuple[int, str, str]:
        """`tpurun warm ..`."""
        done = subprocess.run(
            [TPURUN, "warm", *words], env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        return done.returncode, done.stdout, done.stderr

    def servers(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"^fork server (\d+): ", self.command()[1], re.MULTILINE)]

    def server(self) -> int:
        (only,) = self.servers()
        return only

    def waiting(self) -> tuple[subprocess.Popen, list[int]]:
        """A job whose ranks wait, and their process numbers, with that of their fork server."""
        job = self.begin(TPURUN, "--warm", "-n", 2, "waits.py")
        told = [self.cwd / f"runs-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() and len(path.read_text().split()) == 2 for path in told))
        numbers = [[int(number) for number in path.read_text().split()] for path in told]
        assert numbers[0][1] == numbers[1][1]
        return job, [numbers[0][0], numbers[1][0], numbers[0][1]]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def lines(out: str) -> set[str]:
    """Without the ranks that have written them."""
    return {line.partition("| ")[2] for line in out.splitlines()}


def starts(err: str) -> bool:
    return "stays for the next job" in err


def was_warm(err: str, warm: Warm) -> bool:
    run = re.search(r", run (\S+)$", err, re.MULTILINE)[1]
    events = [json.loads(line) for line in (warm.cwd / run / "events.jsonl").read_text().splitlines()]
    (server,) = [event for event in events if event["event"] == "fork server started"]
    return server["warm"]


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    one = Warm(tmp_path)
    yield one
    pids = one.servers()
    one.command("--stop")
    until(lambda: all(is_gone(pid) for pid in pids))


def test_the_second_job_finds_torch_imported(warm: Warm):
    out, err = warm.run("program.py", "a", WORD="w")
    assert out == f"0| 2 {warm.cwd} ['a'] w\n"
    assert starts(err)
    assert was_warm(err, warm)
    server = warm.server()
    assert f"fork server {server} stays" in err
    out, err = warm.run("program.py", "b", "c", WORD="w")
    assert out == f"0| 2 {warm.cwd} ['b', 'c'] w\n"
    assert not starts(err)
    assert was_warm(err, warm)
    assert warm.server() == server
    assert re.search(r"idle for \d+ s of 600 s; 2 jobs in \d+ s, \d+ MB", warm.command("--status")[1])


def test_each_job_has_its_own_place_and_limits(warm: Warm):
    """Properties that a process can change of itself come from the command."""
    (warm.cwd / "other").mkdir()
    (warm.cwd / "other" / "where.py").write_text(
        "import os, resource, torch\n"
        "print(os.getcwd(), os.environ['PWD'], resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    warm.run("program.py")
    shell = 'cd other && ulimit -Sn 321 && exec "$0" --warm -n 1 where.py'
    out, err = warm.finish(warm.begin("sh", "-c", shell, TPURUN))
    assert out == f"{warm.cwd}/other {warm.cwd}/other 321\n"
    assert not starts(err)


@pytest.mark.parametrize(
    "before",
    [
        ("env", "OTHER=1"),
        ("nice", "-n", "3"),
        ("sh", "-c", 'umask 077; exec "$@"', "sh"),
        ("prlimit", "-s=1000000:"),
    ],
    ids=lambda before: before[0],
)
def test_a_job_in_other_circumstances_gets_another_server(warm: Warm, before: tuple[str, ...]):
    warm.run("program.py")
    _out, err = warm.run("program.py", before=before)
    assert starts(err)
    assert len(warm.servers()) == 2
    assert not starts(warm.run("program.py")[1])


def test_a_server_whose_files_have_changed_is_not_used(warm: Warm):
    module = warm.root / "modules" / "named.py"
    module.parent.mkdir()
    module.write_text("WORD = 1\n")
    (warm.cwd / "program.py").write_text("import torch, named; print(named.WORD)\n")
    options = {"PYTHONPATH": str(module.parent)}
    assert lines(warm.run("--preload", "named", "program.py", **options)[0]) == {"1"}
    server = warm.server()
    module.write_text("WORD = 22\n")
    out, err = warm.run("--preload", "named", "program.py", **options)
    assert lines(out) == {"22"}
    assert f"{module} has changed: starting another fork server" in err
    assert warm.server() != server
    assert not starts(warm.run("--preload", "named", "program.py", **options)[1])


def test_what_cannot_be_imported_is_said_each_time_and_the_job_starts(warm: Warm):
    for _ in range(2):
        out, err = warm.run("--preload", "no_such_module", "program.py")
        assert out.startswith("0| 2 ")
        assert "cannot import no_such_module" in err
    assert warm.servers() == []


def test_modules_that_a_program_names_are_there_for_the_next_one(warm: Warm):
    (warm.cwd / "program.py").write_text(
        "import sys\nprint('torch.optim' in sys.modules, 'torch.fx.interpreter' in sys.modules)\n"
        "import torch.fx.interpreter\n"
    )
    for _ in range(2):
        assert lines(warm.run("program.py")[0]) == {"True True"}


def test_stop_ends_what_is_idle_and_lets_jobs_go_on(warm: Warm):
    assert warm.command() == (0, "no warm fork server (tpurun --warm starts one)\n", "")
    job, _ = warm.waiting()
    server = warm.server()
    assert "serves 1 job;" in warm.command()[1]
    code, out, _ = warm.command("--stop")
    assert (code, out) == (0, f"fork server {server} takes no more jobs, and ends with the 1 it has\n")
    assert warm.servers() == []
    (warm.cwd / "go").touch()
    warm.finish(job)
    until(lambda: is_gone(server))
    assert starts(warm.run("program.py")[1])
    server = warm.server()
    assert warm.command("--stop")[1] == f"fork server {server} has ended\n"
    until(lambda: is_gone(server))


def test_a_server_ends_by_itself_when_nobody_comes(warm: Warm):
    warm.run("program.py", TPURUN_WARM_IDLE="1s")
    servers = warm.servers()
    until(lambda: all(is_gone(pid) for pid in servers))
    assert list((warm.root / "run" / "tpurun-warm").glob("*.socket")) == []


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_dead_or_stopped_is_replaced(warm: Warm, sent: signal.Signals):
    warm.run("program.py")
    server = warm.server()
    os.kill(server, sent)
    try:
        out, err = warm.run("program.py")
        assert out.startswith("0| 2 ")
        assert starts(err)
        assert ("is stopped" in err) == (sent == signal.SIGSTOP)
    finally:
        if sent == signal.SIGSTOP:
            os.kill(server, signal.SIGKILL)
    assert warm.server() != server


def test_a_job_survives_its_warm_server(warm: Warm):
    job, pids = warm.waiting()
    os.kill(warm.server(), signal.SIGKILL)
    (warm.cwd / "go").touch()
    warm.finish(job)
    until(lambda: all(is_gone(pid) for pid in pids))


def test_nothing_is_left_of_a_job_whose_fork_server_dies(warm: Warm):
    job, pids = warm.waiting()
    os.kill(pids[-1], signal.SIGKILL)
    _out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert "fork server" in err
    until(lambda: all(is_gone(pid) for pid in pids))
    assert not starts(warm.run("program.py")[1])


@pytest.mark.parametrize("whom", ["front", "agent"])
def test_nothing_is_left_of_a_job_whose_launcher_dies(warm: Warm, whom: str):
    job, pids = warm.waiting()
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(job.pid if whom == "front" else int(children[0]), signal.SIGKILL)
    job.communicate(timeout=LIMIT_S)
    until(lambda: all(is_gone(pid) for pid in pids))
    assert not starts(warm.run("program.py")[1])


def test_orphans_of_ranks_end_with_the_job(warm: Warm):
    (warm.cwd / "program.py").write_text(
        "import os, subprocess, torch\n"
        "sleeper = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "open(f'sleeper-{os.environ[\"RANK\"]}', 'w').write(str(sleeper.pid))\n"
        "os._exit(0)\n"
    )
    warm.run("program.py")
    for rank in range(2):
        pid = int((warm.cwd / f"sleeper-{rank}").read_text())
        until(lambda pid=pid: is_gone(pid))


@pytest.mark.parametrize(
    "said",
    [
        b"nonsense\n",
        b"{}\n",
        b'{"op": "job"}\n',
        b"[]\n",
        b"x" * (1 << 21),
        b'{"op": "job", "fds": 2}\n',
        b"",
    ],
)
def test_nonsense_harms_nobody(warm: Warm, said: bytes):
    warm.run("program.py")
    (path,) = (warm.root / "run" / "tpurun-warm").glob("*.socket")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(path))
        try:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(LIMIT_S)
            while stranger.recv(1 << 16):
                pass
        except ConnectionError:
            pass
    assert not starts(warm.run("program.py")[1])


def test_only_its_user_sees_a_server(warm: Warm):
    warm.run("program.py")
    folder = warm.root / "run" / "tpurun-warm"
    (path,) = folder.glob("*.socket")
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_server_of_another_user_is_not_used(warm: Warm):
    """As somebody would make one who can write where the user's own are."""
    warm.run("program.py")
    (path,) = (warm.root / "run" / "tpurun-warm").glob("*.socket")
    warm.command("--stop")
    until(lambda: not path.exists())
    impostor = (
        "import os, socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX)\nlistener.bind(sys.argv[1])\n"
        "os.chmod(sys.argv[1], 0o666)\nos.setuid(12345)\nlistener.listen()\nprint(flush=True)\n"
        "while True:\n    print(listener.accept()[0].recv(9), flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", impostor, path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        out, err = warm.run("program.py")
        process.kill()
        assert b"op" not in process.stdout.read()
    assert out.startswith("0| 2 ")
    assert starts(err)


def test_spawned_ranks_need_no_server(warm: Warm):
    out, err = warm.run("--spawn", "program.py")
    assert out.startswith("0| 2 ")
    assert not starts(err)
    assert warm.servers() == []
