"""Compares compiled functions with the same functions in Strict, on the device, bit by bit."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # what its first use would import in every process
import torch._functorch.aot_autograd
from torch import nn

import ranks

# In two parts: to import a module that names the device is to claim it, which here would be before the fork.
DEVICE = "t" + "pu"
# Another one, such as aot_eager, shows whether a test itself is right.
BACKEND = os.environ.get("TPURUN_TEST_BACKEND", DEVICE)
IS_OURS = BACKEND == DEVICE
SEED = 7
Tensors = Sequence[torch.Tensor]


on_device = ranks.on_device("256MiB")


def compiled(function: Any, **options: Any) -> Any:
    """Compiles a function or a module with the backend of the tests."""
    return torch.compile(function, **({"backend": BACKEND} | options))


def tensor(
    *shape: int, seed: int = 1, gradient: bool = False, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The same numbers for the same seed, whatever else has been drawn."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    return made.requires_grad_(gradient)


def same(what: str, ours: Any, wanted: Any) -> None:
    """Raises unless both are the same, structures and tensors to the bit; any NaN is a NaN."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(ours, torch.Tensor), f"{what}: expected a tensor, got {ours!r}"
        for name in ("dtype", "shape", "device", "requires_grad"):
            one, other = getattr(ours, name), getattr(wanted, name)
            assert one == other, f"{what}: {name}: expected {other}, got {one}"
        torch.testing.assert_close(
            ours.detach().cpu(),
            wanted.detach().cpu(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )
    elif isinstance(wanted, Mapping):
        assert ours.keys() == wanted.keys(), f"{what}: expected {[*wanted]}, got {[*ours]}"
        for key, value in wanted.items():
            same(f"{what}[{key!r}]", ours[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert type(ours) is type(wanted) and len(ours) == len(wanted), (
            f"{what}: expected {wanted}, got {ours}"
        )
        for index, value in enumerate(wanted):
            same(f"{what}[{index}]", ours[index], value)
    else:
        assert ours == wanted, f"{what}: expected {wanted!r}, got {ours!r}"


def check(function: Callable[..., Any], *calls: Callable[[], Tensors], **options: Any) -> Callable[..., Any]:
    """Calls a function with what each of `calls` makes, compiled and not: results, what it wrote to its
    arguments, and the gradients of those that want one. Returns the compiled function."""
    ours = compiled(function, **options)
    for number, make in enumerate(calls):
        wanted, found = run(function, make()), run(ours, make())
        same(f"call {number}", found, wanted)
    assert graphs() > 0, "nothing was compiled"
    return ours


def run(function: Callable[..., Any], arguments: Tensors) -> dict[str, Any]:
    """Everything that a call leaves."""
    torch.manual_seed(SEED)
    result = function(*arguments)
    leaves = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad and one.is_leaf]
    loss = sum(one.double().square().sum() for one in floats_of(result) if one.requires_grad)
    if leaves and isinstance(loss, torch.Tensor):
        loss.backward()
    gradients = [one.grad for one in leaves]
    return {"result": result, "arguments": [*arguments], "gradients": gradients, "drawn": drawn()}


def floats_of(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from floats_of(one)
    elif isinstance(value, Mapping):
        yield from floats_of([*value.values()])


def drawn() -> list[int]:
    """The generator's seed, and how much it has given."""
    return getattr(torch, DEVICE).get_rng_state().view(torch.int64).tolist()


def trained(
    model: nn.Module,
    step: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    update: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Losses, parameters and buffers of a short training; `step` returns the loss of a batch."""
    torch.manual_seed(SEED)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = step(tensor(8, 6, seed=number))
        loss.backward()
        (update or optimizer.step)()
        losses.append(loss.detach())
    return {"losses": losses, "state": dict(model.state_dict()), "drawn": drawn()}


def graphs() -> int:
    """How many graphs have been compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
