"""Debug says where numbers of a program stop being finite, what grew, and which ranks differ."""

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks

DEBUG = "DEFER_NEVER_AND_LAUNCH_BLOCKING"
INF, NAN = float("inf"), float("nan")


def warnings_of(body: Callable[[], Any], mode: str = DEBUG, **environment: str) -> list[str]:
    """Runs the body in a process of its own, and returns what Debug warns of meanwhile."""

    def forked(_rank: int) -> list[str]:
        os.environ.update(environment)
        torch.set_warn_always(True)
        torch.tpu.eager_mode = mode
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            body()
        return [str(one.message) for one in caught if "tpurun" in str(one.message)]

    return ranks.fork(1, forked)[0]


def tpu(*numbers: float, **options: Any) -> torch.Tensor:
    return torch.tensor(numbers, device="tpu", dtype=torch.float32, **options)


def half(size: int) -> torch.Tensor:
    return torch.full((size,), 300.0, device="tpu", dtype=torch.float16)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            lambda: tpu(0, 1, -1).log(),
            "aten::log made 1 NaN and 1 Inf among the 3 elements of its result",
        ),
        (lambda: tpu(0, 1).div_(tpu(0, 1)), "aten::div_.Tensor made 1 NaN and 0 Inf"),
        (lambda: half(3) * half(3), "aten::mul.Tensor made 0 NaN and 3 Inf"),
        (lambda: half(40).bfloat16().float().double().mul(1e308).mul(1e308), "made 0 NaN and 40 Inf"),
        (lambda: torch.sqrt(tpu(-1, 4)[::2]), "aten::sqrt made 1 NaN"),
        (lambda: torch.polygamma(1, tpu(0, 2)), "aten::polygamma made 0 NaN and 1 Inf"),
        (
            lambda: torch.tensor([1.0, NAN]).to("tpu"),
            "a tensor of shape [2] that has NaN was copied",
        ),
    ],
    ids=["log", "division in place", "half", "double", "view", "boxed", "copy"],
)
def test_debug_names_what_made_nan(body: Callable[[], Any], said: str) -> None:
    (message,) = warnings_of(body)
    assert said in message


def test_debug_names_the_gradient_that_made_nan() -> None:
    def body() -> None:
        x = tpu(0.0, 4.0, requires_grad=True)
        x.sqrt().sum().backward()

    (message,) = warnings_of(body)
    assert "in SqrtBackward0 made 0 NaN and 1 Inf" in message


def masked_attention() -> None:
    mask = torch.full((4, 4), -INF).triu(1).to("tpu")
    scores = torch.ones(4, 4, device="tpu") + mask
    scores.masked_fill(mask == -INF, -INF).softmax(-1)
    torch.full((3,), -INF, device="tpu").clamp(min=0)
    torch.ones(3, device="tpu").mul(INF).add(1).log()


def uninitialised() -> None:
    dirty = torch.full((1000,), NAN, device="tpu")
    del dirty
    for _ in range(3):
        kept = torch.empty(1000, device="tpu")
        kept.resize_(500)
        torch.empty_like(kept).view(5, 100).t()


def later_uses() -> None:
    x = tpu(1.0, NAN)
    with warnings.catch_warnings():
        (x * 2).sum().sqrt()
        torch.cat([x, x]).cumsum(0)
        x.add_(1)


@pytest.mark.parametrize("body", [masked_attention, uninitialised])
def test_debug_knows_what_is_meant(body: Callable[[], Any]) -> None:
    assert warnings_of(body) == []


def test_debug_names_an_origin_once() -> None:
    (message,) = warnings_of(later_uses)
    assert "was copied from the CPU" in message


def test_debug_names_what_was_spread() -> None:
    def spread() -> None:
        target, given = torch.rand(2048, 1, device="tpu"), torch.rand(2048, device="tpu")
        (given - target).square().mean()
        target @ target.t()

    (message,) = warnings_of(spread)
    assert "aten::sub.Tensor spread its inputs to shape [2048, 2048], 16 MiB and 2048 times" in message


def test_the_environment_says_when_results_are_looked_at() -> None:
    def body() -> None:
        tpu(0).log()

    assert warnings_of(body, "DEFER_NEVER") == []
    assert len(warnings_of(body, "DEFER_NEVER", TORCH_TPU_ENABLE_DEBUG_CHECKS="1")) == 1
    assert warnings_of(body, TORCH_TPU_ENABLE_DEBUG_CHECKS="0") == []


@pytest.mark.parametrize("mode", ["DEFER_NEVER", DEBUG])
def test_indices_out_of_bounds_are_errors(mode: str) -> None:
    def forked(_rank: int) -> None:
        torch.tpu.eager_mode = mode
        table, wrong = torch.rand(4, 4, device="tpu"), torch.tensor([1, 4], device="tpu")
        for use in (
            lambda: table[wrong],
            lambda: table.take(wrong * 4),
            lambda: table.index_select(0, wrong),
            lambda: table.gather(0, wrong.view(1, 2)),
            lambda: table.scatter(0, wrong.view(1, 2), 1.0),
            lambda: table.index_add(0, wrong, table[:2]),
            lambda: nn.functional.embedding(wrong, table),
            lambda: nn.functional.nll_loss(table[:2], wrong),
            lambda: torch.bincount(-wrong),
            lambda: torch.multinomial(-table, 1),
        ):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)|negative|< 0"):
                use()

    ranks.fork(1, forked)


def seeded(test: Callable[[int], Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def body(*arguments: Any) -> Any:
        torch.manual_seed(0)
        return test(dist.get_rank(), *arguments)

    return body


def on_ranks(size: int, test: Callable[..., Any], *arguments: Any) -> list[Any]:
    def prepare() -> None:
        torch.tpu.eager_mode = DEBUG

    return ranks.run(size, test, *arguments, prepare=prepare)


def error_of(body: Callable[[], Any]) -> tuple[str, tuple[int, ...]]:
    from tpurun.errors import CollectiveMismatchError

    with pytest.raises(CollectiveMismatchError) as caught:
        body()
    return str(caught.value), caught.value.ranks


@seeded
def diverging_ddp(rank: int, who: int) -> tuple[str, tuple[int, ...]]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("tpu")
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank), device="tpu")).sum().backward()
        optimizer.step()

    step()
    step()
    if rank == who:
        with torch.no_grad():
            net[1].weight[0, 0] += 1
    with model.no_sync():
        model(torch.ones(2, 4, device="tpu")).sum().backward()
    return error_of(step)


def test_ddp_replicas_that_differ_are_named_before_the_next_step() -> None:
    for text, guilty in on_ranks(3, diverging_ddp, 1):
        assert guilty == (1,)
        assert "different parameters: '1.weight', float32[4, 4] checksum" in text
        assert "on ranks 0,2; " in text and text.endswith("on rank 1")


@seeded
def dtensors(rank: int, what: str) -> tuple[str, tuple[int, ...]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("tpu", (3,))

    def spread(value: float, placement: Any) -> DTensor:
        local = torch.full((3, 3), float(value), device="tpu")
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    torch.tpu.check_replicas({"w": spread(1, Replicate()), "v": spread(rank, Shard(0))})
    if what == "spec":
        return error_of(lambda: torch.tpu.check_replicas({"w": spread(1, Shard(int(rank == 2)))}))
    weight = nn.Parameter(spread(1, Replicate()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = spread(float(rank == 0), Replicate())
    return error_of(optimizer.step)


def test_dtensors_with_different_specs_are_named() -> None:
    for text, guilty in on_ranks(3, dtensors, "spec"):
        assert guilty == (2,)
        assert "different DTensor specs: 'w', float32[9, 3] (S(0)) on mesh [3] on ranks 0-1; " in text
        assert text.endswith("float32[3, 9] (S(1)) on mesh [3] on rank 2")


def test_replicated_dtensors_that_differ_are_named_after_the_step() -> None:
    for text, guilty in on_ranks(3, dtensors, "bits"):
        assert guilty == (0,)
        assert "different parameters: 'parameter 0', float32[3, 3] checksum" in text


@seeded
def other_tensors(rank: int) -> list[str]:
    same = {"a": torch.ones(2), "b": torch.arange(3, device="tpu")}
    torch.tpu.check_replicas(same)
    few = dict([*same.items()][: 2 - (rank == 1)])
    torch.rand(rank)
    return [
        error_of(lambda: torch.tpu.check_replicas(few))[0],
        error_of(lambda: torch.tpu.check_replicas({"a": torch.ones(2 + (rank == 1))}))[0],
        error_of(lambda: torch.tpu.check_replicas(same, rng=True))[0],
    ]


def test_check_replicas_names_what_differs() -> None:
    for number, shape, generators in on_ranks(2, other_tensors):
        assert "other tensors: how many 2 (names " in number and "1 (names " in number
        assert "'a', float32[2] checksum" in shape and "float32[3] checksum" in shape
        assert "different generators: 'of the CPU'" in generators
