"""The process group for torchft's Manager, with what it has from torchft's own wrapper in short."""

import pytest

WRAPPER = """
from datetime import timedelta
from torch.distributed import PrefixStore, ProcessGroup as BaseProcessGroup, TCPStore


class ProcessGroupWrapper(BaseProcessGroup):
    def __init__(self, timeout=timedelta(seconds=60), pg=None):
        super().__init__(0, 1)
        self._pg, self._timeout = pg, timeout
        self._quorum_id = self._global_ranks = None

    def configure(
        self,
        store_addr,
        replica_id,
        rank,
        world_size,
        quorum_id=None,
        group_rank=None,
        group_world_size=None,
        global_ranks=None,
    ):
        self._quorum_id, self._global_ranks = quorum_id, global_ranks
        self.abort(errored=False)
        address, _, prefix = store_addr.partition("/")
        host, _, port = address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        self._pg = self._create_pg(PrefixStore(prefix, store), rank, world_size)

    def abort(self, errored=True):
        if self._pg is not None:
            self._pg.abort()
            self._pg = None

    def shutdown(self):
        self._pg = None

    def set_timeout(self, timeout):
        self._timeout = timeout

    def allreduce(self, tensors, opts):
        return self._pg.allreduce(tensors, opts)

    def size(self):
        return self._pg.size()
"""

# The last rank is lost after the second quorum; the others make a third.
PROGRAM = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
import tpurun
from tpurun.torchft import ProcessGroupTpurun

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
at = "127.0.0.1:" + os.environ["MASTER_PORT"]
# The replica group's own world, which the launcher brings together.
dist.init_process_group("tpu_dist")
group = ProcessGroupTpurun(timeout=timedelta(seconds=60))


def total(quorum, ranks):
    group.configure(f"{at}/quorum-{quorum}", f"replica-{rank}", rank, ranks, quorum)
    tensor = torch.tensor([rank + 1.0])
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert group.errored() is None and group.size() == ranks
    return int(tensor)


sums = [total(1, ranks), total(2, ranks)]
dist.barrier()
dist.destroy_process_group()
if rank == ranks - 1:
    os._exit(0)
try:
    group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
except tpurun.RankLostError as error:
    sums.append(error.ranks)
sums.append(total(3, ranks - 1))
group.set_timeout(timedelta(seconds=5))
group.abort()
print(sums, repr(group.errored()), group.getBackendName(), flush=True)
group.shutdown()
"""


@pytest.fixture
def stand_in(tmp_path):
    """Writes a package torchft, of these texts, and returns the environment with which it is found."""

    def write(process_group: str, package: str = ""):
        folder = tmp_path / "packages" / "torchft"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(package)
        (folder / "process_group.py").write_text(process_group)
        return {"PYTHONPATH": str(folder.parent)}

    return write


def test_each_quorum_is_a_group_and_a_lost_rank_fails_at_once(run, script, stand_in):
    done = run("-n", "3", script(PROGRAM), env=stand_in(WRAPPER))
    assert done.code == 0, done.err
    expected = "[6, 6, (2,), 3] RuntimeError('the process group was aborted') torchft-tpurun\n"
    assert (done.log(0), done.log(1)) == (expected, expected)


def test_without_torchft_one_line_says_so(run, script, stand_in):
    env = stand_in("", package="raise ImportError(\"No module named 'torchft'\")")
    done = run("-n", "1", script("import tpurun.torchft"), env=env)
    assert done.report.what == (
        "raised ImportError: tpurun.torchft: expected torchft and what it needs, given No module named "
        "'torchft'; install it with `pip install torchft`"
    )
