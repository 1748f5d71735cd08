"""Programs on the base classes that PyTorch's tests derive from, which start their ranks themselves.

The wheel has the classes; what derives from them is not in it. Each runs here as it is, with
``torch.multiprocessing`` processes that it spawns, told to use this backend.
"""

from __future__ import annotations

import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
)
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorTestBase,
    with_comms,
)

from .plan import BACKEND

RANKS = 4


def check_sum(case: Any) -> None:
    tensor = torch.full((5,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    ranks = dist.get_world_size()
    case.assertEqual(tensor, torch.full((5,), ranks * (ranks + 1) / 2))
    case.assertEqual(dist.get_backend(), BACKEND)


def check_redistribution(case: Any) -> None:
    mesh = case.build_device_mesh()
    whole = torch.arange(35.0).reshape(5, 7)
    tensor = distribute_tensor(whole, mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    case.assertEqual(tensor.redistribute(mesh, [Replicate()]).to_local(), whole)


class Ranked:
    """The classes ask how many ranks there are, and those that keep their processes ask for the backend."""

    world_size = RANKS

    @classmethod
    def backend_str(cls) -> str:
        return BACKEND


class Process(Ranked, MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def begin(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(BACKEND, store=store, rank=self.rank, world_size=self.world_size)

    def test_sum(self) -> None:
        self.begin()
        check_sum(self)

    def test_timeout_of_a_subgroup(self) -> None:
        self.begin()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if self.rank == 0:
            with self.assertRaisesRegex(dist.DistBackendError, "(Timed out|closed|timeout)"):
                dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()


class Distributed(Ranked, DistributedTestBase):
    def backend(self, device: str) -> str:
        return BACKEND

    def test_sum(self) -> None:
        self.create_pg("cpu")
        check_sum(self)


class Continuous(Ranked, MultiProcContinuousTest):
    def test_sum(self) -> None:
        check_sum(self)

    def test_sum_in_the_same_processes(self) -> None:
        check_sum(self)


class Tensors(Ranked, DTensorTestBase):
    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        # Its own has a list of backends by name.
        dist.init_process_group(
            BACKEND, init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )

    @with_comms
    def test_redistribution(self) -> None:
        check_redistribution(self)


class TensorsContinuous(Ranked, DTensorContinuousTestBase):
    def test_redistribution(self) -> None:
        check_redistribution(self)

    def test_products(self) -> None:
        mesh = self.build_device_mesh()
        self._test_op(mesh, torch.mm, torch.randn(8, 12), torch.randn(12, 4))


class ShardedTensors(Ranked, ShardedTensorTestBase):
    def test_chunks(self) -> None:
        self.init_comms(init_rpc=False, backend=BACKEND)
        placements = [f"rank:{rank}/cpu" for rank in range(self.world_size)]
        tensor = sharded_tensor.full(ChunkShardingSpec(dim=0, placements=placements), (9, 4), 3.0)
        self.assertEqual(tensor.local_shards()[0].tensor.shape, (3 if self.rank < 3 else 0, 4))
        whole = torch.empty(9, 4) if self.rank == 0 else None
        tensor.gather(0, whole)
        if whole is not None:
            self.assertEqual(whole, torch.full((9, 4), 3.0))
        self.destroy_comms(destroy_rpc=False)


CASES = {
    case.__name__: case
    for case in (Process, Distributed, Continuous, Tensors, TensorsContinuous, ShardedTensors)
}


def names() -> list[str]:
    """``Class.test`` for all tests."""
    loader = unittest.TestLoader()
    return [f"{name}.{test}" for name, case in CASES.items() for test in loader.getTestCaseNames(case)]
