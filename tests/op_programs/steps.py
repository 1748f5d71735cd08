"""The operations that programs are made of. Each takes some tensors and a source of random choices, and
returns what it makes; the choices are the same on both devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch.nn import functional

Tensor = torch.Tensor
Step = Callable[[Random, Sequence[Tensor]], object]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (
    *FLOATS,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)

UNARY = (
    torch.neg, torch.abs, torch.exp, torch.sin, torch.sqrt, torch.relu, torch.sigmoid, torch.tanh,
    torch.floor, torch.sign, torch.isnan, torch.logical_not, torch.square, torch.reciprocal,
    torch.log1p, torch.isfinite, torch.conj, torch.angle, torch.bitwise_not, torch.erf, torch.trunc,
    torch.signbit, torch.nan_to_num, torch.clone, torch.zeros_like, torch.ones_like, torch.nonzero,
    torch.count_nonzero, torch.trace, torch.unique, functional.gelu, functional.silu,
    functional.softplus, functional.elu, functional.hardtanh,
)  # fmt: skip
BINARY = (
    torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.minimum, torch.eq, torch.lt,
    torch.ge, torch.atan2, torch.fmod, torch.remainder, torch.logical_and, torch.bitwise_xor, torch.pow,
    torch.hypot, torch.floor_divide, torch.logaddexp, torch.copysign, torch.mm, torch.matmul,
    torch.outer, torch.dot, torch.isclose, torch.kron, torch.equal, torch.complex, torch.lerp,
)  # fmt: skip
# Without torch.median: on the CPU it reads beyond the end of expanded tensors.
REDUCTIONS = (
    torch.sum, torch.mean, torch.prod, torch.amax, torch.amin, torch.argmax, torch.any, torch.all,
    torch.var, torch.logsumexp, torch.cumsum, torch.cumprod, torch.softmax, torch.log_softmax,
    torch.sort, torch.argsort, torch.max, torch.norm, torch.diff, torch.flip,
    torch.logcumsumexp, torch.cummax, torch.mode,
)  # fmt: skip
SMOOTH = (torch.tanh, torch.sin, torch.sigmoid, torch.flatten, lambda x: x * 2, lambda x: x.cumsum(0))
IN_PLACE_UNARY = (
    "neg_",
    "abs_",
    "exp_",
    "relu_",
    "zero_",
    "sigmoid_",
    "floor_",
    "sqrt_",
    "sign_",
    "square_",
    "t_",
)
IN_PLACE_BINARY = ("add_", "sub_", "mul_", "div_", "copy_", "eq_", "atan2_", "fmod_", "pow_", "logical_or_")


def dimension(random: Random, tensor: Tensor) -> int:
    return random.randrange(-tensor.dim(), tensor.dim()) if tensor.dim() else 0


def scalar(random: Random) -> float | int | bool:
    return random.choice([0, 1, -2, 3, 0.5, -1.5, True, float("inf")])


def indices(random: Random, tensor: Tensor, size: int, count: int) -> Tensor:
    values = [random.randrange(max(size, 1)) for _ in range(count)]
    return torch.tensor(values, dtype=torch.int64, device=tensor.device)


def along(values: Tensor, dim: int, dims: int) -> Tensor:
    return values.view([-1 if at == dim % dims else 1 for at in range(dims)])


def unary(random: Random, tensors: Sequence[Tensor]) -> object:
    return random.choice(UNARY)(tensors[0])


def binary(random: Random, tensors: Sequence[Tensor]) -> object:
    other = scalar(random) if random.random() < 0.3 else tensors[1]
    return random.choice(BINARY)(tensors[0], other)


def reduction(random: Random, tensors: Sequence[Tensor]) -> object:
    return random.choice(REDUCTIONS)(tensors[0], dim=dimension(random, tensors[0]))


def whole_reduction(random: Random, tensors: Sequence[Tensor]) -> object:
    return random.choice([torch.sum, torch.max, torch.mean, torch.any, torch.std, torch.argmin])(tensors[0])


def in_place(random: Random, tensors: Sequence[Tensor]) -> object:
    if random.random() < 0.4:
        return getattr(tensors[0], random.choice(IN_PLACE_UNARY))()
    other = scalar(random) if random.random() < 0.3 else tensors[1]
    return getattr(tensors[0], random.choice(IN_PLACE_BINARY))(other)


def written_by_index(random: Random, tensors: Sequence[Tensor]) -> object:
    tensor = tensors[0]
    dim = dimension(random, tensor)
    which = indices(random, tensor, tensor.shape[dim] if tensor.dim() else 1, 3)
    how = random.randrange(6)
    if how == 0:
        return tensor.index_fill_(dim, which, 1)
    if how == 1:
        return tensor.index_add_(dim, which, tensor.index_select(dim, which))
    if how == 2:
        return tensor.masked_fill_(tensor.real > 0 if tensor.is_complex() else tensor > 0, 2)
    if how == 3:
        tensor[which] = scalar(random)
        return tensor
    if how == 4:
        tensor[tensor == 1] = 0
        return tensor
    return tensor.index_copy_(dim, which, tensor.index_select(dim, which.flip(0)))


def view(random: Random, tensors: Sequence[Tensor]) -> object:
    tensor = tensors[0]
    dim, other = dimension(random, tensor), dimension(random, tensor)
    size = tensor.shape[dim] if tensor.dim() else 1
    begin = random.randrange(size) if size else 0
    return random.choice([
        lambda: tensor.transpose(dim, other),
        lambda: tensor.narrow(dim, begin, random.randint(0, size - begin)),
        lambda: tensor.select(dim, begin),
        lambda: tensor.unsqueeze(dim),
        lambda: tensor.squeeze(),
        lambda: tensor.expand(2, *tensor.shape),
        lambda: tensor.flatten(),
        lambda: tensor.reshape(-1, 1),
        lambda: tensor.view(-1),
        lambda: tensor.diagonal(),
        lambda: tensor.unfold(dim, 2, 1),
        lambda: tensor.as_strided((2, 2), (1, 2), random.randrange(3)),
        lambda: tensor.movedim(dim, other),
        lambda: tensor[..., ::2],
        lambda: tensor.chunk(2, dim),
        lambda: tensor.split(1, dim)[:3],
        lambda: tensor.unbind(dim)[:3],
        lambda: tensor.detach(),
        lambda: tensor.view(torch.uint8),
        lambda: torch.view_as_real(tensor),
        lambda: tensor.real,
        lambda: tensor.mT,
    ])()  # fmt: skip


def gathered(random: Random, tensors: Sequence[Tensor]) -> object:
    tensor = tensors[0]
    dim = dimension(random, tensor)
    which = indices(random, tensor, tensor.shape[dim] if tensor.dim() else 1, 4)
    return random.choice([
        lambda: tensor.index_select(dim, which),
        lambda: tensor[which],
        lambda: tensor[which.cpu()],
        lambda: tensor.take(which),
        lambda: tensor[tensor != 0],
        lambda: torch.masked_select(tensor, tensor.bool()),
        lambda: tensor.gather(dim, along(which, dim, tensor.dim())),
        lambda: tensor.roll(1, dim),
        lambda: tensor.repeat_interleave(2, dim),
        lambda: tensor.tril(),
        lambda: tensor.topk(1, dim),
        lambda: torch.where(tensor.bool(), tensor, tensors[1]),
        lambda: torch.searchsorted(tensor.flatten().sort().values, tensors[1].to(tensor.dtype)),
    ])()  # fmt: skip


def joined(random: Random, tensors: Sequence[Tensor]) -> object:
    some = [tensors[0], tensors[0], tensors[1]]
    return random.choice([torch.cat, torch.stack, torch.hstack, torch.block_diag, torch.broadcast_tensors])(
        some if random.random() < 0.3 else some[:2]
    )


def converted(random: Random, tensors: Sequence[Tensor]) -> object:
    tensor = tensors[0]
    if random.random() < 0.2:
        # There and back is a copy on the device, so it must be one on the CPU.
        return tensor.clone(memory_format=torch.contiguous_format).cpu().to(tensor.device)
    return tensor.to(random.choice(DTYPES), copy=random.random() < 0.5)


def resized(random: Random, tensors: Sequence[Tensor]) -> object:
    made = tensors[0].clone()
    rows = random.randrange(1, 4)
    made.resize_(rows, 2)
    # Growing adds elements of any value.
    return made.fill_(rows)


def layer(random: Random, tensors: Sequence[Tensor]) -> object:
    x = tensors[0].to(random.choice(FLOATS[:3]))
    size = x.shape[-1] if x.dim() else 1
    weight = torch.linspace(-1, 1, 3 * size, dtype=x.dtype, device=x.device).view(3, size)
    first = torch.zeros(x.numel() // max(size, 1), dtype=torch.int64, device=x.device)
    return random.choice([
        lambda: functional.linear(x, weight),
        lambda: functional.layer_norm(x, (size,), weight[0], weight[1]),
        lambda: functional.rms_norm(x, (size,), weight[0]),
        lambda: functional.conv1d(x.reshape(1, 1, -1), weight.reshape(3, 1, size)),
        lambda: functional.max_pool1d(x.reshape(1, 1, -1), 2),
        lambda: functional.embedding(x.long().clamp(0, 2), weight),
        lambda: functional.normalize(x, dim=-1),
        lambda: functional.cross_entropy(x.reshape(-1, size), first),
        lambda: functional.scaled_dot_product_attention(*[x.reshape(1, 1, -1, size)] * 3),
        lambda: torch.einsum("...i,ji->...j", x, weight),
        lambda: functional.pad(x, (1, 1)),
        lambda: functional.glu(torch.cat([x, x], -1)),
    ])()  # fmt: skip


def gradient(random: Random, tensors: Sequence[Tensor]) -> object:
    leaf = tensors[0].detach().to(random.choice(FLOATS[:2])).requires_grad_()
    out = leaf
    for _ in range(random.randrange(1, 4)):
        out = random.choice(SMOOTH)(out)
    out.square().sum().backward()
    return leaf.grad


def optimized(random: Random, tensors: Sequence[Tensor]) -> object:
    some = [tensor.detach().double().reshape(-1) for tensor in tensors[:2]]
    how = random.choice([torch._foreach_add, torch._foreach_mul])
    made = how(some, 2.0)
    torch._foreach_addcmul_(made, some, some, 0.5)
    return [*made, *torch._foreach_norm(made)]


STEPS: dict[Step, int] = {
    unary: 4,
    binary: 5,
    reduction: 3,
    whole_reduction: 1,
    in_place: 5,
    written_by_index: 3,
    view: 8,
    gathered: 3,
    joined: 1,
    converted: 2,
    resized: 1,
    layer: 2,
    gradient: 1,
    optimized: 1,
}
"""How often each is taken."""
