"""fully_shard: parameters, gradients and optimizer state in shards, gathered layer by layer in bf16.

    tpurun -n 8 examples/fsdp2.py

With an even number of ranks, two replicas of the shards (HSDP). Layers are computed a second time in the
backward pass instead of being kept. Change DEVICE to run it anywhere else.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

DEVICE = "tpu"
STEPS, BATCH, LENGTH, WIDTH, SYMBOLS = 40, 8, 16, 64, 32


class Model(nn.Module):
    """A small transformer that is to repeat its input backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(3))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols) + self.positions
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 2 and ranks % 2 == 0:
        mesh = init_device_mesh(DEVICE, (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("shards",))
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        symbols = torch.randint(SYMBOLS, (BATCH, LENGTH), device=DEVICE)
        scores = model(symbols).float()
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), symbols.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            norm = norm.full_tensor()  # a collective: every rank comes here
            if rank == 0:
                print(f"step {step:3}  loss {mean.item() / ranks:.3f}  norm {norm.item():.2f}", flush=True)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    if rank == 0:
        whole = sum(parameter.numel() for parameter in model.parameters())
        print(f"rank 0 holds {held:,} of {whole:,} parameters on mesh {tuple(mesh.shape)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
