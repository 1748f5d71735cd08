"""Compiled functions on device tpu: sizes, scalars, views, writes, random numbers, modes."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import ranks
from compiling import BACKEND, DEVICE, IS_OURS, check, compiled, drawn, graphs, on_device, run, same, tensor

ours_only = pytest.mark.skipif(not IS_OURS, reason=f"{BACKEND} is not the compiler of the device")


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + y.sigmoid()).tanh().sum(-1, keepdim=True) / (x.exp() + 1)


def pair(rows: int = 4, columns: int = 6, gradient: bool = True) -> Callable[[], list[torch.Tensor]]:
    return lambda: [tensor(rows, columns, seed=1, gradient=gradient), tensor(rows, columns, seed=2)]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@on_device
def test_every_mode_computes_the_same(mode: str) -> None:
    check(chain, pair(), mode=mode, fullgraph=True)


@pytest.mark.parametrize("dynamic", [None, False, True])
@on_device
def test_sizes_may_change(dynamic: bool | None) -> None:
    check(chain, pair(), pair(5), pair(5, 2), pair(1, 1), pair(0, 3), dynamic=dynamic)


@ours_only
@on_device
def test_tensors_of_the_device_choose_their_compiler() -> None:
    function = torch.compile(chain)
    x, y = pair(gradient=False)()
    same("result", function(x, y), chain(x, y))


@ours_only
@on_device
def test_the_backend_is_in_torchs_list() -> None:
    assert BACKEND in torch.compiler.list_backends()


@on_device
def test_one_program_serves_several_sizes() -> None:
    function = compiled(chain, dynamic=True)
    for rows in (2, 3, 5, 8, 13, 40):
        x, y = pair(rows, gradient=False)()
        same(f"{rows} rows", function(x, y), chain(x, y))
    assert graphs() == 1, "each size was compiled for itself"


@on_device
def test_sizes_are_numbers_in_the_program() -> None:
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        rows, columns = x.shape
        steps = torch.arange(rows, device=x.device)
        blocks = x.view(rows // 2, 2, columns).permute(1, 0, 2)
        return [x * rows, steps + columns, blocks.reshape(-1, rows // 2), x.new_full((columns,), rows * 0.5)]

    check(body, *[lambda rows=rows: [tensor(rows, 3)] for rows in (2, 4, 6, 10)], dynamic=True)


@on_device
def test_branches_on_sizes_and_scalars() -> None:
    def body(x: torch.Tensor, how: float, times: int) -> torch.Tensor:
        x = x * how if x.shape[0] > 3 else x - how
        for _ in range(times):
            x = x.sin() + times
        return x

    calls = [(2, 0.5, 1), (5, 0.5, 1), (5, 1.5, 1), (5, 1.5, 3), (2, -3.0, 0), (5, 2.5, 2)]
    check(body, *[lambda rows=rows, how=how, n=n: [tensor(rows), how, n] for rows, how, n in calls])


@on_device
def test_scalars_that_change_do_not_compile_again_and_again() -> None:
    def body(x: torch.Tensor, scale: float, shift: int) -> torch.Tensor:
        return x * scale + shift

    function = compiled(body)
    for number in range(12):
        x, scale, shift = tensor(3, seed=number), 0.1 * number + 0.05, number * 7 + 3
        same(f"{scale} {shift}", function(x, scale, shift), body(x, scale, shift))
    assert graphs() <= 4, f"{graphs()} graphs for 12 pairs of scalars"


@on_device
def test_scalars_of_the_host_as_tensors() -> None:
    def body(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale + scale.square()

    calls = [lambda value=value: [tensor(3), torch.tensor(value)] for value in (0.5, 2.0, -1.0)]
    check(body, *calls)
    # A number of f64 leaves the tensor's dtype as it is.
    check(body, lambda: [tensor(3, dtype=torch.bfloat16), torch.tensor(0.3, dtype=torch.float64)])


@on_device
def test_arguments_are_written_to() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2).add_(y)
        y[0] = x[1]
        x[:, ::2].zero_()
        return x.sum()

    check(body, pair(gradient=False), pair(gradient=False))


@on_device
def test_arguments_that_share_memory_are_written_to() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.mul_(3)
        return x + y

    def parts() -> list[torch.Tensor]:
        base = tensor(8, 4)
        return [base[:4], base[4:]]

    def rows() -> list[torch.Tensor]:
        base = tensor(3, 4)
        return [base, base[1]]

    check(body, parts, rows, parts)


@on_device
def test_results_are_views_of_arguments() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t(), x[1:], x.view(-1), x

    x = tensor(3, 4)
    turned, rest, flat, itself = compiled(body)(x)
    assert itself is x
    assert {one.untyped_storage().data_ptr() for one in (turned, rest, flat)} == {
        x.untyped_storage().data_ptr()
    }
    assert turned.stride() == (1, 4) and rest.storage_offset() == 4
    flat.zero_()
    assert not x.any() and not turned.any() and not rest.any()


@on_device
def test_results_that_share_memory_with_each_other() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.t(), y, y[0]

    check(body, lambda: [tensor(3, 4, gradient=True)])
    whole, turned, again, row = compiled(body)(tensor(3, 4))
    whole.fill_(5)
    assert all((one == 5).all() for one in (turned, again, row))


@on_device
def test_writes_to_views_of_results() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        row, corner = y[1], y[:2, :2]
        row.mul_(3)
        corner.t().sub_(1)
        y.view(-1)[::3] = 7
        return y, row, corner.contiguous()

    check(body, lambda: [tensor(4, 5)], lambda: [tensor(4, 5, gradient=True)])


@on_device
def test_strides_of_arguments_may_change() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).view_as(x) * x.contiguous()

    def expanded() -> list[torch.Tensor]:
        return [tensor(1, 4).expand(4, 4)]

    def strided() -> list[torch.Tensor]:
        return [tensor(4, 8)[:, ::2]]

    check(body, lambda: [tensor(4, 4)], lambda: [tensor(4, 4).t()], strided, expanded)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@on_device
def test_dropout_has_the_mask_of_eager(rate: float) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x.sin(), rate)
        return functional.dropout(x * 2, rate).cos()

    check(body, lambda: [tensor(20, 30, gradient=True)], lambda: [tensor(7, 3, gradient=True)])


def draws(x: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.randn_like(x),
        torch.rand(3, 2, device=x.device),
        torch.empty_like(x).bernoulli_(0.3),
        torch.bernoulli(x.sigmoid()),
        torch.randint(0, 9, (5,), device=x.device),
        torch.randperm(11, device=x.device),
        x.clone().uniform_(-1, 1),
        torch.normal(x, 1.0),
        torch.multinomial(x.softmax(-1), 2),
        functional.dropout2d(x[None, :, :, None], 0.5),
        functional.rrelu(x, training=True),
    ]


@on_device
def test_random_numbers_are_those_of_eager() -> None:
    check(draws, lambda: [tensor(4, 5)], lambda: [tensor(4, 5, seed=3)])


@on_device
def test_random_numbers_go_on_behind_a_compiled_function() -> None:
    def mixed(function: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        x = tensor(4, 5)
        return [torch.randn(2, device="tpu"), function(x), torch.randn(2, device="tpu"), drawn()]

    same("draws", mixed(compiled(draws)), mixed(draws))


@on_device
def test_no_grad_and_inference_mode() -> None:
    x, y = pair()()
    function = compiled(chain)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, wanted = function(x, y), chain(x, y)
        assert not found.requires_grad and found.is_inference() == wanted.is_inference()
        same(context.__name__, found, wanted)
    same("with a gradient", function(x, y), chain(x, y))


@on_device
def test_gradients_may_be_off_in_a_part() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        with torch.enable_grad():
            y = x * 2
        return y / scale + x.detach()

    check(body, lambda: [tensor(3, 4, gradient=True)])


@on_device
def test_structures_of_results() -> None:
    def body(x: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
        top = x.topk(2, -1)
        return {"top": tuple(top), "size": x.shape[0], "none": None, "more": [options["y"] + 1, "text"]}

    check(body, lambda: [tensor(3, 5), {"y": tensor(2)}])


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_device
def test_dtypes_and_promotion(dtype: torch.dtype) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        z = x.to(dtype)
        results = [
            z + y,
            y * z,
            z == 1,
            torch.where(z > 0, y, z),
            z.sum(),
            z.float().mean(0),
            torch.cat([z, z]),
        ]
        return [*results, z + 1, z * True, z.to(torch.bfloat16) * 0.1]

    check(body, pair(gradient=False))


@on_device
def test_complex_numbers() -> None:
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        z = torch.view_as_complex(x.view(4, 3, 2))
        return [z.conj() * z, z.abs(), z.real + z.imag, torch.fft.fft(z)]

    check(body, lambda: [tensor(4, 6)])


@on_device
def test_nan_and_infinity_pass() -> None:
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.log(),
            x / 0,
            (x / 0 - x / 0).relu(),
            x.clamp(min=0).sqrt(),
            x.softmax(-1),
            (x * 1e38 * 1e3).sum(),
        ]

    check(body, lambda: [tensor(5, 5)])


@on_device
def test_denormals_are_kept() -> None:
    check(lambda x: x * 1e-30 * 1e-12 + 0, lambda: [tensor(64)])


@on_device
def test_empty_tensors_and_those_without_dimensions() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(), y * 2, x.sum() + y, x.t() @ x, torch.stack([y, y]), x.mean(0)]

    check(body, lambda: [tensor(0, 3), tensor()], lambda: [tensor(2, 3), tensor(seed=2)])


@on_device
def test_copies_between_host_and_device() -> None:
    def body(x: torch.Tensor, host: torch.Tensor) -> list[torch.Tensor]:
        there = host.to(x.device) + x
        return [there, there.cpu() * 2, torch.zeros(3), (x.cpu() + host).to("tpu")]

    check(body, lambda: [tensor(3), torch.arange(3.0)])


@on_device
def test_what_depends_on_numbers_runs_in_eager() -> None:
    def body(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        where = torch.nonzero(y > 0)
        picked = y[y > 0].exp()
        total = y.sum().item()
        scaled = x * total if total > 0 else x - total
        return [where + 1, picked.sum(), scaled, torch.unique(x.detach().sign())]

    check(body, lambda: [tensor(4, 5)], lambda: [tensor(4, 5, seed=4)], lambda: [tensor(6, 2, gradient=True)])


@on_device
def test_scalars_out_of_tensors_within_one_graph() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0)[0] * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        check(body, lambda: [tensor(9)], lambda: [tensor(9, seed=5)], fullgraph=True)
        check(lambda x: x * x.sum().item(), lambda: [tensor(9)], lambda: [tensor(9, seed=5)], fullgraph=True)


@on_device
def test_graphs_around_a_break() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() * 2
        torch._dynamo.graph_break()
        return y.cos() + x

    check(body, lambda: [tensor(4, gradient=True)])
    assert graphs() >= 2


@on_device
def test_a_compiled_module_is_copied() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).to("tpu")
    first = compiled(model)
    x = tensor(4, 6)
    torch.manual_seed(1)
    before = first(x)
    second = copy.deepcopy(first)
    with torch.no_grad():
        next(second.parameters()).zero_()
    torch.manual_seed(1)
    same("the first one, whose copy has changed", first(x), before)
    torch.manual_seed(1)
    other = copy.deepcopy(model)
    other.load_state_dict(
        {key.removeprefix("_orig_mod."): value for key, value in second.state_dict().items()}
    )
    wanted = other(x)
    torch.manual_seed(1)
    same("the copy", second(x), wanted)


@on_device
def test_a_module_is_compiled_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).to("tpu")
    x = tensor(4, 6)
    wanted = model(x)
    model.compile(backend=BACKEND)
    same("result", model(x), wanted)
    assert graphs() == 1


@on_device
def test_training_and_evaluation_of_one_module() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)).to("tpu")
    other = copy.deepcopy(model)
    function = compiled(model)
    for training in (True, False, True):
        model.train(training)
        other.train(training)
        found, wanted = run(function, [tensor(8, 6)]), run(other, [tensor(8, 6)])
        same(f"training {training}", found, wanted)
        same("state", dict(model.state_dict()), dict(other.state_dict()))


@on_device
def test_functions_compiled_within_compiled_functions() -> None:
    inner = compiled(lambda x: x.sin() * 2)

    def body(x: torch.Tensor) -> torch.Tensor:
        return inner(x + 1).cos() + inner(x)

    plain = lambda x: ((x + 1).sin() * 2).cos() + x.sin() * 2  # noqa: E731
    x = tensor(4, gradient=True)
    same("result", compiled(body)(x), plain(x))


@on_device
def test_other_threads_call_it() -> None:
    from threading import Thread

    function = compiled(chain)
    x, y = pair(gradient=False)()
    wanted, found = chain(x, y), []
    threads = [Thread(target=lambda: found.append(function(x, y))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in found:
        same("result", one, wanted)


@on_device
def test_functions_over_batches_and_their_gradients() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row.sin() @ row)(x)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda one: one.sin().square().sum())(x)

    check(body, lambda: [tensor(3, 4)])
    check(gradient, lambda: [tensor(3, 4)])


@on_device
def test_autocast() -> None:
    def body(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("tpu", dtype=torch.bfloat16):
            return functional.linear(x, weight).relu().softmax(-1)

    check(body, lambda: [tensor(4, 4, gradient=True), tensor(4, 4, seed=2, gradient=True)])


@on_device
def test_attention_and_convolution() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(functional.conv2d(x, weight, padding=1), 2)

    check(attention, lambda: [tensor(2, 2, 6, 8, gradient=True), tensor(2, 2, 6, 8, seed=2, gradient=True)])
    check(convolution, lambda: [tensor(2, 3, 8, 8, gradient=True), tensor(4, 3, 3, 3, seed=2, gradient=True)])
    check(
        convolution,
        lambda: [tensor(2, 3, 8, 8).to(memory_format=torch.channels_last), tensor(4, 3, 3, 3, seed=2)],
    )


@on_device
def test_indices_embeddings_and_losses() -> None:
    def body(weight: torch.Tensor) -> list[torch.Tensor]:
        which = torch.tensor([[0, 2, 2], [1, 0, 3]], device="tpu")
        found = functional.embedding(which, weight)
        loss = functional.cross_entropy(found.view(6, -1), torch.tensor([0, 1, 2, 0, 1, 2], device="tpu"))
        spread = torch.zeros_like(weight).index_put((which[0],), weight[:3], accumulate=True)
        summed = torch.zeros_like(weight).scatter_add(0, which.view(-1, 1).expand(-1, 4), found.view(6, 4))
        return [loss, spread, summed, weight.gather(1, which.t()[:, :2]), weight.sort(-1).values]

    check(body, lambda: [tensor(5, 4, gradient=True)])


def test_it_is_claimed_by_each_process() -> None:
    """A process compiles, and one that was forked before does so on its own."""

    def body(rank: int) -> bool:
        os.environ["TPURUN_HBM"] = "64MiB"
        torch.tpu.init()
        x, y = pair(gradient=False)()
        same("result", compiled(chain)(x, y), chain(x, y))
        return True

    assert ranks.fork(2, body) == [True, True]


def check_cross_entropy(rows: int, classes: int, reduction: str, dtype: torch.dtype) -> None:
    def body(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x * 1, chosen, reduction=reduction)

    def arguments() -> list[torch.Tensor]:
        chosen = torch.arange(rows) % classes
        chosen[rows // 2] = -100 if rows > 1 else 0
        return [tensor(rows, classes, gradient=True, dtype=dtype), chosen.to(DEVICE)]

    check(body, arguments, dynamic=False)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@on_device
def test_the_gradient_of_a_cross_entropy(dtype: torch.dtype) -> None:
    for rows, classes in ((1, 3), (4, 2), (5, 17), (7, 16), (64, 33), (3, 1000), (4, 1)):
        for reduction in ("mean", "sum", "none"):
            check_cross_entropy(rows, classes, reduction, dtype)


@on_device
def test_one_value_returned_several_times() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.squeeze(), y.contiguous(), y.view(-1), y

    def whole(*shape: int) -> list[torch.Tensor]:
        """Small numbers, whose sums are exact in every order."""
        return [tensor(*shape).round().requires_grad_()]

    check(body, lambda: whole(3), lambda: whole(1, 3))


@on_device
def test_complex_numbers_in_a_graph() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * complex(2, 1), x + 3j, y * complex(2, 1), y.sin() - 1j

    check(body, lambda: [torch.complex(tensor(3, 4), tensor(3, 4, seed=2)), tensor(3, 4)])
