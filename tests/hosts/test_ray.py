"""Ray Train's TorchTrainer on the backend: a real Ray, of one node and of two that are network namespaces."""

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.jobs import Job, ends_within
from tools.namespaces import NotAllowed, namespaces

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: make ray", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "ray_train.py"
# Every worker imports torch and Ray by itself.
LIMIT_S = 240
# Its daemons look after each other every few seconds.
LINGER_S = 30
RAY = (sys.executable, "-m", "ray.scripts.scripts")
HEAD = "10.77.0.1:6379"


@pytest.fixture
def start_with_ray(start, tmp_path) -> Iterator[Callable[..., Job]]:
    """Starts a command whose Ray writes nowhere else, and leaves this machine's other Rays alone."""
    # Ray's sockets are below it, whose names may have 107 bytes.
    short = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    home = tmp_path / "home"
    home.mkdir()
    common = {
        "HOME": str(home),
        "RAY_TMPDIR": str(short),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }

    def start_with_ray(*command: str | Path, env: dict[str, str] | None = None) -> Job:
        return start(command=command, env=common | (env or {}))

    yield start_with_ray
    shutil.rmtree(short)


def test_the_example_learns_on_four_workers(start_with_ray):
    done = start_with_ray(sys.executable, EXAMPLE).wait(LIMIT_S, linger_s=LINGER_S)
    assert done.code == 0, done.err
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([0-9.]+)$", done.out, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < 0.5 * losses[0], done.out


PREAMBLE = """
import json
import os

import ray
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def fit(loop, backend="tpu_dist", **options):
    config, scaling = TorchConfig(backend=backend), ScalingConfig(num_workers=4, **options)
    return TorchTrainer(loop, scaling_config=scaling, torch_config=config).fit().return_value


"""


def told(out: str) -> list:
    """Returns what a program has printed among Ray's lines."""
    return json.loads(re.search(r"^told (.*)$", out, re.MULTILINE)[1])


def test_workers_with_tpus_train_on_the_device(start_with_ray, script):
    """Ray believes to have a slice of four chips; what it then does by itself is written for torch_tpu."""
    program = f"""{PREAMBLE}
from ray.train.torch import get_device, prepare_model


def loop(config):
    device = get_device()
    model = prepare_model(torch.nn.Linear(4, 4))
    model(torch.full((4,), float(dist.get_rank()), device=device)).sum().backward()
    gradient = next(model.parameters()).grad
    return [dist.get_backend(), str(device), str(gradient.device), gradient.unique().tolist()]


chips = {{"TPU": 4, "TPU-v6e-4-head": 1, "accelerator_type:TPU-V6E": 1}}
labels = {{"slice-name": "pretended", "worker-id": "0", "topology": "2x2", "pod-type": "v6e-4"}}
labels = {{f"ray.io/tpu-{{name}}": value for name, value in labels.items()}}
ray.init("local", num_cpus=4, resources=chips, labels=labels | {{"ray.io/accelerator-type": "TPU-V6E"}})
each = {{"CPU": 1, "TPU": 1}}
one = fit(loop, None, use_tpu=True, topology="2x2", accelerator_type="TPU-V6E", resources_per_worker=each)
print("told", json.dumps(one))
"""
    done = start_with_ray(sys.executable, script(program)).wait(LIMIT_S, linger_s=LINGER_S)
    assert done.code == 0, done.err
    assert told(done.out) == ["tpu_dist", "tpu", "tpu:0", [1.5]]


@pytest.fixture
def two_nodes(start_with_ray) -> Iterator[list[str]]:
    """Two nodes of a Ray with two CPUs each: how a command is run on the first."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces(2))
        except NotAllowed as why:
            pytest.skip(f"network namespaces: {why}")
        commands = [["ip", "netns", "exec", name] for name in names]
        which = [["--head", "--port=6379", "--include-dashboard=false"], [f"--address={HEAD}"]]
        for node, (command, options) in enumerate(zip(commands, which, strict=True)):
            own = ["--block", f"--node-ip-address=10.77.0.{node + 1}", "--num-cpus=2"]
            job = start_with_ray(*command, *RAY, "start", *options, *own)
            stack.callback(stop, job)
            job.read_until("Ray runtime started", LIMIT_S)
        yield commands[0]


def stop(node: Job) -> None:
    node.end()  # asked to end, the head waits half a minute for one of its own
    node.wait(linger_s=LINGER_S)


def test_two_nodes_compute_over_our_network(start_with_ray, two_nodes, script):
    program = f"""{PREAMBLE}
def received():
    lines = [line.split() for line in open("/proc/net/dev") if ":" in line]
    return sum(int(count) for name, count, *_ in lines if name != "lo:")


def segments():
    return sorted({{line.split()[4] for line in open("/proc/self/maps") if "memfd:tpurun" in line}})


def loop(config):
    rank = dist.get_rank()
    tensor = torch.full((1 << 20,), float(rank))
    dist.barrier()
    before = received()
    dist.barrier()
    dist.all_reduce(tensor)
    own = (int(os.environ["NODE_RANK"]), os.getpid(), set(tensor.tolist()), received() - before, segments())
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return [(*one[:2], list(one[2]), *one[3:]) for one in told]


print("told", json.dumps(fit(loop)))
"""
    env = {"RAY_ADDRESS": HEAD}
    done = start_with_ray(*two_nodes, sys.executable, script(program), env=env).wait(LIMIT_S)
    assert done.code == 0, done.err
    seen = told(done.out)
    assert [node for node, *_ in seen] == [0, 0, 1, 1]
    assert all(values == [6.0] for _, _, values, _, _ in seen)
    # To each node comes half of a sum and half of the result; a ring of 4 ranks would bring 6 MiB.
    assert all(4 << 20 < count < 5 << 20 for _, _, _, count, _ in seen), seen
    segments = [set(inodes) for *_, inodes in seen]
    assert segments[0] & segments[1] and segments[2] & segments[3], "a node's workers share memory"
    assert not (segments[0] | segments[1]) & (segments[2] | segments[3])
    # Ray itself goes on.
    assert [pid for _, pid, *_ in seen if not ends_within(LINGER_S, pid)] == []


def test_a_worker_that_raises_frees_the_others_with_its_name(start_with_ray, script):
    program = f"""{PREAMBLE}
import asyncio
import time

from tpurun.errors import DistBackendError


@ray.remote(num_cpus=0)
class Witness:
    def __init__(self):
        self.told, self.complete = {{}}, asyncio.Event()

    async def tell(self, rank, *what):
        self.told[rank] = what
        if len(self.told) == 3:
            self.complete.set()

    async def all_told(self):
        await self.complete.wait()
        return self.told


ray.init("local", num_cpus=4)
witness = Witness.remote()
ray.get(witness.__ray_ready__.remote())


def loop(config):
    rank = dist.get_rank()
    dist.barrier()
    if rank == 2:
        # Ray ends the workers once they have left the group, and the others may not have told by then.
        leave = dist.destroy_process_group
        dist.destroy_process_group = lambda: (ray.get(witness.all_told.remote()), leave())
        raise ValueError("loss is NaN")
    began = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3))
    except DistBackendError as error:
        ray.get(witness.tell.remote(rank, time.monotonic() - began, type(error).__name__, str(error)))
        raise


try:
    fit(loop)
finally:
    print("told", json.dumps(ray.get(witness.all_told.remote(), timeout=60)))
"""
    done = start_with_ray(sys.executable, script(program)).wait(LIMIT_S, linger_s=LINGER_S)
    assert done.code == 1
    assert re.search(r"^ValueError: loss is NaN$", done.err, re.MULTILINE), done.err
    seen = told(done.out)
    assert sorted(seen) == ["0", "1", "3"]
    for rank, (seconds, kind, text) in seen.items():
        # Ray looks after its workers every 2 s; the group's timeout is half an hour.
        assert seconds < 30 * done.patience, seen
        assert kind == "AbortedError"
        who, operation = r"\(host \S+, pid \d+\)", r"operation 1 of group 0, all_reduce\(f32\[3\], sum\)"
        said = (
            rf"rank {rank} {who} shut group 0 down during {operation} at program.py:\d+: "
            rf"3 of 4 ranks came, missing rank 2 {who}"
        )
        assert re.fullmatch(said, text), text
