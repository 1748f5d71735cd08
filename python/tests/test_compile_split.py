"""Compiled graphs that are too large for one program: several programs compute the same bits."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from compiling import BACKEND, IS_OURS, check, compiled, on_device, same, tensor

pytestmark = pytest.mark.skipif(not IS_OURS, reason=f"{BACKEND} is not the compiler of the device")
Body = Callable[..., Any]


def cut_at(most: int) -> None:
    """From now on, in this process, a program has so many operations at most."""
    from tpurun.compile import _lowering

    _lowering.MOST_OPERATIONS = most


def counted() -> tuple[int, int]:
    """Graphs that have been split, and programs."""
    counts = torch.tpu.compile.counters()
    assert counts["graphs_kept_eager"] == 0, counts
    return counts["graphs_split"], counts["programs"]


def layers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = functional.layer_norm(x @ y.t(), (y.shape[0],)).sigmoid() @ y + x
    return functional.dropout(x, 0.3)


def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    row = x[1]
    before = row * 2
    x.mul_(y)
    row.add_(1)
    x.t()[2].copy_(before[0] + y[:, 0])
    return row + before + x.sum(0)


def views(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    left, right = (x * y).split(3, dim=1)
    turned = left.t()
    strided = (x + y).as_strided((2, 3), (3, 1), 2)
    folded = (x.exp() - y).unfold(0, 2, 1)
    return [turned.sin() + right.t(), strided.cos() * left[:2], folded.sum(-1), turned * 2, right.real]


def lists(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    made = torch._foreach_mul([x, y, x + y], 3.0)
    torch._foreach_add_(made, 1.0)
    return [*made, torch.cat(made, 1).topk(2).values]


CASES: dict[str, tuple[Body, bool]] = {
    "layers": (layers, True),
    "writes": (writes, False),
    "views": (views, True),
    "lists": (lists, False),
}


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
@on_device
def test_several_programs_compute_the_same(name: str, most: int) -> None:
    cut_at(most)
    body, has_gradient = CASES[name]
    made = lambda: [tensor(4, 6, seed=1, gradient=has_gradient), tensor(4, 6, seed=2)]  # noqa: E731
    check(body, made, made)
    graphs, programs = counted()
    assert graphs > 0 and programs > 2 * graphs if most < 5 else graphs > 0


@on_device
def test_sizes_may_change() -> None:
    cut_at(2)
    check(layers, *[lambda rows=rows: [tensor(rows, 6, gradient=True), tensor(4, 6)] for rows in (2, 5, 7)])
    assert counted()[0] > 0


@on_device
def test_results_that_share_memory_are_related() -> None:
    """They are in Strict, and in one program: a write to one of them is seen in the others."""
    cut_at(1)

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        made = x.sin()
        rows = made[1:]
        return [rows, made.t(), made.cos() + rows[0], rows.sum()]

    def changed(function: Body) -> list[torch.Tensor]:
        results = function(tensor(3, 4))
        results[0].add_(1)
        return results

    same("results", changed(compiled(body)), changed(body))
    assert counted()[0] > 0


@on_device
def test_a_module_is_trained() -> None:
    cut_at(3)

    def trained(function: Body) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Linear(5, 6)).to("tpu")
        step = function(lambda x: (model(x) - x).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            step(tensor(8, 6, seed=number)).backward()
            optimizer.step()
        return list(model.state_dict().values())

    same("state", trained(compiled), trained(lambda step: step))
    assert counted()[0] >= 2, "forward and backward"


@on_device
def test_programs_let_go_of_what_no_later_one_needs() -> None:
    """30 tensors of 16 MiB on a device of 256 MiB cross from program to program, few of them at once."""
    cut_at(3)

    def body(x: torch.Tensor) -> torch.Tensor:
        for number in range(30):
            x = (x + number).sin()
        return x.sum()

    x = tensor(1, 1 << 22)
    before = torch.tpu.memory_allocated()
    with torch.no_grad():
        same("sum", compiled(body)(x), body(x))
    assert counted()[0] == 1 and torch.tpu.memory_allocated() <= before + (1 << 20)


@on_device
def test_it_is_said_once() -> None:
    cut_at(4)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for factor in (2.0, 3.0):

            def body(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
                for _ in range(5):
                    x = (x * factor).sin()
                return x

            same("result", compiled(body)(tensor(3)), body(tensor(3)))
    assert counted()[0] == 2
    wanted = "tpurun: a compiled graph of 10 operations runs as 3 programs, one after the other, because"
    assert [line for line in said.getvalue().splitlines() if "programs" in line] == [
        f"{wanted} a program has 4 operations at most"
    ]
