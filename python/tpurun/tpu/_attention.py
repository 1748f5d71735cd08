"""Attention of DTensors: how the kernel that the device has may be given its operands in parts.

Torch knows this of the kernels of CUDA alone. Each head, and each element of the batch, is by itself. Under
`context_parallel` the sequence is in parts, and keys and values go round in torch's ring.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

# The dimensions of query, key and value: batch, heads, sequence, and the numbers of each.
_APART = (0, 1)
_SEQUENCE = 2
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register(_: ModuleType) -> None:
    """Tells torch, once it has imported `torch.distributed.tensor`."""
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor._ops.utils import register_op_strategy

    # Torch uses a strategy again that it found for the same placements, so the mask is a part of the key.
    info = RuntimeSchemaInfo(static_kwargkey=["attn_mask"])
    register_op_strategy(_KERNEL.default, info)(lambda asked: _strategy(asked, outputs=2, tensors=3))
    register_op_strategy(_BACKWARD, info)(lambda asked: _strategy(asked, outputs=3, tensors=6))
    _ring().custom_ops.update(
        {
            _KERNEL.default: lambda _, given, named: _ring_forward(*given, **named),
            _BACKWARD: lambda _, given, named: _ring_backward(*given, **named),
        }
    )


def _ring() -> ModuleType:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _strategy(asked: Any, *, outputs: int, tensors: int) -> Any:
    """All placements of the outputs, and of the tensors that they are made from."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    mask = asked.kwargs_schema.get("attn_mask")
    _refuse_parts_of(mask)
    one_dimension = [
        [placement] * (outputs + tensors) + ([] if mask is None else [Replicate()])
        for placement in (Replicate(), *(Shard(dim) for dim in _APART if not _is_own(mask, dim)))
    ]
    mesh = asked.get_mesh_from_args()
    return expand_to_full_mesh_op_strategy(mesh, asked, one_dimension, input_index=outputs)


def _refuse_parts_of(mask: Any) -> None:
    """Torch does not bring named operands into another placement."""
    if mask is None:
        return
    placements = mask.strategies[0].output_spec.placements
    if not all(placement.is_replicate() for placement in placements):
        raise NotImplementedError(
            "tpurun: expected an attn_mask that each rank has as a whole, "
            f"given placements {placements}; redistribute it to Replicate()"
        )


def _is_own(mask: Any, dim: int) -> bool:
    """Whether elements of the batch, or heads, have masks of their own."""
    return mask is not None and mask.ndim == 4 and mask.shape[dim] > 1


def _ring_forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The output and its logarithms, in parts as the query is."""
    _refuse_mask(attn_mask)
    local = [one.to_local() for one in (query, key, value)]
    found = _ring()._templated_ring_attention(
        query.device_mesh.get_group(),
        _SEQUENCE,
        _KERNEL,
        *local,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return _like(query, found)


def _ring_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The gradients of query, key and value, in parts as they are."""
    _refuse_mask(attn_mask)
    gradient, *local = [one.to_local() for one in (gradient, query, key, value, out, logsumexp)]
    found = _ring()._templated_ring_attention_backward(
        query.device_mesh.get_group(),
        _SEQUENCE,
        _BACKWARD,
        gradient.contiguous(),
        "grad_out",
        *local,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
    )
    return _like(query, found)


def _refuse_mask(mask: Any) -> None:
    if mask is not None:
        raise NotImplementedError(
            "tpurun: expected attention without a mask under context_parallel, given attn_mask; "
            "use is_causal=True, or shard heads instead of the sequence"
        )


def _like(query: Any, parts: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    from torch.distributed.tensor import DTensor

    mesh, placements = query.device_mesh, query.placements
    return tuple(DTensor.from_local(part, mesh, placements, run_check=False) for part in parts)
