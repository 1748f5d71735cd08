"""The mode that fuses computes what Strict does, whenever somebody looks; what is gone holds no memory."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import ranks
from tpurun import _C as native

FUSED = "DEFER_AND_FUSE"
MIB = 1 << 20


on_device = ranks.on_device("64MiB")


def fused() -> Any:
    return torch.tpu.set_eager_mode(FUSED)


def tpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to("tpu")


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """NaN is NaN: which one ATen makes of 16-bit types depends on where in a tensor it is."""
    cpu = tensor.detach().cpu().contiguous()
    if cpu.is_floating_point():
        cpu = cpu.masked_fill(cpu.isnan(), float("nan"))
    return tensor.dtype, tensor.shape, tensor.stride(), bytes(cpu.flatten().view(torch.uint8).tolist())


def both(body: Callable[[], Any]) -> tuple[Any, Any]:
    """The bits of a body's results in Strict, and in Fused."""

    def results() -> list[Any]:
        made = body()
        return [bits(one) if isinstance(one, Tensor) else one for one in made]

    strict = results()
    with fused():
        return strict, results()


UNARY = (
    torch.neg,
    torch.abs,
    torch.tanh,
    torch.sigmoid,
    torch.exp,
    torch.relu,
    functional.gelu,
    functional.silu,
    torch.floor,
    lambda x: x * 0.5,
    lambda x: 1.5 - x,
    lambda x: x.clamp(-1, 2),
    lambda x: x.clone(),
    lambda x: x.to(torch.float64).to(x.dtype),
)
BINARY = (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.lt, torch.atan2)
IN_PLACE = (
    lambda x, y: x.add_(y),
    lambda x, y: x.mul_(y),
    lambda x, _: x.relu_(),
    lambda x, _: x.sub_(0.25),
    lambda x, y: x.copy_(y),
    lambda x, y: x.masked_fill_(y > 0, 2),
)
VIEWS = (
    lambda x: x[1:],
    lambda x: x.t(),
    lambda x: x.reshape(-1)[3:9],
    lambda x: x[:, ::2],
    lambda x: x[0].expand(2, x.shape[1]),
    lambda x: x.flip(0),
)


def chain(seed: int, given: list[Tensor]) -> list[Tensor]:
    """A random program, in which results are used again, change in place, are viewed and are dropped."""
    draw = random.Random(seed)
    tensors = list(given)
    for _ in range(draw.randrange(4, 90)):
        x = draw.choice(tensors)
        y = draw.choice([one for one in tensors if one.shape == x.shape])
        kind = draw.random()
        if kind < 0.35:
            made = draw.choice(UNARY)(x)
        elif kind < 0.6:
            made = draw.choice(BINARY)(x, y).to(x.dtype)
        elif kind < 0.8:
            made = draw.choice(IN_PLACE)(x.clone() if x._is_view() else x, y)
        elif kind < 0.9 and x.dim() == 2 and min(x.shape) > 1:
            made = draw.choice(VIEWS)(x)
        elif kind < 0.93:
            made = x.sum(-1, keepdim=True) + x
        else:
            if len(tensors) > len(given):
                del tensors[draw.randrange(len(given), len(tensors))]
            continue
        tensors.append(made)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_device
def test_random_chains_have_the_bits_and_strides_of_strict(dtype: torch.dtype) -> None:
    for seed in range(60):
        given = [torch.randn(shape).to(dtype) for shape in ((5, 7), (5, 7), (33,), (64, 64))]
        strict, found = both(lambda seed=seed, given=given: chain(seed, [one.to("tpu") for one in given]))
        assert found == strict, f"seed {seed}"


@on_device
def test_operations_wait_until_somebody_looks() -> None:
    x = tpu(8)
    with fused():
        y = x * 2 + 1
        y.add_(x)
        assert native.count_deferred() == 3
        wanted = x.cpu() * 3 + 1
        assert native.count_deferred() == 0  # a copy to the CPU is no pointwise operation
        y.neg_()
        assert y[2].item() == -wanted[2].item()
        y.neg_()
        assert str(y) == str(wanted.to("tpu"))
        y.exp()
        assert native.count_deferred() == 1
    assert native.count_deferred() == 0  # with the mode ends what was recorded in it


@pytest.mark.parametrize(
    "look",
    [
        lambda y: torch.tpu.synchronize(),
        lambda y: y.data_ptr(),
        lambda y: y.untyped_storage().data_ptr(),
        lambda y: y.untyped_storage().resize_(64),
        lambda y: y.sum(),
        lambda y: y.unsqueeze(0).numpy(force=True),
        lambda y: torch.tpu.Event().record(),
        lambda y: torch.tpu.set_stream(torch.tpu.Stream()),
        lambda y: torch.tpu.memory_allocated(),
        lambda y: torch.accelerator.memory_stats(),
        lambda y: torch.tpu.reset_peak_memory_stats(),
    ],
)
@on_device
def test_whoever_looks_finds_the_elements(look: Callable[[Tensor], Any]) -> None:
    with fused():
        y = torch.ones(16, device="tpu") + 1
        assert native.count_deferred() == 2
        look(y)
        assert native.count_deferred() == 0
    assert torch.equal(y.cpu(), torch.full((16,), 2.0))


@on_device
def test_a_view_of_a_result_shares_its_elements() -> None:
    def body() -> list[Tensor]:
        y = torch.ones(4, 6, device="tpu") * 3
        row, flat = y[1], y.view(-1)
        row.add_(1)
        flat[2:5].mul_(2)
        y.sub_(0.5)
        return [y, row, flat, y.t() + 1]

    strict, found = both(body)
    assert found == strict


@on_device
def test_backward_of_a_block_is_in_its_mode() -> None:
    x = torch.randn(64, 64, device="tpu", requires_grad=True)

    def body() -> list[Tensor]:
        x.grad = None
        y = torch.tanh(x * 2 + 0.5)
        (y * y - x).mean().backward()
        return [x.grad * 1]

    strict, found = both(body)
    assert found == strict
    with fused():
        recorded = []
        x.register_hook(lambda grad: recorded.append(native.count_deferred()))
        (x * 2).tanh().backward(torch.ones(64, 64, device="tpu"))
    assert recorded[0] > 0


@on_device
def test_an_error_is_raised_at_its_operation() -> None:
    x, y = tpu(3, 4), tpu(4)
    with fused():
        z = x + y
        for wrong in (lambda: z + tpu(3), lambda: z.add_(tpu(2, 3, 4)), lambda: torch.bitwise_and(z, z)):
            with pytest.raises(RuntimeError):
                wrong()
        with pytest.raises(RuntimeError, match="single memory location"):
            tpu(1).expand(4).mul_(2)
    assert torch.equal(z.cpu(), x.cpu() + y.cpu())


@on_device
def test_counters_say_what_has_run_and_why() -> None:
    x = tpu(8)
    with fused():
        for _ in range(3):
            y = (x * 2 + 1).relu()
            y.sum()
        x.neg().data_ptr()
        x.exp()
        torch.tpu.synchronize()
        x.abs()
    found = {name: count for name, count in torch.tpu.compile.counters().items() if name.startswith("fused_")}
    assert found == {
        "fused_operations": 12,
        "fused_together": 9,
        "fused_stretches": 6,
        "fused_plans": 4,
        "fused_cut_by_operation": 3,
        "fused_cut_by_memory": 1,
        "fused_cut_by_stream": 1,
        "fused_cut_by_mode": 1,
        "fused_cut_by_thread": 0,
        "fused_cut_by_bound": 0,
        "fused_cut_by_fork": 0,
    }


ATEN = torch.ops.aten
REFUSED = (
    lambda: tpu(4).masked_fill_(tpu(4) > 0, tpu(1)),
    lambda: ATEN.leaky_relu_backward(tpu(4), tpu(4), -0.5, True),
    lambda: ATEN.elu_backward(tpu(4), -0.5, 1, 1, True, tpu(4)),
    lambda: ATEN.clamp(tpu(4), None, None),
    lambda: (tpu(4) > 0) - (tpu(4) > 0),
    lambda: ATEN.hardtanh(tpu(4) > 0),
    lambda: torch.where(tpu(4), tpu(4), tpu(4)),
    lambda: tpu(4).int().add_(tpu(4)),
    lambda: torch.add(tpu(4).int(), tpu(4).int(), alpha=1.5),
    lambda: torch.lerp(tpu(4), tpu(4).double(), 0.5),
    lambda: tpu(4).int().pow(-1),
    lambda: torch.div(tpu(4), tpu(4), rounding_mode="up"),
    lambda: ATEN.gelu(tpu(4), approximate="up"),
    lambda: tpu(4).copy_(tpu(3)),
    lambda: (lambda x: x[1:].add_(x[:-1]))(tpu(9)),
    lambda: tpu(4) + torch.ones(4),
)


@pytest.mark.parametrize("wrong", REFUSED)
@on_device
def test_it_refuses_in_the_words_of_strict(wrong: Callable[[], Tensor]) -> None:
    def refused() -> str:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            wrong()
        return str(caught.value)

    strict = refused()
    with fused():
        assert refused() == strict


@on_device
def test_temporaries_that_are_gone_take_no_memory() -> None:
    def chained(x: Tensor) -> Tensor:
        for _ in range(10):
            x = (x * 1.01 + 0.5).relu()
        return x

    x = tpu(MIB)
    with fused():
        chained(x)
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        y = chained(x)
        assert torch.tpu.memory_allocated() == x.nbytes + y.nbytes
    assert torch.tpu.max_memory_allocated() == x.nbytes + y.nbytes


@on_device
def test_running_out_of_memory_names_the_line_and_may_be_survived() -> None:
    x = tpu(6, MIB)
    with fused():
        y = x * 2
        large = x + 1  # the line
        z = large * 3
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.tpu.synchronize()
        assert "test_fused.py" in str(caught.value)
        assert native.count_deferred() == 3
        del large, z
        assert torch.equal(y.cpu(), x.cpu() * 2)


@on_device
def test_numbers_may_change_where_a_stretch_repeats() -> None:
    x = tpu(40, 50)

    def body() -> list[Tensor]:
        made = []
        for step in range(12):
            rate, other = 0.1 * step, 0.1 * (step if step % 3 else 5)
            y = x * rate + other
            made += [
                torch.addcmul(y, x, y, value=rate),
                y.clamp(-other, rate + 1),
                torch.where(y > 1, x, rate),
            ]
        return made

    strict, found = both(body)
    assert found == strict


@on_device
def test_results_go_from_thread_to_thread() -> None:
    x = tpu(100)
    made: list[Tensor] = []

    def other() -> None:
        with fused():
            made.append(made[0] * 3)
            made[0].add_(1)
            recorded.append(native.count_deferred())

    recorded: list[int] = []
    with fused():
        made.append(x + 1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found = [(one * 2).cpu() for one in made]
    assert recorded == [2]  # what the first thread had recorded ran when the second came
    assert torch.equal(found[0], (x.cpu() + 1 + 1) * 2)
    assert torch.equal(found[1], (x.cpu() + 1) * 3 * 2)


@on_device
def test_a_fork_sees_what_was_recorded() -> None:
    with fused():
        y = torch.ones(5, device="tpu") * 7
        (seen,) = ranks.fork(1, lambda _: y.cpu().tolist())
    assert seen == [7.0] * 5


@on_device
def test_bounds_cut_long_stretches() -> None:
    x = tpu(3)
    with fused():
        y = x
        for _ in range(200):
            y = y + 1
        assert 0 < native.count_deferred() <= 64
    assert torch.allclose(y.cpu(), x.cpu() + 200)


@on_device
def test_random_numbers_are_those_of_strict() -> None:
    def body() -> list[Tensor]:
        torch.manual_seed(7)
        x = torch.rand(20, device="tpu") * 2
        return [x, functional.dropout(x + 1, 0.5), torch.bernoulli(x / 4), torch.tpu.get_rng_state()]

    strict, found = both(body)
    assert found == strict


@on_device
def test_the_process_may_be_in_the_mode() -> None:
    torch.tpu.eager_mode = FUSED
    y = torch.ones(3, device="tpu") + 1
    with torch.tpu.set_eager_mode("DEFER_NEVER"):
        assert native.count_deferred() == 0
        z = y + 1
        assert native.count_deferred() == 0
    assert (torch.tpu.eager_mode, z.tolist()) == (torch.tpu.EagerMode.DEFER_AND_FUSE, [3.0] * 3)


def reduced() -> list[float]:
    with fused():
        x = torch.ones(6, device="tpu") * (dist.get_rank() + 1)
        work = dist.all_reduce(x * 1, async_op=True)
        dist.all_reduce(x)
        x.mul_(2)
        work.wait()
        gathered = [torch.empty(6, device="tpu") for _ in range(2)]
        dist.all_gather(gathered, x + dist.get_rank())
        return [x.sum().item(), *(one[0].item() for one in gathered)]


def test_collectives_take_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TPURUN_HBM": "64MiB", "LOCAL_WORLD_SIZE": "2", "TPURUN_DEVICE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ranks.run(2, reduced, prepare=lambda: torch.tpu.init()) == [[36.0, 6.0, 7.0]] * 2
