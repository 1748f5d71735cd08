"""The ways to run a work: each makes a function that does one step and returns its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .works import DEVICE, RATE, Made, make

Step = Callable[[], torch.Tensor]


class NotThere(Exception):
    """A way that does not exist; the text is one line that says why."""


@dataclass(frozen=True)
class Way:
    """Where the tensors are, and how a step is made of a work and the name of the compiler's backend."""

    device: str
    prepare: Callable[[Made, str], Step]
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """The context in which the steps of a block run."""


def device_module() -> Any:
    return getattr(torch, DEVICE)


def plain(made: Made, _: str) -> Step:
    """Forward, backward and Adam(fused=True), one operation after the other."""
    return _training(made, made.model, torch.compiler.disable(_step_of(made)))


def with_inductor(made: Made, _: str) -> Step:
    """Inductor compiles the network with its loss, and the step of the optimizer."""
    optimizer = _adam(made, is_fused=False)
    update = torch.compile(optimizer.step) if optimizer else _nothing
    return _training(made, torch.compile(made.model), update)


def with_backend(made: Made, backend: str) -> Step:
    """The backend compiles the network with its loss; the optimizer runs eagerly."""
    return _training(made, torch.compile(made.model, backend=backend), torch.compiler.disable(_step_of(made)))


def single_program(made: Made, backend: str) -> Step:
    """Forward, backward and Adam in one program of the backend."""
    if not made.is_trained:
        raise NotImplementedError("this work has no optimizer that a program could contain")
    optimizers = device_module().optimizers
    # Adam is AdamW without decay; the other ways have moments of float32, too.
    optimizer = optimizers.AdamW(lr=RATE, weight_decay=0.0, use_bfloat16_moments=False)
    trainer = optimizers.SingleTraceTrainer(made.model, optimizer, backend=backend)
    return lambda: trainer.step(*made.data)


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
    step: Step
    losses: list[float]

    def block(self, count: int) -> None:
        """Runs so many steps, and waits until the device has done them."""
        with self.way.within():
            for _ in range(count):
                self.step()
            if self.way.device == DEVICE:
                device_module().synchronize()


def runner(work: str, name: str, backend: str, steps: int) -> Runner:
    """Prepares a work, and does its first steps.

    Raises:
        NotThere: when the way or the backend does not exist, or can not run this work.
    """
    way = WAYS[name]
    try:
        step = way.prepare(make(work, way.device), backend)
        with way.within():
            losses = [step().item() for _ in range(steps)]
    except REASONS as error:
        raise NotThere(one_line(error)) from error
    return Runner(way, step, losses)


def one_line(error: BaseException) -> str:
    """Returns the kind of an error and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no text'}"[:160]


def optimizer_of(device: str) -> str:
    """Says which optimizer the ways that run it eagerly have on a device."""
    return "Adam(fused=True)" if _has_fused(device) else "Adam()"


def _training(made: Made, loss_of: Callable[..., torch.Tensor], update: Callable[[], object]) -> Step:
    def step() -> torch.Tensor:
        made.model.zero_grad()
        loss = loss_of(*made.data)
        loss.backward()
        update()
        return loss.detach()

    return step


def _step_of(made: Made) -> Callable[[], object]:
    optimizer = _adam(made, is_fused=_has_fused(made.data[0].device.type))
    return optimizer.step if optimizer else _nothing


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
