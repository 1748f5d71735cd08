"""``tpurun -n N -m tests.performance.step``: a training step of DDP and of FSDP2, on the backends in turn.

A transformer for each backend, with the same parameters and data, and the small network of `examples/ddp.py`.
A step is forward, backward and AdamW; that of DDP also without communication (`no_sync`), so that one sees
what the gradients add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from . import turns

LAYERS, WIDTH, HEADS, SYMBOLS = 8, 256, 8, 512
BATCH, LENGTH = 2, 32
# As in examples/ddp.py.
STUDENT_BATCH, STUDENT_WIDTH = 32, 64

Loss = Callable[[nn.Module], torch.Tensor]


class Model(nn.Module):
    """Predicts symbols from the ones before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        layer = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, **layer) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def predicting(data: torch.Tensor) -> Loss:
    def loss(net: nn.Module) -> torch.Tensor:
        scores = net(data[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), data[:, 1:].flatten())

    return loss


def student() -> nn.Module:
    torch.manual_seed(0)
    hidden = 2 * STUDENT_WIDTH
    return nn.Sequential(nn.Linear(STUDENT_WIDTH, hidden), nn.GELU(), nn.Linear(hidden, 1))


def learning() -> Loss:
    """Learns from new data in every step, as the example makes it."""
    width = STUDENT_WIDTH
    teacher = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(net: nn.Module) -> torch.Tensor:
        x = torch.randn(STUDENT_BATCH, width)
        with torch.no_grad():
            wanted = teacher(x)
        return nn.functional.mse_loss(net(x), wanted)

    return loss


def step(net: nn.Module, loss: Loss) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True)

    def run() -> None:
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()

    return run


def ddp(
    groups: dict[str, dist.ProcessGroup], make: Callable[[], nn.Module], loss: Loss
) -> dict[str, turns.Work]:
    nets = {name: DistributedDataParallel(make(), process_group=group) for name, group in groups.items()}
    works: dict[str, turns.Work] = {name: step(net, loss) for name, net in nets.items()}
    alone = DistributedDataParallel(make(), process_group=groups[turns.BACKENDS[0]])
    run = step(alone, loss)

    def without_communication() -> None:
        with alone.no_sync():
            run()

    return works | {"no communication": without_communication}


def fsdp2(groups: dict[str, dist.ProcessGroup], loss: Loss) -> dict[str, turns.Work]:
    works: dict[str, turns.Work] = {}
    for name, group in groups.items():
        net, mesh = model(), DeviceMesh.from_group(group, "cpu")
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        works[name] = step(fully_shard(net, mesh=mesh), loss)
    return works


def main() -> None:
    options = turns.options(__doc__)
    groups = turns.groups()
    torch.manual_seed(1 + dist.get_rank())
    predicted = predicting(torch.randint(SYMBOLS, (BATCH, LENGTH + 1)))
    for kind, make, works in (
        ("DDP", model, ddp(groups, model, predicted)),
        ("DDP of examples/ddp.py", student, ddp(groups, student, learning())),
        ("FSDP2", model, fsdp2(groups, predicted)),
    ):
        parameters = sum(parameter.numel() for parameter in make().parameters())
        seconds = turns.in_turn(works, options.turns, options.block_s)
        turns.write(kind=kind, parameters=parameters, seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
