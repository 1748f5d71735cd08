"""Tensor, sequence and context parallelism: one small transformer, split within its layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from .case import Case, here, program
from .compare import ROUNDING_F32, same, torch_refuses
from .training import Batch, History, adam, batches, mlp, sgd, shares, train

VOCABULARY, WIDTH, HEADS, LENGTH, STEPS = 20, 16, 4, 8, 3


class Attention(nn.Module):
    """Attention with as many heads as its projections have columns for."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 4 * WIDTH), "down": nn.Linear(4 * WIDTH, WIDTH)})
        self.mlp.forward = lambda x: self.mlp["down"](functional.gelu(self.mlp["up"](x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def in_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Heads and columns in shards; between them the sequence is, and the logits are by vocabulary."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in model.blocks:
        plan = {
            "norm_1": SequenceParallel(),
            "attention": gathered,
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "norm_2": SequenceParallel(),
            "mlp": gathered,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        for name in ("query", "key", "value"):
            plan[f"attention.{name}"] = ColwiseParallel()
        parallelize_module(block, mesh, plan)
    return model


def tokens(size: int) -> list[Batch]:
    """Texts, and what comes next in them."""
    generator = torch.Generator(here()).manual_seed(2)
    texts = torch.randint(VOCABULARY, (STEPS, size, LENGTH + 1), generator=generator)
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def oracle(size: int) -> History:
    model = Transformer()
    return train(model, adam(model), tokens(size), loss=cross_entropy)


@program(ranks=4, sizes=(1, 4, 8))
def columns_and_rows(case: Case) -> None:
    """The two layers of an MLP, with one way of communication forward and one backward; 10 is not a multiple
    of 4. Torch's optimizers refuse parameters with fewer columns than ranks."""
    for width in (8, 10):
        model, alone = mlp(6, width, 3), mlp(6, width, 3)
        plan = {
            "0": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(),
        }
        parallelize_module(model, init_device_mesh(here(), (dist.get_world_size(),)), plan)
        steps = batches(6, 3)
        train(model, sgd(model), steps).must_be(train(alone, sgd(alone), steps))
        assert isinstance(model[0].weight, DTensor)


@program(ranks=4, sizes=(1, 4))
def transformer(case: Case) -> None:
    """With sequence parallelism, and a loss that never sees whole logits."""
    model = in_parallel(Transformer(), init_device_mesh(here(), (dist.get_world_size(),)))
    with loss_parallel():
        history = train(model, adam(model), tokens(3), loss=cross_entropy)
    history.must_be(oracle(3))


@program(ranks=8)
def transformer_and_fsdp(case: Case) -> None:
    """Two dimensions: FSDP2 over two, tensor parallelism over four."""
    mesh = init_device_mesh(here(), (2, 4), mesh_dim_names=("data", "tensor"))
    model = in_parallel(Transformer(), mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    mine = shares(tokens(6), mesh["data"].get_local_rank(), 2)
    with loss_parallel():
        history = train(model, adam(model), mine, loss=cross_entropy)
    history.must_be(oracle(6))


def heads_of(length: int) -> list[torch.Tensor]:
    generator = torch.Generator(here()).manual_seed(6)
    return [torch.randn(2, HEADS, length, 8, generator=generator) for _ in range(3)]


@program(ranks=4, devices=("cpu",))
def context_parallel_is_not_for_the_cpu(case: Case) -> None:
    """torch splits and joins the sequence on the CPU, too, but knows ring attention for the attention kernels
    of accelerators alone: on any backend, the one of the CPU is not among those that it dispatches."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    whole = heads_of(16)
    mine = [tensor.clone() for tensor in whole]
    with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2, 2, 2]):
        parts = [tensor.shape[2] for tensor in mine]
        assert parts == [16 // dist.get_world_size()] * 3, parts
        for joined, wanted in zip(context_parallel_unshard(mesh, mine, [2, 2, 2]), whole, strict=True):
            same("split and joined", joined, wanted)
        torch_refuses(
            NotImplementedError,
            "_scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy",
            lambda: functional.scaled_dot_product_attention(*mine, is_causal=True),
        )


@program(ranks=4, devices=("tpu",))
def context_parallel_on_the_device(case: Case) -> None:
    """Keys and values go round; each rank has a part of the sequence from its head and one from its tail."""
    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    whole, seed = heads_of(16), heads_of(16)[0].flip(2)
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    wanted = functional.scaled_dot_product_attention(*leaves, is_causal=True)
    wanted.backward(seed)
    mine = [tensor.clone() for tensor in (*whole, seed)]
    with context_parallel(mesh, buffers=mine, buffer_seq_dims=[2] * 4):
        parts = [tensor.detach().requires_grad_() for tensor in mine[:3]]
        out = functional.scaled_dot_product_attention(*parts, is_causal=True)
        out.backward(mine[3])
        found = [out.detach(), *(part.grad for part in parts)]
        joined = context_parallel_unshard(mesh, found, [2] * 4)
    for ours, one in zip(joined, (wanted.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        same("joined", ours, one, ROUNDING_F32)


@program(ranks=4, sizes=(1, 4), devices=("tpu",))
def attention_of_dtensors(case: Case) -> None:
    """Attention is split by heads, by the batch, by two dimensions at once, and by a sequence that has to be
    gathered first."""
    ranks = dist.get_world_size()
    rows = 2 if ranks > 1 else 1
    line, square = (init_device_mesh(here(), shape) for shape in ((ranks,), (rows, ranks // rows)))
    for mesh, placements in (
        (line, [Shard(2)]),
        (line, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Shard(1)]),
    ):
        attention_is_right(mesh, placements, {"is_causal": True})
    for dim in (0, 1):
        attention_is_right(line, [Shard(dim)], {"scale": 0.5})
        attention_is_right(line, [Shard(dim)], {"attn_mask": (1, 1)})
        attention_is_right(line, [Shard(dim)], {"attn_mask": (4, HEADS)})
    parts = [distribute_tensor(tensor, line, [Shard(1)]) for tensor in heads_of(6)]
    mask = distribute_tensor(torch.zeros(1, HEADS, 6, 6), line, [Shard(1)])
    try:
        functional.scaled_dot_product_attention(*parts, attn_mask=mask)
    except NotImplementedError as error:
        assert "redistribute it to Replicate()" in str(error), error
    else:
        assert ranks == 1, "expected a mask in parts to be refused"


def attention_is_right(mesh: DeviceMesh, placements: list, options: dict) -> None:
    """Value and gradients, against whole tensors."""
    generator = torch.Generator(here()).manual_seed(7)
    whole = [torch.randn(4, HEADS, 6, 8, generator=generator) for _ in range(4)]
    seed, options, shared = whole.pop(), dict(options), dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = torch.randn(*options["attn_mask"], 6, 6, generator=generator)
        shared["attn_mask"] = distribute_tensor(options["attn_mask"], mesh, [Replicate()] * mesh.ndim)
    alone = [tensor.clone().requires_grad_() for tensor in whole]
    parts = [distribute_tensor(tensor, mesh, placements).requires_grad_() for tensor in whole]
    wanted = functional.scaled_dot_product_attention(*alone, **options)
    found = functional.scaled_dot_product_attention(*parts, **shared)
    what = f"{placements} {[*options]}"
    same(what, found.full_tensor(), wanted, ROUNDING_F32)
    wanted.backward(seed)
    found.backward(distribute_tensor(seed, mesh, found.placements))
    for ours, one in zip(parts, alone, strict=True):
        same(f"{what}: gradient", ours.grad.full_tensor(), one.grad, ROUNDING_F32)


@program(ranks=4)
def ring_attention(case: Case) -> None:
    """Torch's ring attention for the kernels of accelerators works with the kernel of the CPU. Keys and
    values go round in a ring, by all-to-all or gathered, forward and backward."""
    whole, ranks = heads_of(16), dist.get_world_size()
    mine = [tensor.chunk(ranks, 2)[case.rank].contiguous() for tensor in whole]
    leaves = [tensor.clone().requires_grad_() for tensor in whole]
    wanted = functional.scaled_dot_product_attention(*leaves, is_causal=True)
    seed = heads_of(16)[0].flip(2)
    wanted.backward(seed)
    aten, group = torch.ops.aten, dist.group.WORLD
    balanced, ring._cp_options.enable_load_balance = ring._cp_options.enable_load_balance, False
    try:
        for method in ("alltoall", "allgather"):
            ring.set_rotate_method(method)
            out, sums = ring._templated_ring_attention(
                group,
                2,
                aten._scaled_dot_product_flash_attention_for_cpu,
                *mine,
                is_causal=True,
                dropout_p=0.0,
                scale=None,
            )
            same(method, out, wanted.detach().chunk(ranks, 2)[case.rank], ROUNDING_F32)
            found = ring._templated_ring_attention_backward(
                group,
                2,
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                seed.chunk(ranks, 2)[case.rank].contiguous(),
                "grad_out",
                *mine,
                out,
                sums,
                is_causal=True,
                dropout_p=0.0,
                scale=None,
            )
            for ours, leaf in zip(found, leaves, strict=True):
                same(f"{method}: gradient", ours, leaf.grad.chunk(ranks, 2)[case.rank], ROUNDING_F32)
    finally:
        ring._cp_options.enable_load_balance = balanced
