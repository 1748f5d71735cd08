"""The ways to run a work: each makes a function that does one step and returns its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .works import DEVICE, RATE, Made, make

RESTART = 400
"""Steps after which a training starts again. After some more, the moments of units that have died are numbers
so small that the processor takes a hundred times as long for them, in every way."""


@dataclass(frozen=True)
class Training:
    """One step, which returns the loss, and the tensors that steps change, once there was one."""

    step: Callable[[], torch.Tensor]
    changed: Callable[[], list[torch.Tensor]]


class NotThere(Exception):
    """A way that does not exist; the text is one line that says why."""


@dataclass(frozen=True)
class Way:
    """Where the tensors are, and how a step is made of a work and the name of the compiler's backend."""

    device: str
    prepare: Callable[[Made, str], Training]
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """The context in which the steps of a block run."""


def device_module() -> Any:
    return getattr(torch, DEVICE)


def plain(made: Made, _: str) -> Training:
    """Forward, backward and Adam(fused=True), one operation after the other."""
    optimizer = _fused_adam(made)
    return _training(made, made.model, optimizer, torch.compiler.disable(_step_of(optimizer)))


def with_inductor(made: Made, _: str) -> Training:
    """Inductor compiles the network with its loss, and the step of the optimizer."""
    optimizer = _adam(made, is_fused=False)
    update = torch.compile(optimizer.step) if optimizer else _nothing
    return _training(made, torch.compile(made.model), optimizer, update)


def with_backend(made: Made, backend: str) -> Training:
    """The backend compiles the network with its loss; the optimizer runs eagerly."""
    optimizer = _fused_adam(made)
    model = torch.compile(made.model, backend=backend)
    return _training(made, model, optimizer, torch.compiler.disable(_step_of(optimizer)))


def single_program(made: Made, backend: str) -> Training:
    """Forward, backward and Adam in one program of the backend."""
    if not made.is_trained:
        raise NotImplementedError("this work has no optimizer that a program could contain")
    optimizers = device_module().optimizers
    # Adam is AdamW without decay; the other ways have moments of float32, too.
    optimizer = optimizers.AdamW(lr=RATE, weight_decay=0.0, use_bfloat16_moments=False)
    trainer = optimizers.SingleTraceTrainer(made.model, optimizer, backend=backend)
    state = torch.utils._pytree.tree_leaves(trainer.state_dict())
    return Training(lambda: trainer.step(*made.data), lambda: [*made.model.parameters(), *state])


def fused() -> AbstractContextManager[object]:
    return device_module().set_eager_mode("DEFER_AND_FUSE")


WAYS = {
    "eager": Way("cpu", plain),
    "strict": Way(DEVICE, plain),
    "inductor": Way("cpu", with_inductor),
    "model": Way(DEVICE, with_backend),
    "step": Way(DEVICE, single_program),
    "fused": Way(DEVICE, plain, fused),
}
# An error that only says that a way does not exist yet, or does not know some operation of a work.
REASONS = (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Runner:
    """A work in a way, with the losses of its first steps."""

    way: Way
    step: Callable[[], torch.Tensor]
    losses: list[float]
    start: list[tuple[torch.Tensor, torch.Tensor]]
    """The tensors that steps change, and what they held when the first steps were done."""

    def block(self, count: int) -> None:
        """Runs so many steps, and waits until the device has done them."""
        with self.way.within():
            for number in range(count):
                if number % RESTART == 0:
                    self.restart()
                self.step()
            if self.way.device == DEVICE:
                device_module().synchronize()

    def restart(self) -> None:
        """Goes back to where the first steps had ended."""
        with torch.no_grad():
            for tensor, then in self.start:
                tensor.copy_(then)


def runner(work: str, name: str, backend: str, steps: int) -> Runner:
    """Prepares a work, and does its first steps.

    Raises:
        NotThere: when the way or the backend does not exist, or can not run this work.
    """
    way = WAYS[name]
    try:
        training = way.prepare(make(work, way.device), backend)
        with way.within():
            losses = [training.step().item() for _ in range(steps)]
    except REASONS as error:
        raise NotThere(one_line(error)) from error
    start = [(tensor, tensor.detach().cpu().clone()) for tensor in training.changed()]  # in no device memory
    return Runner(way, training.step, losses, start)


def one_line(error: BaseException) -> str:
    """Returns the kind of an error and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:160]


def optimizer_of(device: str) -> str:
    """Says which optimizer the ways that run it eagerly have on a device."""
    return "Adam(fused=True)" if _has_fused(device) else "Adam()"


def _training(
    made: Made,
    loss_of: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    update: Callable[[], object],
) -> Training:
    def step() -> torch.Tensor:
        made.model.zero_grad()
        loss = loss_of(*made.data)
        loss.backward()
        update()
        return loss.detach()

    def changed() -> list[torch.Tensor]:
        states = optimizer.state.values() if optimizer else ()
        return [*made.model.parameters(), *(one for state in states for one in state.values())]

    return Training(step, changed)


def _step_of(optimizer: torch.optim.Optimizer | None) -> Callable[[], object]:
    return optimizer.step if optimizer else _nothing


def _fused_adam(made: Made) -> torch.optim.Optimizer | None:
    return _adam(made, is_fused=_has_fused(made.data[0].device.type))


def _adam(made: Made, *, is_fused: bool) -> torch.optim.Optimizer | None:
    if not made.is_trained:
        return None
    return torch.optim.Adam(made.model.parameters(), lr=RATE, fused=is_fused or None)


def _has_fused(device: str) -> bool:
    """Whether the device has the kernel; the optimizer alone does not say."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        torch.optim.Adam([parameter], fused=True).step()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _nothing() -> None:
    """Stands for the optimizer of a work that has none."""
