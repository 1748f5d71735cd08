"""The ways a script comes to its process group, and what importing torch does to one that never asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SCRIPT = r"""
import torch, torch.distributed as dist
dist.init_process_group("tpu_dist")
x = torch.full((3,), float(dist.get_rank()))
dist.all_reduce(x)
assert x[0].item() == sum(range(dist.get_world_size())), x
print(f"rank {dist.get_rank()} of {dist.get_world_size()} is fine\n", end="", flush=True)  # in one write
dist.destroy_process_group()
"""
LIMIT_S = 120


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def spawned(rank: int, size: int, meeting_place: str) -> None:
    dist.init_process_group("tpu_dist", init_method=meeting_place, rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size
    dist.destroy_process_group()


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 is fine", "rank 1 of 2 is fine"]


def test_spawn(tmp_path: Path) -> None:
    mp.spawn(spawned, (2, f"file://{tmp_path}/store"), nprocs=2)


def test_import_torch_only_registers_the_names() -> None:
    done = python(
        "import sys, torch, torch.distributed as dist\n"
        "assert dist.is_backend_available('tpu_dist') and dist.is_backend_available('tpu')\n"
        "assert 'tpurun._C' not in sys.modules and 'tpurun.errors' not in sys.modules\n"
        "assert dist.get_default_backend_for_device('cpu') == 'gloo'\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert 'TORCH_FR_BUFFER_SIZE' not in __import__('os').environ\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_backend_is_found_without_autoload() -> None:
    done = python(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_import_tpurun_does_not_import_torch() -> None:
    done = python("import sys, tpurun; assert tpurun.__version__ and 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["run_rank", "fork_server", "warm_server"])
def test_the_launcher_starts_without_torch(module: str) -> None:
    done = python(f"import sys, tpurun.{module}; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_broken_autoload_does_not_break_torch() -> None:
    done = python(
        "import sys, types\n"
        "sys.modules['tpurun.backend._backend'] = types.ModuleType('tpurun.backend._backend')\n"
        "import torch\n"
    )
    assert done.returncode == 0
    assert done.stderr.startswith("tpurun: not available: ")
    assert done.stderr.count("\n") == 1


def test_googles_torch_tpu_with_chips_keeps_the_names(tmp_path: Path) -> None:
    (tmp_path / "torch_tpu.py").write_text("")
    code = (
        "import glob\n"
        "glob.glob = lambda pattern: ['/dev/accel0']\n"
        "import torch.distributed as dist\n"
        "assert not {'TPU', 'TPU_DIST'} & set(dist.Backend._plugins)\n"
    )
    done = python(code, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tpurun: torch_tpu and its chips are here")
    assert done.stderr.count("\n") == 1


def test_a_script_may_end_with_everything_open() -> None:
    # No destroy, a future with a callback in flight, a work that nobody waits for.
    done = python(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "work = dist.all_reduce(torch.ones(1000), async_op=True)\n"
        "work.get_future().then(lambda done: [torch.ones(10) for _ in range(1000)])\n"
        "dist.all_reduce(torch.ones(4, 4).t(), async_op=True)\n"
        "print('end')\n"
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_another_torch_is_refused_in_one_line() -> None:
    done = python(
        "import sys, types\n"
        "build = types.ModuleType('tpurun._build')\n"
        "build.TORCH_VERSION = '2.3.0'\n"
        "sys.modules['tpurun._build'] = build\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: tpurun: expected torch 2.3, which this copy was built for, found 2.")


def test_the_fork_of_a_process_with_threads_has_its_own_before_autograd_asks() -> None:
    # Autograd's threads would all ask at once, and torch's pool is made anew without a lock.
    code = (
        "import os, torch\n"
        "torch.set_num_threads(3)\n"
        "torch.get_num_threads()  # in its fork, torch believes that this has been done\n"
        "import ranks\n"
        "def tasks(): return set(os.listdir('/proc/self/task'))\n"
        "def has_its_threads():\n"
        "    before = tasks()\n"
        "    torch.set_num_threads(3)  # would make what is missing\n"
        "    assert tasks() == before\n"
        "    assert len(before) >= 3\n"
        "ranks.run(2, has_its_threads)\n"
    )
    done = python(code, PYTHONPATH=str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr


def test_ray_takes_the_backend_for_torch_tpu(tmp_path: Path) -> None:
    # As Ray does it, in a process that has imported it before torch.
    package = tmp_path / "ray" / "air" / "_internal" / "device_manager"
    package.mkdir(parents=True)
    for folder in (package, *list(package.parents)[:3]):
        (folder / "__init__.py").write_text("")
    (package / "tpu.py").write_text(
        "import torch\n"
        "class TPUTorchDeviceManager:\n"
        "    def is_available(self):\n"
        "        import torch_tpu\n"
        "    @classmethod\n"
        "    def register_custom_torch_dist_backend(cls):\n"
        "        import torch_tpu._loader\n"
    )
    done = python(
        "import ray, torch, sys, importlib.util\n"
        "from ray.air._internal.device_manager.tpu import TPUTorchDeviceManager as Manager\n"
        "Manager.register_custom_torch_dist_backend()\n"
        "name = torch._C._get_privateuse1_backend_name\n"  # a program that says tpu has it
        "print(name(), Manager().is_available(), name())\n"
        "assert importlib.util.find_spec('torch_tpu') is None\n"
        "assert not any('ray' in getattr(finder, 'name', '') for finder in sys.meta_path)\n",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "privateuseone True tpu\n", "")


def test_nothing_waits_for_ray_elsewhere() -> None:
    done = python(
        "import torch, sys\n"
        "assert not any('ray' in getattr(finder, 'name', '') for finder in sys.meta_path)\n"
        "assert 'ray' not in sys.modules\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
