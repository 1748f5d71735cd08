"""`srun tpurun`: a real Slurm of several nodes where it is installed, and what it says to its tasks alone."""

import os
import re
from pathlib import Path

import pytest

from tools.jobs import TPURUN, Finished, free_rendezvous
from tools.slurm import NotHere, slurm

PROGRAM = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("tpu_dist")
tensor = torch.ones(1)
dist.all_reduce(tensor)
print(os.environ["GROUP_RANK"], os.environ["LOCAL_WORLD_SIZE"], int(tensor.item()))
dist.destroy_process_group()
"""


def step(tmp_path: Path, nodes: int, tasks: str) -> dict[str, str]:
    """Returns the variables that srun gives to all tasks of a step."""
    home = tmp_path / "home"
    home.mkdir()
    return {
        "HOME": str(home),
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": str(os.getpid()),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": "n[0-1]" if nodes == 2 else "n0",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


def test_tasks_of_a_scheduler_become_one_job(start, script, tmp_path):
    """As srun starts them on two nodes: three on the first, two on the second; node 0 writes the token."""
    common = step(tmp_path, 2, "3,2")
    path, at = script(PROGRAM), free_rendezvous()
    jobs = []
    for node, tasks in enumerate((3, 2)):
        for task in range(tasks):
            own = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(task), "SLURMD_NODENAME": f"n{node}"}
            jobs.append(start("--rdzv", at, path, env=common | own))
    done = [job.wait() for job in jobs]
    assert [one.code for one in done] == [0] * 5, done
    lines = {rank: line for one in done for rank, (line,) in one.shown_by_rank().items()}
    assert lines == {0: "0 3 5", 1: "0 3 5", 2: "0 3 5", 3: "1 2 5", 4: "1 2 5"}
    assert "3 ranks of 5, node 0 of 2 (host n0)" in done[0].err
    assert [one.out for one in done[1:3]] == ["", ""], "who follows says nothing"
    assert not list((tmp_path / "home" / ".tpurun").iterdir()), "the token is gone"


def test_programs_of_a_step(start, script, tmp_path):
    """Ranks are numbered over all nodes: those of the first program end where the step says nothing of it."""
    common, at = step(tmp_path, 2, "1,2"), free_rendezvous()
    names = ("TPURUN_PROGRAM", "ROLE_RANK", "WORLD_SIZE")
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    first, second = script(program, "first.py"), script(program, "second.py")

    def run(*words: str | Path) -> list[Finished]:
        tasks = [("0", "0"), ("1", "0"), ("1", "1")]
        jobs = []
        for node, task in tasks:
            own = {"SLURM_NODEID": node, "SLURM_LOCALID": task, "SLURMD_NODENAME": f"n{node}"}
            jobs.append(start("--rdzv", at, *words, env=common | own))
        return [job.wait() for job in jobs]

    done = run("-n", "2", first, ":", second)
    assert [one.code for one in done] == [0] * 3, done
    lines = {rank: line for one in done for rank, (line,) in one.shown_by_rank().items()}
    assert lines == {0: "first 0 3", 1: "first 1 3", 2: "second 0 3"}
    wrong = run(first, ":", second)
    assert all(one.code == 2 for one in wrong), wrong
    said = "-n: expected 3, the ranks of all nodes together, given 2 in all programs"
    assert all(said in one.err for one in wrong[:2]), wrong


def test_who_follows_ends_as_the_job_does(start, script, tmp_path):
    common = step(tmp_path, 1, "2") | {"SLURM_NODEID": "0"}
    path = script("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    jobs = [start(path, env=common | {"SLURM_LOCALID": str(task)}) for task in range(2)]
    assert [job.wait().code for job in jobs] == [7, 7]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        with slurm(4, tmp_path_factory.mktemp("slurm")) as environment:
            yield environment
    except NotHere as why:
        pytest.skip(f"Slurm: {why}")


def srun(start, cluster: dict[str, str], *words: str | Path):
    names = ("SLURM_CONF", "PATH", "HOME")
    env = {name: cluster[name] for name in names} | {"PATH": f"{TPURUN.parent}:{cluster['PATH']}"}
    return start("--kill-on-bad-exit=0", *words, command=["srun"], env=env)


def test_srun_starts_the_ranks_of_all_nodes(start, script, cluster):
    words = ["-N4", "--ntasks-per-node=2", TPURUN, "--rdzv", free_rendezvous(), script(PROGRAM)]
    done = srun(start, cluster, *words).wait(linger_s=10, folder=Path("tpurun-runs"))
    assert done.code == 0, done.err
    lines = re.findall(r"^ *([0-9,-]+)\| (.*)$", done.out, re.MULTILINE)
    assert sorted(line for _, line in lines) == [f"{node} 2 8" for node in range(4)], done.out
    for node in range(4):
        assert f"2 ranks of 8, node {node} of 4 (host n{node})" in done.err, done.err


@pytest.mark.parametrize("ranks", [None, 3])
def test_a_batch_script_runs_on_all_of_its_nodes(start, script, cluster, tmp_path, ranks: int | None):
    given = [] if ranks is None else ["-n", str(ranks)]
    words = [str(word) for word in (TPURUN, "--rdzv", free_rendezvous(), *given, script(PROGRAM))]
    env = {name: cluster[name] for name in ("SLURM_CONF", "PATH", "HOME")}
    options = ["--wait", "-N2", "--ntasks-per-node=2", f"--output={tmp_path}/out", "--wrap", " ".join(words)]
    done = start(*options, command=["sbatch"], env=env).wait(linger_s=10, folder=Path("tpurun-runs"))
    out = (tmp_path / "out").read_text()
    assert done.code == 0, out
    each = ranks or 2
    for node in range(2):
        assert re.search(rf"\| {node} {each} {2 * each}$", out, re.MULTILINE), out


def test_srun_ends_with_the_culprits_code(start, script, cluster):
    # Its node has still to kill another rank when all others have ended.
    program = """
import os, signal, sys, time

if os.environ["RANK"] == "4":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("will not go", "x").close()
while os.environ["RANK"] == "5":
    if os.path.exists("will not go"):
        os.remove("will not go")
        sys.exit(9)
time.sleep(600)
"""
    words = ["-N4", "--ntasks-per-node=2", TPURUN, "--rdzv", free_rendezvous(), script(program)]
    done = srun(start, cluster, *words).wait(linger_s=10, folder=Path("tpurun-runs"))
    assert done.code == 9, done.err
    # Node 0 says it for all of them.
    assert len(re.findall(r"culprit   rank 5 \(host n2, pid \d+\)  exited with code 9", done.err)) == 1, (
        done.err
    )


ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "JOB_COMPLETION_INDEX": "1",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
TPU_SLICE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0,t-1"}


@pytest.mark.slice(2)
@pytest.mark.parametrize(
    "variables", [ALLOCATION, ALLOCATION | STEP, TPU_SLICE], ids=["allocation", "step", "slice"]
)
def test_standalone_is_this_host_alone(run, script, variables: dict[str, str]):
    done = run("--standalone", "-n", "2", script(PROGRAM), env=variables)
    assert done.code == 0, done.err
    assert done.shown_by_rank() == {rank: ["0 2 2"] for rank in range(2)}


def test_what_depends_on_a_scheduler_names_its_variable(run, script):
    path = script("raise SystemExit('started')")
    done = run("-n", "2", path, env=ALLOCATION | {"PATH": str(path.parent)})
    assert done.code == 2 and "SLURM_JOB_NUM_NODES" in done.err and "--standalone" in done.err, done.err
    done = run("--elastic", "1:2", path, env=TPU_SLICE)
    assert done.code == 2 and "TPU_WORKER_HOSTNAMES (--standalone" in done.err, done.err
    done = run("--standalone", "--nnodes", "2", path)
    assert done.err == "tpurun: error: --standalone: expected this host alone, given --nnodes 2\n"
