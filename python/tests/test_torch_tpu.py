"""Google's torch_tpu beside tpurun: kept from loading where there are no chips, left alone where there are.

A small distribution stands for it: found through the same entry point, it ends the process without libtpu,
and with it takes torch's slot for out-of-tree devices, as the real one does.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tpurun import _torch_tpu

LOADER = """
import importlib.util, os, sys
import torch
from torch.library import Library
print("google's torch_tpu was loaded", file=sys.stderr)
if importlib.util.find_spec("libtpu") is None:
    os.abort()
library = Library("_", "IMPL", "SparsePrivateUse1")
library.fallback(lambda operation, *arguments: None)
def load():
    if os.environ.get("HAS_CHIPS"):
        torch.utils.rename_privateuse1_backend("tpu")
"""
# Device tpu, here and in a process that this one starts.
PROGRAM = """
import tpurun
import subprocess, sys
import torch, torch_tpu
try:
    torch_tpu.sync
except AttributeError as error:
    print(error)
print(torch.ones(2, device="tpu").tolist(), flush=True)
child = "import torch; print(torch.ones(2, device='tpu').tolist())"
subprocess.run([sys.executable, "-c", child], check=True)
"""
TWO = "[1.0, 1.0]\n"


@pytest.fixture
def google(tmp_path: Path) -> Path:
    """Where it is installed, without libtpu."""
    home = tmp_path / "google"
    information = home / "torch_tpu-0.2.0.dist-info"
    package = home / "torch_tpu"
    for folder in (information, package):
        folder.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n")
    (package / "__init__.py").write_text("")
    (package / "_loader.py").write_text(LOADER)
    return home


def run(*path: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN")}
    folders = [*map(str, path), *filter(None, [words.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**words, **variables, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def before_google(tmp_path: Path) -> Path:
    """Makes torch find tpurun's entry point before the other one."""
    information = tmp_path / "first" / "tpurun-0.1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tpurun\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("[torch.backends]\ntpurun = tpurun:_autoload\n")
    return information.parent


def test_the_stand_in_does_what_the_real_one_does(google: Path) -> None:
    done = run(google, code="import torch")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.startswith("google's torch_tpu was loaded")


def test_a_process_that_imports_tpurun_first_has_the_device(google: Path) -> None:
    done = run(google, code=PROGRAM)
    said = (
        "tpurun: Google's torch_tpu is kept from loading, because there is no TPU here; "
        "this has no 'sync', use torch.tpu\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said + TWO + TWO, "")


def test_a_program_whose_torch_asks_tpurun_first_has_the_device(google: Path, before_google: Path) -> None:
    (google / "libtpu.py").write_text("")
    done = run(before_google, google, code="import torch\nprint(torch.ones(2, device='tpu').tolist())")
    assert (done.returncode, done.stdout, done.stderr) == (0, TWO, "")


def test_the_line_that_helps_where_it_was_loaded(google: Path) -> None:
    (google / "libtpu.py").write_text("")
    # Nothing is said to a program that does not ask; groups of CPU tensors are as ever.
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('tpu_dist', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
    )
    done = run(google, code=code)
    assert (done.returncode, done.stderr) == (0, "google's torch_tpu was loaded\n")
    line = _torch_tpu.why_in_the_way()
    assert "; start the program with tpurun, put `import tpurun` before `import torch`, or uninstall" in line
    done = run(google, code="import torch\ntorch.ones(2, device='tpu')\n")
    assert done.returncode == 1
    assert [one for one in done.stderr.splitlines() if one.startswith("tpurun: ")] == [line]


def test_with_chips_it_is_loaded_as_ever(google: Path) -> None:
    (google / "libtpu.py").write_text("")
    chips = "import glob\nglob.glob = lambda pattern: ['/dev/accel0']\n"
    code = (
        chips + "import tpurun, torch\nprint(torch._C._get_privateuse1_backend_name(), torch.device('tpu'))\n"
    )
    done = run(google, code=code, HAS_CHIPS="1")
    assert (done.returncode, done.stdout) == (0, "tpu tpu\n"), done.stderr
    assert "google's torch_tpu was loaded" in done.stderr
    assert "tpurun: torch_tpu and its chips are here" in done.stderr


def test_chips_are_devices_of_google_that_programs_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch_tpu, "_ROOT", str(tmp_path))
    devices = tmp_path / "sys" / "bus" / "pci" / "devices"

    def add(address: str, vendor: str, group: str) -> None:
        (devices / address).mkdir(parents=True)
        (devices / address / "vendor").write_text(f"{vendor}\n")
        (devices / address / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")

    def open_to_programs(name: str) -> None:
        (tmp_path / "dev" / "vfio").mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()

    assert not _torch_tpu.has_chips()
    add("0000:00:04.0", "0x10de", "3")
    add("0000:00:05.0", "0x1ae0", "7")
    (devices / "0000:00:06.0").mkdir()
    assert not _torch_tpu.has_chips()
    open_to_programs("vfio/vfio")
    open_to_programs("vfio/3")  # another one's
    assert not _torch_tpu.has_chips()
    open_to_programs("vfio/7")
    assert _torch_tpu.has_chips()
    (tmp_path / "dev" / "vfio" / "7").unlink()
    open_to_programs("accel0")
    assert _torch_tpu.has_chips()
