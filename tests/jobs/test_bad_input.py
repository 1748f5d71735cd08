"""A command that can not work says so in one line: what was expected and what was given. Nothing is left
behind."""

import re
import shutil
import subprocess

import pytest

from tools.jobs import TPURUN, Finished

SAYS_BOTH = re.compile(r"expected .*(given|got) ", re.IGNORECASE)


def only_line(done: Finished) -> str:
    """The whole output of a launcher that did not even start."""
    assert done.code == 2, done.err
    assert done.out == ""
    assert done.run_dir is None, "it has not begun"
    (line,) = done.err.splitlines()
    assert line.startswith("tpurun: error: "), line
    return line.removeprefix("tpurun: error: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("-n 2 no_such.py", "expected a script or program, given no_such.py: no such file"),
        ("-n 2 no/such/program", "expected a script or program, given no/such/program: no such file"),
        ("-n 2 --no-python no_such", "expected a program, given no_such: no such file"),
        ("-n 2", "expected a program to run, given none (see tpurun --help)"),
        ("-n 0 true", "-n: expected a number of ranks from 1 to 65536, auto or cpu, given 0"),
        ("-n -3 true", "-n: expected a number of ranks from 1 to 65536, auto or cpu, given -3"),
        ("-n many true", "-n: expected a number of ranks from 1 to 65536, auto or cpu, given many"),
        ("-n 9 --topology 2x2x2 true", "--topology 2x2x2: expected -n 8, one rank per chip, given 9"),
        ("-n 4 --topology 2x2x2 true", "--topology 2x2x2: expected -n 8, one rank per chip, given 4"),
        ("-n 4 --only-ranks 2-4 true", "--only-ranks: expected ranks below 4, given 2-4"),
        ("-n 2 --algorithm magic true", "--algorithm: expected flat, ring, bucket, given magic"),
        ("-n 2 --timeout soon true", "--timeout: expected a time such as 500ms, 30s, 10m or 1h, given soon"),
        (
            "-n 2 --nnodes 2 true",
            "--node-rank: expected 0 to 1, which of the 2 nodes this is, given none",
        ),
    ],
)
def test_a_command_line_that_can_not_work(run, arguments: str, said: str):
    assert only_line(run(*arguments.split())) == said


@pytest.mark.parametrize("topology", ["2xx2", "0x4", "x", "2x2x2x2", "4q"])
def test_what_is_no_topology(run, topology: str):
    line = only_line(run("-n", "4", "--topology", topology, "true"))
    assert line.startswith(f"--topology {topology}: ") and "expected" in line


def test_a_module_that_is_not_there(run):
    done = run("-n", "2", "-m", "no_such_module")
    assert done.code == 1
    assert done.log(0).endswith(": No module named no_such_module\n")
    assert len(done.log(0).splitlines()) == 1


def test_a_script_that_is_no_python(run, script):
    done = run("-n", "2", script("def main(:\n"))
    assert done.code == 1
    assert "SyntaxError" in done.report.what
    assert "program.py:1" in done.report.text


LIMITED = ["sh", "-c", 'ulimit -n "$0"; exec "$@"']


@pytest.mark.parametrize(("ranks", "descriptors"), [(2, 20), (2, 100), (64, 256)])
def test_too_few_descriptors(run, script, ranks: int, descriptors: int):
    done = run("-n", str(ranks), script(""), command=[*LIMITED, str(descriptors), TPURUN])
    said = rf"expected at least \d+ file descriptors for {ranks} ranks, given {descriptors} \(see ulimit -n\)"
    assert re.fullmatch(said, only_line(done))


def test_descriptors_that_just_suffice(run, script):
    """The number that the message asks for is enough for a whole job."""
    program = script(WORLD + "tensor = torch.ones(1 << 20)\ndist.all_reduce(tensor)\nassert tensor[0] == 8\n")
    refused = run("-n", "8", program, command=[*LIMITED, "10", TPURUN])
    needed = re.search(r"at least (\d+)", only_line(refused))[1]
    done = run("-n", "8", program, command=[*LIMITED, needed, TPURUN])
    assert done.code == 0, done.err


# A rank makes a group as its limits allow nothing any more, and does not end: nobody may wait for that.
CANNOT_MAKE = """
import os, resource, signal, sys, time
import torch.distributed as dist

guilty, what = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("tpu_dist")
rank, ranks = dist.get_rank(), list(range(dist.get_world_size()))
store = dist.distributed_c10d._get_default_store()
if rank == guilty and what == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1,) * 2)
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
elif rank == guilty:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
began = time.monotonic()
try:
    dist.new_group(ranks)
except RuntimeError as error:
    took = time.monotonic() - began
    print(f"{took:.3f} {list(getattr(error, 'ranks', ()))} {error}".replace("\\n", "/"), flush=True)
store.set(f"told/{rank}", "")
store.wait([f"told/{other}" for other in ranks])
"""


@pytest.mark.parametrize("hosts", [1, 2], ids=["one host", "two hosts"])
@pytest.mark.parametrize(
    ("guilty", "what"),
    [(0, "files"), (2, "files"), (0, "sizes")],
    ids=["files of the first", "files of another", "sizes"],
)
def test_who_cannot_make_a_group_is_named_at_once(run, script, guilty: int, what: str, hosts: int):
    """Rank 2 is the first one of the second host, where there are two."""
    done = run("-n", "4", "--hosts", str(hosts), script(CANNOT_MAKE), str(guilty), what)
    assert done.code == 0, done.err
    for rank, (line,) in done.shown_by_rank().items():
        took, told = line.split(" ", 1)
        assert float(took) < 1 * done.patience, line
        who = rf"\[{guilty}\] rank {guilty} \(host \S+, pid \d+\) " if rank != guilty else r"\[\] "
        assert re.match(
            rf"{who}cannot (create|join|make) .*\b(files|file descriptor|File too large)", told
        ), line


SMALL_SHM = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]


def may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_unshare(), reason="mounting needs privileges that are missing here")
@pytest.mark.slice(2)
@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_a_tiny_dev_shm_is_enough(run, script, start_method: list[str]):
    """Containers have 64 MiB of it, here are 64 KiB; the ranks share 16 MiB and more."""
    program = script(
        WORLD
        + "tensor = torch.ones(1 << 22)\ndist.all_reduce(tensor)\nassert tensor.eq(2).all()\nprint('right')\n"
    )
    done = run("-n", "2", *start_method, program, command=[*SMALL_SHM, TPURUN])
    assert done.code == 0, done.err
    assert done.log(0) == done.log(1) == "right\n"


WORLD = """
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank = dist.get_rank()
four = torch.ones(4)
"""

# In a world of two; each is wrong on both ranks, or on the root, rank 0.
CALLS = {
    "most of sparse": "dist.all_reduce(torch.eye(4).to_sparse(), dist.ReduceOp.MAX)",
    "another device": "dist.all_gather([torch.empty(4, device='meta')] * 2, four)",
    "gather to three": "dist.all_gather([torch.empty(4)] * 3, four)",
    "gather at root": "dist.gather(four, [torch.empty(4)] * 3 if rank == 0 else None, 0)",
    "scatter one": "dist.scatter(four, [torch.ones(4)] if rank == 0 else None, 0)",
    "reduce and scatter one": "dist.reduce_scatter(four, [torch.ones(4)])",
    "all to one": "dist.all_to_all([torch.empty(4)], [torch.ones(4)])",
    "gather into nine": "dist.all_gather_into_tensor(torch.empty(9), four)",
    "scatter nine": "dist.reduce_scatter_tensor(four, torch.ones(9))",
    "gather unequal": "dist.all_gather([torch.empty(5), torch.empty(5)], four)",
    "five for two": "dist.all_to_all_single(torch.empty(5), torch.ones(5))",
    "wrong splits": "dist.all_to_all_single(torch.empty(5), torch.ones(5), [1, 1], [1, 4])",
    "wrong root": "dist.broadcast(four, 7)",
    "wrong destination": "dist.send(four, 7)",
}


def last_line(done: Finished) -> str:
    """Returns the last line of the rank that is blamed. The line of its program must come before it."""
    assert done.code == 1, done.err
    log = done.log(done.report.culprit)
    assert "program.py" in log, log
    return re.sub(r"^\[rank\d\]: ", "", log.splitlines()[-1])


@pytest.mark.slice(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_can_not_work(run, script, call: str):
    line = last_line(run("-n", "2", script(WORLD + call)))
    assert line.startswith("ValueError: "), line
    assert SAYS_BOTH.search(line), line


def test_unequal_shapes(run, script):
    done = run("-n", "2", script(WORLD + "dist.all_reduce(torch.ones(4 + rank))"))
    assert done.code == 1
    for side in ("f32[4]", "f32[5]"):
        assert side in done.report.text, done.report.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        # Torch finds these before any backend could, in its own words.
        ("dist.init_process_group('tpu_dist')", "trying to initialize the default process group twice!"),
        (
            "dist.send(four, 0, group=dist.new_group([1]))",
            "(Invalid process group|Global rank 0 is not part)",
        ),
        ("dist.new_group([0, 2])", ".* rank"),
    ],
    ids=["second init", "group without this rank", "group with a rank that is not"],
)
def test_what_torch_refuses(run, script, call: str, said: str):
    line = last_line(run("-n", "2", script(WORLD + call)))
    assert re.match(f"ValueError: {said}", line), line


def test_a_group_without_this_rank_is_left_alone(run, script):
    """Torch warns whoever calls it all the same."""
    program = WORLD + (
        "dist.all_reduce(four, group=dist.new_group([1, 2]))\nprint(four.tolist())\ndist.barrier()\n"
    )
    done = run("-n", "3", script(program))
    assert done.code == 0, done.err
    warning, _source, result = done.log(0).splitlines()
    assert warning.endswith("Running all_reduce on global rank 0 which does not belong to the given group.")
    assert result == "[1.0, 1.0, 1.0, 1.0]"
    assert done.log(1) == done.log(2) == "[2.0, 2.0, 2.0, 2.0]\n"


def test_a_second_world_leaves_the_first_one_intact(run, script):
    program = WORLD + (
        "try:\n"
        "    dist.init_process_group('tpu_dist')\n"
        "except ValueError:\n"
        "    dist.all_reduce(four)\n"
        "    print(four.tolist())\n"
    )
    done = run("-n", "2", script(program))
    assert done.log(1) == "[2.0, 2.0, 2.0, 2.0]\n"


STRIDED = """
wide = torch.zeros(4, 6)
columns = wide[:, ::2]
columns.fill_(rank + 1)
dist.all_reduce(columns)
expected = torch.zeros(4, 6)
expected[:, ::2] = 3
assert torch.equal(wide, expected), wide
parts = [torch.zeros(3, 2).t() for _ in range(2)]
dist.all_gather(parts, (torch.arange(6.0).view(3, 2) + 10 * rank).t())
assert torch.equal(parts[1], (torch.arange(6.0).view(3, 2) + 10).t())
print("right")
"""


def test_tensors_with_gaps_are_taken_as_they_are(run, script):
    """Where other backends refuse them; what lies in the gaps is not touched."""
    done = run("-n", "2", script(WORLD + STRIDED))
    assert done.code == 0, done.err
    assert done.log(0) == done.log(1) == "right\n"
