"""Operations of a graph that one kernel of ours computes together, with the bits of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

_ATEN = torch.ops.aten
_SOFTMAX_BACKWARD = _ATEN._log_softmax_backward_data.default


def fuse(module: fx.GraphModule) -> None:
    """Put such kernels in the place of what they compute.

    The gradient of a cross entropy needs no tensor of zeros as large as the scores then.
    """
    graph = module.graph
    for loss in graph.find_nodes(op="call_function", target=_ATEN.nll_loss_backward.default):
        gradient = _gradient_of_softmax(loss)
        if gradient is None:
            continue
        grad, scores, target, _, reduction, ignored, total = loss.args
        with graph.inserting_before(gradient):
            fused = graph.call_function(
                torch.ops.tpurun_kernel.cross_entropy_backward.default,
                (grad, scores, target, reduction, ignored, total),
            )
        fused.meta = gradient.meta
        gradient.replace_all_uses_with(fused)
        graph.erase_node(gradient)
        graph.erase_node(loss)
        module.recompile()


def _gradient_of_softmax(loss: fx.Node) -> fx.Node | None:
    """The gradient of the scores before their softmax, where nothing else uses that of a loss."""
    user = next(iter(loss.users), None)
    scores, target, weight = loss.args[1:4]
    if len(loss.users) != 1 or weight is not None or user.target is not _SOFTMAX_BACKWARD:
        return None
    given, results, dimension, dtype = user.args
    value, chosen = scores.meta["val"], target.meta["val"]
    if given is not loss or _whole(results) is not _whole(scores) or value.dim() != 2 or chosen.dim() != 1:
        return None
    # With one class, the sum of its row has no zero that a negative one could be added to.
    columns = value.shape[1]
    known = (columns > 1, value.stride(0) == columns, value.stride(1) == 1, chosen.stride(0) == 1)
    fits = dimension in (1, -1) and dtype == value.dtype and chosen.dtype == torch.int64
    return user if fits and all(statically_known_true(one) for one in known) else None


def _whole(node: Any) -> Any:
    """The node of a tensor that is all of another one under a new name."""
    while isinstance(node, fx.Node) and node.target in (_ATEN.alias.default, _ATEN.detach.default):
        node = node.args[0]
    return node
