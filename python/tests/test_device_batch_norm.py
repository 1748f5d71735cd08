"""The steps of SyncBatchNorm on device tpu: parts of a batch are normalised as the whole."""

import torch
from torch import nn

from test_device import on_device

EPS = 1e-5
SIZES = [2, 5]


@on_device
def test_parts_are_normalised_as_the_whole() -> None:
    torch.manual_seed(1)
    whole = nn.BatchNorm1d(3, eps=EPS)
    nn.init.normal_(whole.weight)
    batch, gradient = torch.randn(2, sum(SIZES), 3, 4).requires_grad_().unbind()
    batch.retain_grad()
    made = whole(batch)
    made.backward(gradient)
    expected = [made, batch.grad, whole.running_mean, whole.running_var, whole.weight.grad, whole.bias.grad]

    parts = [part.detach().tpu() for part in batch.split(SIZES)]
    gradients = [part.detach().tpu() for part in gradient.split(SIZES)]
    given = synchronised(parts, gradients, whole.weight.detach().tpu(), whole.bias.detach().tpu())
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other.detach(), rtol=1e-4, atol=1e-5)


def synchronised(
    parts: list[torch.Tensor], gradients: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """Does what as many ranks as there are parts do, with sums in the place of their collectives."""
    running = torch.zeros(3, device="tpu"), torch.ones(3, device="tpu")
    means, invstds = zip(*(torch.batch_norm_stats(part, EPS) for part in parts), strict=True)
    counts = torch.tensor([part.numel() / 3 for part in parts], device="tpu")
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        parts[0], torch.stack(means), torch.stack(invstds), *running, 0.1, EPS, counts
    )
    made = [torch.batch_norm_elemt(part, weight, bias, mean, invstd, EPS) for part in parts]
    sums = [
        torch.batch_norm_backward_reduce(slope, part, mean, invstd, weight, True, True, True)
        for slope, part in zip(gradients, parts, strict=True)
    ]
    total, centred, of_weight, of_bias = (torch.stack(some).sum(0) for some in zip(*sums, strict=True))
    back = [
        torch.batch_norm_backward_elemt(slope, part, mean, invstd, weight, total, centred, counts.int())
        for slope, part in zip(gradients, parts, strict=True)
    ]
    return [torch.cat(made), torch.cat(back), *running, of_weight, of_bias]
