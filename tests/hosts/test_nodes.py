"""Jobs of several hosts, with a tpurun on each: network namespaces, or only pretended."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fault_matrix import network
from fault_matrix.network import FAULTS, NetworkFault
from tools.jobs import TPURUN, Finished, Job, free_rendezvous
from tools.namespaces import NotAllowed, kinds_of_hosts
from tools.nodes import TOKEN, Node, commands
from tools.nodes import plugged as plugged_nodes

from .test_hosts import EVERYTHING


@pytest.fixture
def plugged() -> Iterator[Callable[[int], list[Node]]]:
    """Makes so many that are network namespaces."""
    with ExitStack() as stack:

        def make(count: int) -> list[Node]:
            try:
                return stack.enter_context(plugged_nodes(count))
            except NotAllowed as why:
                pytest.skip(f"network namespaces: {why}")

        yield make


@pytest.fixture(params=kinds_of_hosts())
def hosts(request, plugged) -> Callable[[int], list[Node]]:
    """Makes so many of either kind."""
    if request.param == "namespaces":
        return plugged
    return lambda count: [Node([], f"n{node}", "127.0.0.1") for node in range(count)]


@pytest.fixture
def run(start, script) -> Callable[..., list[Job]]:
    """Starts a tpurun on each of these hosts, for `each` ranks of a program there."""

    def run(hosts: list[Node], each: int, program: str, *options: str) -> list[Job]:
        started = commands(hosts, each, *options, script(program))
        return [start(command=command, env=env) for command, env in started]

    return run


def shown(done: list[Finished]) -> dict[int, list[str]]:
    """The lines of all ranks."""
    lines: dict[int, list[str]] = {}
    for one in done:
        lines |= one.shown_by_rank()
    return lines


def culprits(done: list[Finished]) -> str:
    """Returns what all reports say alike about the culprit."""
    told = set()
    for one in done:
        text = (one.run_dir / "report.txt").read_text()
        assert one.err.endswith(text), one.err
        match = re.search(r"^  culprit +(.*?)^  (?:victims|last log|next) ", text, re.MULTILINE | re.DOTALL)
        assert match, text
        told.add(match[1])
    assert len(told) == 1, told
    return told.pop()


def test_everything_works_between_nodes(hosts, run):
    done = [job.wait() for job in run(hosts(2), 2, EVERYTHING)]
    assert [one.code for one in done] == [0, 0], done
    assert shown(done) == {rank: ["all is well"] for rank in range(4)}
    assert "2 ranks of 4, node 1 of 2 (host n1)" in done[1].err


def test_ranks_know_where_they_are(hosts, run):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    program = f"""
import os
values = [os.environ[name] for name in {names}]
print(*values, "TPURUN_TOKEN" in os.environ, os.environ["TORCHELASTIC_RUN_ID"])
"""
    done = [job.wait() for job in run(hosts(2), 2, program)]
    lines = [line.rsplit(" ", 1) for _, (line,) in sorted(shown(done).items())]
    assert [line[0] for line in lines] == [
        "0 4 0 2 0 2 False", "1 4 1 2 0 2 False", "2 4 0 2 1 2 False", "3 4 1 2 1 2 False"
    ]  # fmt: skip
    assert len({line[1] for line in lines}) == 1, "the same job"


FAILING = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from tpurun.errors import DistBackendError

# They are asked to end while they say why they do by themselves.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group("tpu_dist")
rank = dist.get_rank()
began = time.monotonic()
try:
    # Other hosts may learn of a loss before they learn that this is over.
    dist.barrier()
    {what}
    dist.barrier()
except DistBackendError as error:
    took, kind = time.monotonic() - began, type(error).__name__
    print(f"{{took:.3f}} {{kind}} {{error.ranks}} {{error}}".replace("\\n", "/"))
    raise
"""


def failed(done: list[Finished], but: int) -> tuple[str, float]:
    """Returns the text that all ranks but one have said alike, and after how long."""
    told = [lines[-1].split(" ", 1) for rank, lines in shown(done).items() if rank != but]
    assert len(told) == 3 and len({text for _, text in told}) == 1, told
    return told[0][1], max(float(seconds) for seconds, _ in told) / max(one.patience for one in done)


@pytest.mark.slice(2)
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_killed_is_named_alike_everywhere(hosts, run, rank: int):
    """Rank 2 is the first of its host, through which the other one there speaks to others."""
    what = f"rank == {rank} and os.kill(os.getpid(), signal.SIGKILL)"
    done = [job.wait() for job in run(hosts(2), 2, FAILING.format(what=what))]
    assert [one.code for one in done] == [137, 137], done
    host = rank // 2
    assert re.match(rf"rank {rank} \(host n{host}, pid \d+\)  was killed by SIGKILL", culprits(done))
    text, seconds = failed(done, but=rank)
    said = rf"RankLostError \({rank},\) rank {rank} \(host n{host}, pid \d+\) was killed by SIGKILL"
    assert re.match(said, text), text
    assert seconds < 1, text


def test_an_exception_on_one_node_ends_all(hosts, run):
    what = "if rank == 3: raise ValueError('loss is NaN')"
    done = [job.wait() for job in run(hosts(2), 2, FAILING.format(what=what))]
    assert [one.code for one in done] == [1, 1], done
    blamed = culprits(done)
    assert re.match(r"rank 3 \(host n1, pid \d+\)  raised ValueError: loss is NaN\n", blamed), blamed
    assert "first of 4 to fail" in blamed


def test_a_mismatch_between_nodes_is_told_alike(hosts, run):
    what = "dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)"
    done = [job.wait() for job in run(hosts(2), 2, FAILING.format(what=what))]
    blamed = culprits(done)
    # Node 0 knows the number of a process of another node only once it has ended.
    assert re.match(r"rank 2 \(host n1(, pid \d+)?\)  is to blame for CollectiveMismatchError", blamed), (
        blamed
    )
    assert re.search(r"minority: rank 2 \(host n1, pid \d+\) posted all_reduce\(f32\[2\], max\)", blamed), (
        blamed
    )
    assert [one.code for one in done] == [1, 1], done


def test_a_rank_that_leaves_early_is_named_everywhere(hosts, run):
    what = "rank == 3 and os._exit(0)"
    done = [job.wait() for job in run(hosts(2), 2, FAILING.format(what=what))]
    assert [one.code for one in done] == [1, 1], done
    blamed = culprits(done)
    assert re.match(r"rank 3 \(host n1, pid \d+\)  exited with code 0 while others", blamed), blamed


INTERRUPTED_IN_A_CREATION = """
import os, signal, sys, threading, time
import torch.distributed as dist

# The others are asked to end while they say why they do by themselves.
signal.signal(signal.SIGTERM, signal.SIG_IGN)


def interrupt_once_it_waits():
    before = None
    while True:
        frame = sys._current_frames()[threading.main_thread().ident]
        now = frame.f_code.co_filename, frame.f_lasti
        if now == before and "/tpurun/backend/" in now[0]:
            return os.kill(os.getpid(), signal.SIGINT)
        before = now
        time.sleep(0.3)


rank, guilty = int(os.environ["RANK"]), int(sys.argv[1])
if rank == 3:
    time.sleep(1000)
if rank == guilty:
    threading.Thread(target=interrupt_once_it_waits, daemon=True).start()
try:
    dist.init_process_group("tpu_dist")
except KeyboardInterrupt:
    time.sleep(1000)
except Exception as error:
    print(type(error).__name__, error.ranks, error, flush=True)
    raise
"""


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_a_rank_that_is_interrupted_before_all_have_come_is_named_everywhere(
    hosts, start, script, guilty: int
):
    """Ctrl-C asks all ranks to end; a signal of somebody else's may come to one of them, which goes on."""
    program = script(INTERRUPTED_IN_A_CREATION)
    jobs = [
        start(command=command, env=env)
        for command, env in commands(hosts(2), 2, "--shutdown-timeout", "1", program, str(guilty))
    ]
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [1, 1], done
    said = {lines[-1] for lines in shown(done).values()}
    assert len(said) == 1, said
    who = rf"rank {guilty} \(host n{guilty // 2}, pid \d+\)"
    assert re.match(
        rf"AbortedError \({guilty},\) {who} stopped creating group 0: its program was interrupted", *said
    ), said
    assert re.match(rf"rank {guilty} \(host n{guilty // 2}(, pid \d+)?\)  is to blame for", culprits(done))


def test_a_node_that_vanishes_is_named_by_the_others(hosts, run):
    program = """
import torch.distributed as dist
dist.init_process_group("tpu_dist")
dist.barrier()
print("ready", flush=True)
dist.barrier() if dist.get_rank() < 2 else __import__("time").sleep(600)
"""
    jobs = run(hosts(2), 2, program)
    jobs[1].read_until("ready")
    agent = int(re.search(r'"agent": *(\d+)', (jobs[1].run_dir / "events.jsonl").read_text())[1])
    jobs[1].signal(9, agent)
    done = jobs[0].wait()
    assert jobs[1].wait().code == 137
    assert done.code == 1
    assert "culprit   host n1 (node 1) is gone: nothing came from it for 5 s" in done.err, done.err


@pytest.mark.slice(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_befalls_the_network_is_survived_or_told_alike(tmp_path, fault: NetworkFault):
    try:
        seen = network.run(fault, tmp_path, seconds=2)
    except NotAllowed as why:
        pytest.skip(f"network namespaces: {why}")
    assert seen.problems == []


def test_whoever_is_asked_to_stop_stops_all(hosts, run):
    program = """
import time
import torch.distributed as dist
dist.init_process_group("tpu_dist")
dist.barrier()
print("ready", flush=True)
time.sleep(600)
"""
    jobs = run(hosts(2), 2, program)
    for job in jobs:
        job.read_until("ready")
    jobs[1].signal(2)
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [130, 130], done
    assert "interrupted on host n1: stopping" in done[0].err


def test_a_stranger_is_refused_and_the_job_goes_on(hosts, start, script):
    made = hosts(2)
    path = script("print('here')")
    rendezvous = free_rendezvous(made[0].address)

    def node(number: int, token: str) -> Job:
        words = ["--nnodes", "2", "--node-rank", str(number), "--rdzv", rendezvous, "-n", "1", path]
        host = made[number]
        env = {"TPURUN_TOKEN": token, "TPURUN_HOST": host.name}
        return start(*words, command=[*host.command, TPURUN], env=env)

    first = node(0, TOKEN)
    stranger = node(1, "another token, which is long enough, too").wait()
    assert stranger.code == 2
    assert stranger.err == "tpurun: error: node 0 refuses this node: another token\n"
    second = node(1, TOKEN)
    done = [first.wait(), second.wait()]
    assert [one.code for one in done] == [0, 0], done
    assert re.search(r"^tpurun: refused \S+: another token$", done[0].err, re.MULTILINE), done[0].err
    assert TOKEN not in done[0].err + done[1].err


def test_who_does_not_come_is_named(start, script):
    rendezvous = free_rendezvous()
    words = ["--nnodes", "3", "--node-rank", "0", "--rdzv", rendezvous, "--rdzv-timeout", "1s"]
    done = start(*words, script(""), env={"TPURUN_TOKEN": TOKEN}).wait()
    assert done.code == 2
    assert done.err.endswith(f"tpurun: error: nodes 1-2 of 3 did not come to {rendezvous} within 1 s\n")


def test_pods_of_kubernetes_number_the_nodes(start, script):
    """As examples/cluster/kubernetes.yaml starts them, but for the names of the pods."""
    rendezvous = free_rendezvous()
    path = script("import os; print(os.environ['GROUP_RANK'], os.environ['WORLD_SIZE'])")
    words = ["--nnodes", "2", "--rdzv", rendezvous, "-n", "2", path]
    env = [{"TPURUN_TOKEN": TOKEN, "JOB_COMPLETION_INDEX": str(pod)} for pod in range(2)]
    done = [job.wait() for job in [start(*words, env=one) for one in env]]
    assert [one.code for one in done] == [0, 0], done
    assert shown(done) == {rank: [f"{rank // 2} 4"] for rank in range(4)}


def test_torchruns_way_to_say_where_node_0_is(start, script):
    port = free_rendezvous().split(":")[1]
    program = """
import os
import torch.distributed as dist
dist.init_process_group("tpu_dist")
dist.barrier()
print(os.environ["MASTER_ADDR"])
"""
    words = ["--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    path = script(program)
    env = {"TPURUN_TOKEN": TOKEN}
    done = [job.wait() for job in [start(*words, f"--node_rank={node}", path, env=env) for node in range(2)]]
    assert [one.code for one in done] == [0, 0], done
    assert shown(done) == {rank: ["127.0.0.1"] for rank in range(4)}


def test_a_token_is_made_and_kept_secret(tmp_path):
    made = [subprocess.run([TPURUN, "token"], capture_output=True, text=True).stdout for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{48}\n", token) for token in made)
    assert made[0] != made[1]


@pytest.mark.slice(2)
@pytest.mark.parametrize("count", [2, 4])
def test_pretended_hosts_need_no_second_tpurun(start, script, count: int):
    done = start("-n", "4", "--hosts", str(count), script(EVERYTHING)).wait()
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {rank: ["all is well"] for rank in range(4)}
    assert f"4 ranks on {count} pretended hosts" in done.err


@pytest.mark.full
def test_pretended_hosts_on_a_bad_network(start, script):
    link = "delay=2ms,jitter=2ms,loss=1%,duplicate=1%,rate=500Mbit"
    began = time.time()
    done = start("-n", "4", "--hosts", "2", "--link", link, script(EVERYTHING)).wait()
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {rank: ["all is well"] for rank in range(4)}
    # Many more than 100 times there and back, one after the other.
    assert time.time() - began > 100 * 2 * 0.002


def test_every_host_shows_all_ranks(hosts, run):
    program = """
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
dist.all_reduce(torch.ones(8))
print("ready", flush=True)
while dist.get_rank() == 3:
    pass
dist.all_reduce(torch.ones(9))
"""
    jobs = run(hosts(2), 2, program)
    for job in jobs:
        job.read_until("ready")

    def status(job: Job) -> dict:
        asked = [TPURUN, "status", "--json", job.run_dir]
        return json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)

    def until(job: Job, is_it: Callable[[dict], bool]) -> dict:
        deadline = time.monotonic() + 60
        while not is_it(seen := status(job)):
            assert time.monotonic() < deadline, seen
        return seen

    def is_told(seen: dict) -> bool:
        return not seen["silent"] and [row["state"] for row in seen["classes"]] == ["waiting", "running"]

    for job in jobs:
        seen = until(job, is_told)
        waiting, running = seen["classes"]
        assert (waiting["ranks"], running["ranks"]) == ("0-2", "3")
        assert waiting["operation"].startswith("all_reduce#1 (f32[9]") and running["completed"] == [1, 1]
        assert list(range(4)) in [group["members"] for group in seen["communicators"]]
        assert running["cpu_percent"] > waiting["cpu_percent"]
        assert waiting["for_ms"] < 60_000
    agent = json.loads((jobs[1].run_dir / "job.json").read_text())["job"]["agent_pid"]
    jobs[1].signal(signal.SIGSTOP, agent)
    assert status(jobs[0])["silent"] == [{"host": "n1", "ranks": "2-3"}]
    jobs[1].signal(signal.SIGCONT, agent)
    until(jobs[0], lambda seen: seen["silent"] == [])
    jobs[0].signal(signal.SIGTERM)
    assert [job.wait().code for job in jobs] == [143, 143]


@pytest.mark.slice(2)
@pytest.mark.parametrize(("bulk", "connections"), [("tcp", 6), ("quic", 0)])
def test_large_tensors_take_all_connections(start, script, bulk, connections):
    program = """
import os
import pathlib
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
rank, ranks = dist.get_rank(), dist.get_world_size()
each = torch.arange(1 << 20)
ones = torch.ones(1 << 20, dtype=torch.bfloat16)
for count in (1, 7):
    sums = each[: 100_000 * count] + rank
    dist.all_reduce(sums)
    assert torch.equal(sums, ranks * each[: len(sums)] + 6)
    gathered = torch.empty(ranks * len(sums), dtype=sums.dtype)
    dist.all_gather_into_tensor(gathered, sums + rank)
    assert torch.equal(gathered, torch.cat([sums + other for other in range(ranks)]))
    part = torch.empty(len(ones) // ranks, dtype=ones.dtype)
    dist.reduce_scatter_tensor(part, ones)
    assert torch.equal(part, torch.full_like(part, ranks))
threads = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
descriptors = pathlib.Path("/proc/self/fd").iterdir()
sockets = {os.readlink(path) for path in descriptors if path.is_symlink()}
store = f"{int(os.environ['MASTER_PORT']):04X}"
rows = [row.split() for row in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
own = [row for row in rows if f"socket:[{row[9]}]" in sockets and row[3] == "01"]
seen = threads.count("tpurun-net"), sum(store not in row[1] + row[2] for row in own)
dist.barrier()  # connections are closed by whoever ends first
print(*seen)
"""
    job = start("-n", "4", "--hosts", "2", "--connections", "3", "--bulk", bulk, script(program))
    done = job.wait()
    assert done.code == 0, done.err
    # The first rank of each host speaks for it; over TCP each way has connections of its own.
    speaks, listens = [f"3 {connections}"], ["0 0"]
    assert done.shown_by_rank() == {0: speaks, 1: listens, 2: speaks, 3: listens}


def test_pretended_hosts_fail_as_real_ones(start, script):
    what = "rank == 2 and os.kill(os.getpid(), signal.SIGKILL)"
    done = start("-n", "4", "--hosts", "2", script(FAILING.format(what=what))).wait()
    assert done.code == 137
    text, seconds = failed([done], but=2)
    assert re.match(r"RankLostError \(2,\) rank 2 \(host h1, pid \d+\) was killed by SIGKILL", text), text
    assert seconds < 1, text
