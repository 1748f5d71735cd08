"""The works: small networks with their data, made on the CPU from a seed and moved to a device.

A work's module returns the loss of its data, so that every way compiles forward and loss together.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..job import ROOT

SEED = 0
RATE = 1e-3
BATCH = 16  # of the small networks
Data = tuple[torch.Tensor, ...]


# In two parts: to import a module that names the device is to claim it, also where only tables are made.
DEVICE = "t" + "pu"


@dataclass(frozen=True)
class Made:
    """A module that returns the loss of the data; `is_trained` says whether a step updates parameters."""

    model: nn.Module
    data: Data
    is_trained: bool


class Perceptron(nn.Module):
    """Four layers of 64 with ReLU between them."""

    WIDTH, LAYERS = 64, 4

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(self.LAYERS):
            layers += [nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), wanted)


class Recurrent(nn.Module):
    """An LSTM cell in plain operations, unrolled over all steps of the input."""

    INPUT, WIDTH, STEPS = 32, 64, 32

    def __init__(self) -> None:
        super().__init__()
        self.of_input = nn.Linear(self.INPUT, 4 * self.WIDTH)
        self.of_state = nn.Linear(self.WIDTH, 4 * self.WIDTH, bias=False)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        hidden = cell = x.new_zeros(x.shape[1], self.WIDTH)
        for step in range(self.STEPS):
            gates = self.of_input(x[step]) + self.of_state(hidden)
            enter, forget, candidate, leave = gates.chunk(4, dim=1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
        return F.mse_loss(hidden, wanted)


class Chain(nn.Module):
    """Ten pointwise operations that need no transcendental function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x, self.weight).mean()

    def chain(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x * weight + 0.5)
        b = a * a - weight
        c = (b * 0.25 + a).clamp(-4.0, 4.0)
        return (c - x) * 0.1


class TranscendentalChain(Chain):
    """Ten pointwise operations, tanh, sigmoid and exp among them."""

    def chain(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(x * weight + 0.5)
        b = torch.sigmoid(a - weight)
        c = torch.exp(b * 0.25) * a
        return (c - x) * 0.1


class Residual(nn.Module):
    """One transformer block, whose output is compared with what is wanted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = example().Block(width, width // 64)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.block(x), wanted)


class Convolutional(nn.Module):
    """Three convolutions of images of 32 x 32, each with batch normalisation, ReLU and pooling."""

    CHANNELS, CLASSES = (3, 16, 32, 64), 10

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given, made in zip(self.CHANNELS, self.CHANNELS[1:], strict=False):
            layers += [nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(self.CHANNELS[-1] * 4 * 4, self.CLASSES)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layers(images).flatten(1)), classes)


@functools.cache
def example() -> ModuleType:
    """Returns examples/train.py as a module: the benchmark trains the network that users meet first."""
    spec = importlib.util.spec_from_file_location("tpurun_example_train", ROOT / "examples" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gpt() -> tuple[nn.Module, Data]:
    """The GPT of the example at the sizes that its options have without arguments."""
    sizes = argparse.Namespace(context=64, width=64, heads=4, layers=2)
    text = torch.randint(256, (4, sizes.context + 1))
    return example().GPT(sizes), (text[:, :-1].contiguous(), text[:, 1:].contiguous())


def mlp() -> tuple[nn.Module, Data]:
    width = Perceptron.WIDTH
    return Perceptron(), (torch.randn(BATCH, width), torch.randn(BATCH, width))


def lstm() -> tuple[nn.Module, Data]:
    x = torch.randn(Recurrent.STEPS, BATCH, Recurrent.INPUT)
    return Recurrent(), (x, torch.randn(BATCH, Recurrent.WIDTH))


def chain(kind: Callable[[int], nn.Module], width: int) -> tuple[nn.Module, Data]:
    return kind(width), (torch.randn(width, width),)


def block(width: int, context: int) -> tuple[nn.Module, Data]:
    shape = (4, context, width)
    return Residual(width), (torch.randn(shape), torch.randn(shape))


def conv() -> tuple[nn.Module, Data]:
    return Convolutional(), (torch.randn(8, 3, 32, 32), torch.randint(Convolutional.CLASSES, (8,)))


TRAINED: dict[str, Callable[[], tuple[nn.Module, Data]]] = {
    "mlp": mlp,
    "gpt": gpt,
    "lstm": lstm,
    "chain256": lambda: chain(Chain, 256),
    "chain256t": lambda: chain(TranscendentalChain, 256),
    "block256": lambda: block(256, 128),
    "block512": lambda: block(512, 64),
    "block768": lambda: block(768, 64),
    "conv": conv,
}
"""Works whose step is forward, backward and Adam. A trailing `t` means transcendental functions."""
DERIVED: dict[str, Callable[[], tuple[nn.Module, Data]]] = {
    "pointwise4k": lambda: chain(Chain, 64),
    "pointwise64k": lambda: chain(Chain, 256),
    "pointwise64kt": lambda: chain(TranscendentalChain, 256),
    "pointwise1m": lambda: chain(Chain, 1024),
    "pointwise1mt": lambda: chain(TranscendentalChain, 1024),
}
"""Works whose step is forward and backward alone; the name says how many elements a tensor has."""
WORKS = (*TRAINED, *DERIVED)


def make(name: str, device: str, seed: int = SEED) -> Made:
    """Builds a work on the CPU, so that its numbers do not depend on the device, and moves it."""
    torch.manual_seed(seed)
    model, data = (TRAINED | DERIVED)[name]()
    moved: list[Any] = [tensor.to(device) for tensor in data]
    return Made(model.to(device), tuple(moved), name in TRAINED)
