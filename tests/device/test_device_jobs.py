"""Jobs on device tpu: who gets it, how much of it, and that nothing of it is left however a rank ends."""

import os
import signal
from collections.abc import Iterator

import pytest

PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist

dist.init_process_group()
rank, what = dist.get_rank(), sys.argv[1]
assert dist.get_backend_config() == "tpu:tpu_dist", dist.get_backend_config()
tensor = torch.ones(1 << 20, device="tpu")
dist.all_reduce(tensor)
assert tensor[5].item() == dist.get_world_size()
torch.tpu.synchronize()
dist.barrier(device_ids=[0])  # without, torch warns that it has to choose
if rank == 1 and what == "raise":
    raise ValueError("on purpose")
if rank == 1 and what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and what == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
dist.all_reduce(tensor)
assert tensor[5].item() == dist.get_world_size() ** 2
print("right")
dist.destroy_process_group()
"""
NAMELESS = """
import torch
device = torch.accelerator.current_accelerator()
print(device.type if device is not None else None)
"""


def arenas() -> Iterator[str]:
    """Those that any process has open or mapped."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                yield from (line for line in maps if "memfd:tpurun-arena" in line)
        except OSError:
            continue  # it has ended


@pytest.mark.parametrize("start_method", [[], ["--spawn"]], ids=["fork", "spawn"])
def test_ranks_use_each_others_memory(run, script, start_method):
    done = run("-n", "4", *start_method, script(PROGRAM), "end")
    assert done.code == 0, done.err
    assert [done.log(rank) for rank in range(4)] == ["right\n"] * 4


@pytest.mark.parametrize(
    ("what", "code"), [("raise", 1), ("kill", 128 + signal.SIGKILL), ("crash", 128 + signal.SIGSEGV)]
)
def test_no_memory_is_left_however_a_rank_ends(run, script, what: str, code: int):
    before = set(arenas())
    done = run("-n", "4", script(PROGRAM), what)
    assert done.code == code, done.err
    assert done.report.culprit == 1
    assert set(arenas()) <= before


def test_the_launcher_gives_the_device_to_programs_that_do_not_name_it(run, script):
    assert run("-n", "1", "--device", "tpu", script(NAMELESS)).log(0) == "tpu\n"
    assert run("-n", "1", script(NAMELESS)).log(0) != "tpu\n"
    refused = run("-n", "1", "--device", "cpu", script("import torch\ntorch.tpu.init()"))
    assert refused.code == 1 and "switched off by TPURUN_DEVICE=0" in refused.log(0)


def test_memory_is_bounded(run, script):
    program = script(
        'import torch\nkept = torch.ones(1 << 20, device="tpu")\ntorch.ones(1 << 24, device="tpu")\n'
    )
    done = run("-n", "1", "--hbm", "16MiB", program)
    assert done.code == 1
    assert "OutOfMemoryError" in done.log(0) and "program.py:2" in done.log(0), done.log(0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hbm", "lots"], "--hbm: expected a size of 1MiB to 16TiB such as 512MiB or 16GiB, given lots"),
        (["--device", "gpu"], "--device: expected tpu or cpu, given gpu"),
    ],
)
def test_bad_options_are_refused(run, words, expected: str):
    done = run("-n", "1", *words, "true")
    assert done.code == 2 and expected in done.err
