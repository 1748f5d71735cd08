"""Debug compares some tensors between ranks by itself, and this module says which and when.

The parameters of a ``DistributedDataParallel`` are compared before a forward pass that will reduce gradients.
Parameters that are DTensors are compared after a step of their optimizer, along the dimensions of their mesh
that replicate them.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tpurun import _C as _native

# Optimizers whose DTensors were found to have the same specs everywhere: these do not change.
_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def begin() -> None:
    """Once per process."""
    nn.modules.module.register_module_module_registration_hook(_see_module)
    register_optimizer_step_post_hook(_see_step)


def _is_on() -> bool:
    return not torch.compiler.is_compiling() and _native.debug_checks_are_on() and dist.is_initialized()


def _see_module(module: nn.Module, name: str, _submodule: nn.Module | None) -> None:
    if name == "module" and isinstance(module, nn.parallel.DistributedDataParallel):
        module.register_forward_pre_hook(_see_forward)


def _see_forward(ddp: nn.parallel.DistributedDataParallel, _inputs: tuple[Any, ...]) -> None:
    # The ranks are compared only where DDP itself counts on all of them: not in no_sync, in evaluation, or
    # within Join. With a hook of the program, such as local SGD, their gradients may differ.
    in_step = ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync
    if _is_on() and in_step and not ddp._join_config.enable and not ddp._comm_hooks:
        from tpurun.tpu import _replicas

        ignored = ddp.parameters_to_ignore
        named = ((name, one) for name, one in ddp.module.named_parameters() if name not in ignored)
        digests = {name: _replicas.digest_of(one) for name, one in named if not _is_dtensor(one)}
        _replicas.compare(ddp.process_group, digests, "parameters")


def _see_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _is_on():
        return
    parameters = [one for given in optimizer.param_groups for one in given["params"]]
    tensors = {f"parameter {at}": one for at, one in enumerate(parameters) if _is_dtensor(one)}
    if not tensors:
        return
    from tpurun.tpu import _replicas

    if optimizer not in _known:
        _replicas.check_specs(tensors)
        _replicas.warn_of_generators(tensors)
        _known.add(optimizer)
    _replicas.check_replicated(tensors)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # A program that has a DTensor has imported its module. We do not import it ourselves, because that takes
    # long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
