"""Programs on the helpers that PyTorch's FSDP, DTensor, checkpoint and sharding tests are made of.

The wheel has the models, the checks and the base classes, but none of those tests. Each program here trains,
shards or stores something with them over the process group, and holds it against one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_dist_composable import CompositeParamModel
from torch.testing._internal.common_fsdp import MLP, MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestMixin,
    MLPModule,
    ModelArgs,
    Transformer,
)
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

STEPS = 3
LEARNING_RATE = 0.1
WIDTH = 8


class Case(DTensorTestMixin, VerifyStateDictMixin, TestCase):
    """Its ranks have a process group; `rank` and `file_name` are set."""

    rank: int
    file_name: str

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def mesh(self, *names: str) -> DeviceMesh:
        """All ranks in one dimension, or two in the second of two."""
        sizes = (self.world_size,) if len(names) == 1 else (self.world_size // 2, 2)
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    # --- DTensor ------------------------------------------------------------------------------------------

    def test_operators_on_all_placements(self) -> None:
        mesh = self.mesh("world")
        a, b = torch.randn(8, 12), torch.randn(12, 4)
        self._test_op(mesh, torch.mm, a, b)
        self._test_op(mesh, torch.add, a, a.clone())
        self._test_op(mesh, torch.sum, a)
        self._test_op(mesh, nn.functional.gelu, a)

    def test_redistribute_on_two_dimensions(self) -> None:
        mesh = self.mesh("outer", "inner")
        whole = torch.randn(9, 7)
        one = [Replicate(), Shard(0), Shard(1)]
        both = [(outer, inner) for outer in one for inner in one]
        for source in both:
            for target in both:
                tensor = distribute_tensor(whole, mesh, source).redistribute(mesh, target)
                self.assertEqual(tensor.placements, target)
                self.assertEqual(tensor.full_tensor(), whole)

    def test_tensor_parallel_mlp(self) -> None:
        alone = MLPModule("cpu")
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        sharded = parallelize_module(copy.deepcopy(alone), self.mesh("tensor"), plan)
        self.train_on_the_same(alone, sharded, lambda: torch.randn(6, 10))
        self.assert_same_parameters(alone, sharded)

    def test_tensor_parallel_transformer(self) -> None:
        alone = Transformer(ModelArgs(n_heads=4, dim=16, vocab_size=16, max_seq_len=16, dropout_p=0.0))
        for is_sequence_parallel in (False, True):
            model = copy.deepcopy(alone)
            # Attention on local tensors: PyTorch has no rule for that of the CPU on sharded ones.
            sharded = Transformer.parallelize(
                copy.deepcopy(alone), self.mesh("tensor"), is_sequence_parallel, True
            )
            self.train_on_the_same(model, sharded, lambda: torch.randint(0, 16, (2, 16)))

    # --- data parallel ------------------------------------------------------------------------------------

    def test_fully_sharded_mlps(self) -> None:
        self.train_sharded(self.mesh("data"))

    def test_hybrid_sharded_mlps(self) -> None:
        self.train_sharded(self.mesh("replicas", "shards"))

    def train_sharded(self, mesh: DeviceMesh) -> None:
        alone = nn.Sequential(*(MLP(WIDTH) for _ in range(3)))
        sharded = copy.deepcopy(alone)
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        self.train_on_shares(alone, sharded, lambda: check_sharded_parity(self, alone, sharded))

    def test_fully_sharded_and_tensor_parallel(self) -> None:
        mesh = self.mesh("data", "tensor")
        alone = MLPStack(WIDTH)
        sharded = copy.deepcopy(alone).parallelize(mesh["tensor"], mesh["data"], False)
        # The ranks of a tensor dimension have the same share.
        self.train_on_shares(alone, sharded, group=mesh["data"].get_group())
        self.assert_same_parameters(alone, sharded)

    def test_replicated_parameters(self) -> None:
        alone = CompositeParamModel(torch.device("cpu"))
        replicated = replicate(copy.deepcopy(alone))
        self.train_on_shares(alone, replicated, width=100)
        self.assert_same_parameters(alone, replicated)

    # --- checkpoints and shards ---------------------------------------------------------------------------

    def test_checkpoint_of_a_sharded_model(self) -> None:
        folder = Path(f"{self.file_name}-checkpoint")
        alone = nn.Sequential(*(MLP(WIDTH) for _ in range(2)))
        alone_optimizer = torch.optim.Adam(alone.parameters())
        trained = self.sharded_with_optimizer(alone)
        self.train_on_shares(alone, trained[0], optimizers=(alone_optimizer, trained[1]))
        model, optimizer = get_state_dict(*trained)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

        restored = self.sharded_with_optimizer(nn.Sequential(*(MLP(WIDTH) for _ in range(2))))
        model, optimizer = get_state_dict(*restored)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(*restored, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        model, optimizer = get_state_dict(*restored)
        self._verify_msd(alone.state_dict(), model)
        self._verify_osd(alone, alone_optimizer, alone_optimizer.state_dict(), optimizer)

    def sharded_with_optimizer(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        sharded = fully_shard(copy.deepcopy(model), mesh=self.mesh("data"))
        return sharded, torch.optim.Adam(sharded.parameters())

    def test_sharded_tensor(self) -> None:
        whole = torch.arange(self.world_size * 6.0).reshape(self.world_size * 2, 3)
        begin = self.rank * 2
        local = whole[begin : begin + 2].clone()
        tensor = init_from_local_shards(
            [LocalShard.from_tensor_and_offsets(local, [begin, 0], self.rank)], *whole.shape
        )
        gathered = torch.empty_like(whole) if self.rank == 0 else None
        tensor.gather(0, gathered)
        if gathered is not None:
            self.assertEqual(gathered, whole)

    # --- how models are trained and compared --------------------------------------------------------------

    def train_on_the_same(self, alone: nn.Module, sharded: nn.Module, batch: Callable[[], Any]) -> None:
        """Every rank has the whole batch: all see what one process sees."""
        optimizers = [
            torch.optim.SGD(one.parameters(), LEARNING_RATE, foreach=False) for one in (alone, sharded)
        ]
        for _ in range(STEPS):
            given = batch()
            expected, output = alone(given), sharded(given)
            self.assertEqual(whole(output), expected)
            for result in (expected, output):
                result.square().mean().backward()
            step(optimizers)

    def train_on_shares(
        self,
        alone: nn.Module,
        parallel: nn.Module,
        check: Callable[[], None] = lambda: None,
        *,
        group: dist.ProcessGroup | None = None,
        width: int = WIDTH,
        optimizers: Any = None,
    ) -> None:
        """Every rank of the group has its part of the batch, and `alone` all of it."""
        if optimizers is None:
            optimizers = [torch.optim.SGD(one.parameters(), LEARNING_RATE) for one in (alone, parallel)]
        part, parts = dist.get_rank(group), dist.get_world_size(group)
        for _ in range(STEPS):
            batch = torch.randn(2 * parts, width)
            alone(batch).square().mean().backward()
            parallel(batch.chunk(parts)[part]).square().mean().backward()
            check()
            step(optimizers)
            check()

    def assert_same_parameters(self, alone: nn.Module, parallel: nn.Module) -> None:
        for expected, parameter in zip(alone.parameters(), parallel.parameters(), strict=True):
            self.assertEqual(whole(parameter), expected)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
