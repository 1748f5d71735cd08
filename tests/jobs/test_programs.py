"""Several programs in one job: each knows who it is, they share a world, and each has a group of its own."""

import json
import re
import sys
from pathlib import Path

import pytest

from tools.jobs import ranks_in

EXAMPLES = Path(__file__).parents[2] / "examples" / "divergence"

# Each rank prints what it knows of itself and of the others.
VIEW = """
import json, os, sys
import torch.distributed as dist
import tpurun

dist.init_process_group("tpu_dist")
own = tpurun.program()
names = [None] * dist.get_world_size()
dist.all_gather_object(names, own.name)
members = [None] * len(own.ranks)
dist.all_gather_object(members, dist.get_rank(), group=own.group)
roles = [os.environ[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")]
print(json.dumps([own.name, roles, names, members, sys.argv[1:], list(own.argv)[1:]]))
"""


@pytest.mark.slice(2)
@pytest.mark.parametrize("how", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_two_scripts_are_one_world(run, script, how: list[str]):
    """Also when rank 0 is done long before the others, who still make groups."""
    late = VIEW + "dist.new_group([1, 2], use_local_synchronization=True)\n"
    done = run(*how, "-n", "1", script(VIEW, "eval.py"), "--x", ":", "-n", "2", script(late, "train.py"), "y")
    assert done.code == 0, done.err
    everybody = ["eval", "train", "train"]
    expected = [
        ["eval", ["eval", "0", "1"], everybody, [0], ["--x"], ["--x"]],
        ["train", ["train", "0", "2"], everybody, [1, 2], ["y"], ["y"]],
        ["train", ["train", "1", "2"], everybody, [1, 2], ["y"], ["y"]],
    ]
    assert [json.loads(done.log(rank)) for rank in range(3)] == expected
    assert "3 ranks (eval 0, train 1-2), " in done.err.splitlines()[0]


def test_python_that_is_forked_and_python_that_is_not(run, script):
    """A shell, which is spawned, turns into an interpreter; both meet in the store of the job."""
    script = script(VIEW, "train.py")
    words = ["-n", "1", "--role", "own", "sh", "-c", f"exec {sys.executable} {script} x y", ":"]
    done = run(*words, "-n", "2", script, "x")
    assert done.code == 0, done.err
    names = [json.loads(done.log(rank))[2] for rank in range(3)]
    assert names == [["own", "train", "train"]] * 3


def test_what_a_job_file_says(start, script):
    text = f"""
        [job]
        timeout = "20s"
        [[program]]
        name = "literal"
        command = [{json.dumps(str(script(VIEW, "a.py")))}, ":", "x:y"]
        [[program]]
        name = "other"
        ranks = 2
        command = ["b.py"]
        cwd = "inner"
        env = {{ COLOUR = "green" }}
    """
    told = "import os; print(os.path.basename(os.getcwd()), os.environ['COLOUR'])\n" + VIEW
    done = start("--job", "job.toml", files={"job.toml": text, "inner/b.py": told}).wait()
    assert done.code == 0, done.err
    assert json.loads(done.log(0))[4] == [":", "x:y"]
    assert done.log(2).splitlines()[0] == "inner green"


def test_the_culprit_is_named_with_its_program(run, script):
    fails = "import torch.distributed as dist\ndist.init_process_group('tpu_dist')\nraise ValueError('no')\n"
    waits = "import torch.distributed as dist\ndist.init_process_group('tpu_dist')\ndist.barrier()\n"
    done = run("--role", "evaluator", script(fails, "a.py"), ":", "-n", "3", script(waits, "b.py"))
    assert (done.code, done.report.culprit) == (1, 0)
    assert "culprit   rank 0 (evaluator, host " in done.report.text
    assert "raised ValueError: no" in done.report.what
    errors = done.run_dir / "errors" / "rank-0000.json"
    assert json.loads(errors.read_text())["exception"]["program"] == "evaluator"
    assert done.ends()[0]["program"] == "evaluator"


def shown_programs(out: str) -> dict[str, set[int]]:
    """Which ranks wrote lines under the name of which program."""
    labels = re.findall(r"^ *(\S+) ([0-9,-]+)\|", out, re.MULTILINE)
    return {
        name: {rank for own, ranks in labels if own == name for rank in ranks_in(ranks)} for name, _ in labels
    }


def test_actors_and_a_learner(run):
    """The example: actors that leave one after the other do not disturb those that go on."""
    done = run("--job", EXAMPLES / "actor_learner.toml")
    assert done.code == 0, done.err
    rounds = [30, 40, 50, 60]
    for rank, own in enumerate(rounds, start=1):
        assert done.log(rank) == f"{own} of {sum(rounds)} rounds\n"
    *progress, last = done.log(0).splitlines()
    order = [int(match[1]) for line in progress if (match := re.match(r"actor (\d) is done", line))]
    assert sorted(order) == [1, 2, 3, 4]
    result = re.fullmatch(
        r"learned from (\d+) batches: last mean reward (-[0-9.]+), largest error ([0-9.]+)", last
    )
    # Noise alone costs 2 * 0.3 ** 2.
    assert int(result[1]) == sum(rounds)
    assert float(result[2]) > -0.4
    assert float(result[3]) < 0.2
    assert shown_programs(done.out) == {"learner": {0}, "actor": {1, 2, 3, 4}}


def test_the_command_of_the_example(run):
    header = (EXAMPLES / "actor.py").read_text().splitlines()[2].strip()
    assert header == (EXAMPLES / "learner.py").read_text().splitlines()[2].strip()
    words = header.removeprefix("tpurun ").split()
    root = EXAMPLES.parent.parent
    done = run(*[root / word if word.endswith(".py") else word for word in words])
    assert done.code == 0, done.err
    assert "learned from 180 batches" in done.log(0)
