"""`--backend-for gloo`: groups that a program asks Gloo for, or no backend, are those of tpu_dist. Without it
tpurun says of which groups it knows nothing."""

import json
import re
import subprocess

from tools.jobs import TPURUN

# The program does what libraries do on CPUs, with every name that torch takes for Gloo.
LIBRARIES = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CPU = torch.device("cpu")
for given in (None, "gloo", "GLOO", "cpu:gloo"):
    dist.init_process_group(given)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    named = dist.new_group(backend="gloo")
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    for group in (dist.group.WORLD, dist.new_group(), named, mesh["tp"].get_group()):
        backend = group._get_backend(CPU)
        assert backend.name() == "tpu_dist" and isinstance(backend, ProcessGroupGloo), given
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == ranks * (ranks + 1) / 2, given
        dist.monitored_barrier(group, timeout=timedelta(seconds=30))
    # Libraries compare with these.
    names = [dist.get_backend(), dist.get_backend(named), dist.get_backend_config()]
    if given != "cpu:gloo":
        dist.destroy_process_group()
    print(names, flush=True)
try:
    dist.group.WORLD._get_backend(CPU)._get_default_timeout
except AttributeError as error:
    print(error, flush=True)
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dcp.save(model.state_dict(), checkpoint_id=os.path.join(os.environ["TPURUN_RUN_DIR"], "saved"))
"""


def test_what_is_asked_of_gloo_is_of_this_backend(run, script):
    done = run("-n", "2", "--backend-for", "gloo", script(LIBRARIES))
    assert done.code == 0, done.err
    assert done.log(0).splitlines() == [
        "['undefined', 'gloo', 'cpu:gloo']",
        "['gloo', 'gloo', 'cpu:gloo,cuda:gloo']",
        "['gloo', 'gloo', 'cpu:gloo,cuda:gloo']",
        "['cpu:gloo', 'gloo', 'cpu:gloo']",
        "_get_default_timeout: expected what every backend has, given an attribute of ProcessGroupGloo; "
        "this group is of tpu_dist (TPURUN_BACKEND_FOR=gloo)",
    ]


# Two devices of one group, of which Gloo is asked for one.
DEVICES = """
import torch, torch.distributed as dist
dist.init_process_group("cpu:gloo,tpu:tpu_dist")
backends = [dist.group.WORLD._get_backend(torch.device(name)) for name in ("cpu", "tpu")]
tensors = [torch.ones(1), torch.ones(1, device="tpu")]
for tensor in tensors:
    dist.all_reduce(tensor)
print(backends[0] is backends[1], [tensor.item() for tensor in tensors], flush=True)
dist.destroy_process_group()
"""


def test_the_variable_is_enough_and_a_group_for_two_devices_is_made_once(run, script):
    done = run("--spawn", "-n", "2", script(DEVICES), env={"TPURUN_BACKEND_FOR": "gloo"})
    assert (done.code, done.log(0)) == (0, "True [2.0, 2.0]\n"), done.err


# The group of one rank is gone when the other one fails.
FAILS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
gone = dist.new_group()
dist.barrier()
dist.destroy_process_group(gone)
if dist.get_rank() == 1:
    raise ValueError("found nothing")
dist.barrier()
"""

UNSEEN = (
    "not of tpurun: group 0 (gloo, ranks 0-1): tpurun sees nothing of what happens there, no check and no "
    "verdict; --backend-for gloo makes groups of Gloo its own"
)


def test_groups_of_gloo_are_named_in_the_report_and_the_status(run, script):
    done = run("-n", "2", script(FAILS))
    assert done.code == 1
    assert UNSEEN in done.report.text, done.report.text

    def status(*flags):
        command = [TPURUN, "status", *flags, done.run_dir]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert UNSEEN in status().splitlines()
    group = {"name": "0", "backend": "gloo", "size": 2, "ranks": "0-1"}
    assert json.loads(status("--json"))["foreign"] == [group]


HANGS = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")

def wait_for_word():
    with open(os.path.join(os.environ["TPURUN_RUN_DIR"], "events.jsonl")) as events:
        while '"event":"waits elsewhere"' not in events.read():
            time.sleep(0.05)

if dist.get_rank() == 2:
    wait_for_word()
tensor = torch.ones(1)
if dist.get_rank() == 1:
    dist.all_reduce(tensor, async_op=True).wait()
else:
    dist.all_reduce(tensor)
dist.destroy_process_group()
"""


def test_who_hangs_in_gloo_is_told_that_nothing_is_seen_of_it(run, script):
    done = run("-n", "3", script(HANGS))
    assert done.code == 0, done.err
    line = next(line for line in done.err.splitlines() if "suspect: a group of gloo" in line)
    assert re.search(r"rank 0 in all_reduce <- program\.py:\d+", line), line
    # In a wait for Gloo's work it can not be told from a rank that does something else.
    assert re.search(r"rank 1 in program\.py:\d+", line), line
    assert re.search(r"others: .*\brank 2 in program\.py:\d+ in wait_for_word", line), line
    assert "--backend-for gloo makes groups of Gloo its own" in line, line


def test_other_values_are_refused_in_one_line(run, script):
    refused = "tpurun: error: {}: expected gloo, given nccl\n"
    done = run("-n", "2", "--backend-for", "nccl", "true")
    assert (done.code, done.err) == (2, refused.format("--backend-for"))
    done = run("-n", "2", "true", env={"TPURUN_BACKEND_FOR": "nccl"})
    assert (done.code, done.err) == (2, refused.format("TPURUN_BACKEND_FOR"))
    # A program can assign it.
    text = "import os\nos.environ['TPURUN_BACKEND_FOR'] = 'nccl'\nimport torch.distributed as dist\n"
    done = run("-n", "1", script(f"{text}dist.init_process_group('gloo')"))
    assert done.report.what == "raised ValueError: TPURUN_BACKEND_FOR: expected gloo, or nothing, given nccl"
