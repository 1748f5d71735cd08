"""FullyShardedDataParallel against DDP, with the models and the parity check of PyTorch's own FSDP tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy
from torch.testing._internal.common_fsdp import (
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTestMixin,
    FSDPTestModel,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
)
from torch.testing._internal.common_utils import TestCase


class Case(FSDPTestMixin, TestCase):
    """Its ranks have a process group; `rank` and `file_name` are set."""

    rank: int
    file_name: str

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    def check(self, model: type[FSDPTestModel], **options: Any) -> None:
        # It takes the CPU only when told to.
        options["device_id"] = torch.device("cpu")
        self._test_fsdp_parity(model, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, **options)

    def test_nested_modules(self) -> None:
        for strategy in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ):
            self.check(NestedWrappedModule, sharding_strategy=strategy)

    def test_every_module_wrapped(self) -> None:
        self.check(AlwaysWrapNestedWrappedModule)

    def test_parameters_as_they_were(self) -> None:
        self.check(NestedWrappedModule, use_orig_params=True)

    def test_frozen_parameters(self) -> None:
        self.check(NonUniformReqGradNWM, use_orig_params=True, save_model=False)

    def test_transformer_with_shared_parameters(self) -> None:
        for forward_prefetch in (False, True):
            self.check(
                TransformerWithSharedParams,
                forward_prefetch=forward_prefetch,
                init_kwargs={"add_bn": False},
            )

    @property
    def world_size(self) -> int:
        return dist.get_world_size()
