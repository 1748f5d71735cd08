"""Ranks that train alone are told so in one line; who needs no process group, or has one, is not."""

import pytest

ALONE = "ranks ended well, but none made a process group: each ran alone"
TRAIN = "import torch\ntorch.ones(2).sum()\n"
GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()\n"
HALF = "import sys, torch\nsys.exit(int(sys.argv[1]))\n"


@pytest.mark.slice(2)
@pytest.mark.parametrize("how", [[], ["--spawn"]], ids=["forked", "spawned"])
def test_the_missing_switches_are_named(run, script, how):
    for library in ("accelerate", "transformers"):
        script("", f"{library}.py")
    done = run("-n", "2", *how, script(f"import accelerate, transformers\n{TRAIN}"))
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if ALONE in line]
    switches = "ACCELERATE_USE_CPU=true for accelerate, use_cpu=True for transformers"
    assert lines == [f"tpurun: all 2 {ALONE}; missing: {switches}"]


def test_a_program_without_libraries_is_told_too(run, script):
    assert f"tpurun: all 2 {ALONE}\n" in run("-n", "2", script(TRAIN)).err


@pytest.mark.slice(2)
@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        (1, TRAIN),
        (2, "print('no torch')"),
        (2, GLOO),
        (2, f"{TRAIN}import os\nprint(os.environ['RANK'])"),
        (2, f"{TRAIN}import socket"),
        (2, f"{TRAIN}from torch.distributed import TCPStore"),
        (2, f"{TRAIN}import os\nos._exit(0)"),
    ],
)
def test_nobody_else_is(run, script, ranks, program):
    done = run("-n", str(ranks), script(program))
    assert done.code == 0 and ALONE not in done.err


def test_a_job_that_fails_has_other_news(run, script):
    done = run("-n", "1", script(HALF), "0", ":", "-n", "1", script(HALF), "3")
    assert done.code == 3 and ALONE not in done.err
