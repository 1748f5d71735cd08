"""A rank starts in the same world as under torchrun or under Python itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from tools.jobs import Finished, Job, ranks_in

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# Everything a program can tell about how it was started, and a collective.
VIEW = """
import json, os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
tensor = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
dist.destroy_process_group()
own = ("RANK", "WORLD", "MASTER", "GROUP", "ROLE", "TORCHELASTIC", "LOCAL", "OMP", "MKL", "OPENBLAS")
print(json.dumps({
    "environment": {name: value for name, value in os.environ.items() if name.startswith(own)},
    "argv": sys.argv,
    "path": sys.path,
    "name": __name__,
    "file": globals().get("__file__"),
    "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "flags": list(sys.flags),
    "signals": {str(number): repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
    "threads": torch.get_num_threads(),
    "cwd": os.getcwd(),
    "tensor": tensor.tolist(),
}))
"""


def views(done: Finished, ranks: int) -> list[dict]:
    assert done.code == 0, done.err
    return [json.loads(done.log(rank)) for rank in range(ranks)]


def test_a_job_that_succeeds(run, script):
    done = run("-n", "3", script("import os\nprint('rank', os.environ['RANK'])\nprint('done')"))
    assert (done.code, done.run_dir.joinpath("report.txt").exists()) == (0, False)
    assert done.shown_by_rank() == {rank: [f"rank {rank}", "done"] for rank in range(3)}
    assert [end["code"] for end in done.ends().values()] == [0, 0, 0]


def test_the_environment_is_torchruns(run, script):
    program = script(
        "import json, os, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist')\n"
        "object = [dist.get_rank()]\n"
        "dist.broadcast_object_list(object, 1)\n"
        "assert object == [1]\n"
        "if dist.get_rank() == 1: print(json.dumps(dict(os.environ)))\n"
    )
    arguments = ["--standalone", "--nproc-per-node=2", program]
    theirs = start_torchrun(run, arguments)
    ours = json.loads(run(*arguments).log(1))
    inherited = os.environ.keys()
    # Those are for torchrun's own agent, and for NCCL.
    private = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert theirs.keys() - inherited - private <= ours.keys()
    own_values = {
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
        "OMP_NUM_THREADS",
    }
    for name in theirs.keys() - inherited - private - own_values:
        if name.isupper() and name not in ("TMPDIR", "TPURUN_TEST_JOB"):
            assert ours[name] == theirs[name], name


def start_torchrun(run, arguments: list) -> dict:
    """Our backend has only the store to meet through there."""
    done = run(*arguments, command=TORCHRUN)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_program_sees_what_python_would_show_it(run, script):
    program = script(VIEW)
    words = ["--lr", "1e-3", "-n", "9", "--", "--help", "doctor"]
    for rank, view in enumerate(views(run("--standalone", "--nproc-per-node=2", program, *words), 2)):
        assert view["argv"] == [str(program), *words]
        assert view["path"][0] == str(program.parent)
        assert (view["name"], view["file"], view["package"], view["main"]) == (
            "__main__",
            str(program),
            None,
            True,
        )
        environment = view["environment"]
        assert (environment["RANK"], environment["LOCAL_RANK"], environment["ROLE_RANK"]) == (str(rank),) * 3
        assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert Path(environment["TORCHELASTIC_ERROR_FILE"]).parent.name == "errors"
        assert view["tensor"] == [3.0] * 3


def test_a_spawned_rank_sees_what_a_forked_one_sees(run, script):
    program = script(VIEW)
    forked, spawned = (
        views(run("-n", "2", *options, program, "a", "-b"), 2) for options in ([], ["--spawn"])
    )
    for fork, spawn in zip(forked, spawned, strict=True):
        # A new port, directory and store process each time.
        for view in (fork, spawn):
            for name in list(view["environment"]):
                if name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
                    del view["environment"][name]
            del view["cwd"], view["environment"]["TORCHELASTIC_USE_AGENT_STORE"]
        assert fork == spawn


def test_a_module(start):
    job = start("-n", "2", "-m", "package.train", "--steps", "2", env={"PYTHONPATH": ""}, files={
        "package/__init__.py": "",
        "package/sibling.py": "value = 5",
        "package/train.py": "import sys\nfrom .sibling import value\n"
                            "print(__name__, __package__, value, sys.argv[1:], sys.path[0])",
    })  # fmt: skip
    done = job.wait()
    assert done.shown == [("0-1", f"__main__ package 5 ['--steps', '2'] {job.cwd}")]


def test_a_program_that_is_not_python(run):
    done = run("-n", "3", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE: $1"', "sh", "-x")
    assert done.code == 0, done.err
    assert sorted(done.shown) == [(str(rank), f"{rank} of 3: -x") for rank in range(3)]


def test_the_number_of_ranks_from_the_environment(run):
    done = run("--no-python", "true", env={"PET_NPROC_PER_NODE": "3"})
    assert done.code == 0, done.err
    assert done.ends().keys() == {0, 1, 2}


def test_standard_input_goes_to_rank_0(run, script):
    program = script("import sys\nprint(repr(sys.stdin.read()))")
    done = run("-n", "3", program, stdin="one\ntwo\n")
    assert sorted(done.shown) == [("0", r"'one\ntwo\n'"), ("1-2", "''")]


CHATTY = """
import os
rank = int(os.environ["RANK"])
for step in range(200):
    print(f"rank {rank}", "x" * 100, step)
print("in two ", end="")
print("parts")
print("without an end", end="")
"""


def test_lines_are_whole_and_prefixed(run, script):
    done = run("-n", "4", script(CHATTY))
    for rank in range(4):
        lines = [f"rank {rank} {'x' * 100} {step}" for step in range(200)] + [
            "in two parts",
            "without an end",
        ]
        assert done.shown_by_rank()[rank] == lines
        assert done.log(rank) == "\n".join(lines)


def test_both_streams_are_shown_as_they_are(run):
    done = run("-n", "2", "--no-python", "sh", "-c", "echo out; echo err >&2")
    own = [line for line in done.err.splitlines() if not line.startswith("tpurun: ")]
    assert done.shown_by_rank() == {0: ["out"], 1: ["out"]}
    assert sorted(rank for line in own for rank in ranks_in(line.split("|")[0].strip())) == [0, 1]
    assert all(line.endswith("| err") for line in own)


# Rank 0 writes the line of everybody, so that no scheduler comes between the ranks.
TOGETHER = """
import os
import torch.distributed as dist

dist.init_process_group("tpu_dist")
pids = [None] * dist.get_world_size()
dist.all_gather_object(pids, os.getpid())
if dist.get_rank() == 0:
    for pid in pids:
        with open(f"/proc/{pid}/fd/1", "w") as its_output:
            its_output.write("the same line\\n")
dist.barrier()
"""


def test_the_same_line_of_many_ranks_is_shown_once(run, script):
    done = run("-n", "8", script(TOGETHER))
    assert done.shown_by_rank() == {rank: ["the same line"] for rank in range(8)}
    assert len(done.shown) <= 2, "one, unless the launcher looked in the middle of it"


def test_the_run_directory_can_be_named(start, tmp_path):
    logs = tmp_path / "made" / "logs"
    job = start("-n", "2", "--log-dir", logs, "--no-python", "sh", "-c", "echo out $RANK; echo err >&2")
    done = job.wait(folder=logs)
    assert not list(job.cwd.iterdir())
    assert [sorted(done.log(rank).splitlines()) for rank in range(2)] == [["err", "out 0"], ["err", "out 1"]]
    assert [event["event"] for event in done.events][-1] == "ended"


def test_only_some_ranks_are_shown_and_all_are_logged(run):
    done = run("-n", "4", "--only-ranks", "1,3", "--no-python", "sh", "-c", "echo $RANK")
    assert sorted(done.shown) == [("1", "1"), ("3", "3")]
    assert [done.log(rank) for rank in range(4)] == ["0\n", "1\n", "2\n", "3\n"]


RANDOM = """
import random
import numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item())
"""


@pytest.mark.parametrize("options", [[], ["--preload", "numpy,random"]], ids=["imported", "preloaded"])
def test_nobody_draws_the_numbers_of_another(run, script, options: list[str]):
    """Separate processes would not; torch, too, seeds its generator anew in each."""
    done = run("-n", "3", *options, script(RANDOM))
    draws = [done.log(rank).split() for rank in range(3)]
    assert [len(set(column)) for column in zip(*draws, strict=True)] == [3, 3, 3], draws


@pytest.mark.slice(2)
@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_exit_handlers_and_threads_of_the_program_finish(run, script, start_method: list[str]):
    program = script(
        "import atexit, threading\n"
        "atexit.register(print, 'last')\n"
        "go = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(), print('thread'))).start()\n"
        "print('main')\n"
        "go.set()\n"
    )
    done = run("-n", "1", *start_method, program)
    lines = done.log(0).splitlines()
    assert set(lines[:2]) == {"main", "thread"} and lines[2:] == ["last"], lines


THREADS = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"


@pytest.mark.slice(2)
@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_threads_share_the_cores(run, script, start_method: list[str]):
    cores = len(os.sched_getaffinity(0))
    program = script(THREADS)
    share = max(1, cores // 3)
    assert run("-n", "3", *start_method, program).log(2) == f"{share} {share}\n"
    # One rank would get them all.
    set_by_user = run("-n", "1", *start_method, program, env={"OMP_NUM_THREADS": "1"})
    assert set_by_user.log(0) == "1 1\n"


def test_a_rank_alone_has_all_cores(run, script):
    cores = len(os.sched_getaffinity(0))
    assert run("-n", "1", script(THREADS)).log(0) == f"{cores} {cores}\n"


SPAWNS = """
import os, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, store):
    dist.init_process_group("tpu_dist", init_method=f"file://{store}", rank=rank, world_size=3)
    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0] * 4
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "store"),), nprocs=3)
    print("spawned")
"""


def test_without_any_launcher(start, script):
    # The helper of multiprocessing leaves a moment after the process it helps.
    done = start(script(SPAWNS), command=[sys.executable]).wait(linger_s=5)
    assert (done.code, done.out) == (0, "spawned\n"), done.err


MEETING = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
if dist.get_rank() == 0:
    print("ready", flush=True)
    input()
for step in range(100):
    tensor = torch.full((100,), float(os.environ["FACTOR"]))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3 * float(os.environ["FACTOR"])] * 100
print("right")
"""


def test_jobs_do_not_disturb_each_other(start, script):
    program = script(MEETING)
    jobs: list[Job] = [
        start("-n", "3", program, stdin="go\n", env={"FACTOR": str(factor)}) for factor in (1, 1000)
    ]
    for job in jobs:
        job.read_until("ready")
    for job in jobs:
        done = job.wait()
        assert done.code == 0, done.err
        assert [done.log(rank).splitlines()[-1] for rank in range(3)] == ["right"] * 3


AGAIN = """
import torch
import torch.distributed as dist

for life in range(3):
    dist.init_process_group("tpu_dist")
    group = dist.new_group([0, 2])
    tensor = torch.full((4,), dist.get_rank() + life)
    if dist.get_rank() != 1:
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)
    print(tensor.tolist())
    dist.destroy_process_group()
"""


def test_a_world_after_a_world(run, script):
    done = run("-n", "3", script(AGAIN))
    assert done.code == 0, done.err
    # Ranks 0 and 2 have 2 + 2 life each, rank 1 has 1 + life.
    expected = "".join(f"{[5 + 5 * life] * 4}\n" for life in range(3))
    assert [done.log(rank) for rank in range(3)] == [expected] * 3


GOOGLES = """
import subprocess, sys, torch
print(torch.ones(2, device="tpu").tolist(), flush=True)
child = "import torch; print(torch.ones(3, device='tpu').tolist())"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_googles_torch_tpu_does_not_load_without_chips(run, script, tmp_path, start_method: list[str]):
    home = tmp_path / "google"
    information, package = home / "torch_tpu-0.2.0.dist-info", home / "torch_tpu"
    for folder in (information, package):
        folder.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n")
    (package / "__init__.py").write_text("")
    (package / "_loader.py").write_text("import os\nos.abort()  # as it does without libtpu\n")
    path = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))
    done = run("-n", "1", *start_method, script(GOOGLES), env={"PYTHONPATH": path})
    assert done.code == 0, done.err
    assert [line.rpartition("| ")[2] for line in done.out.splitlines()] == ["[1.0, 1.0]", "[1.0, 1.0, 1.0]"]
