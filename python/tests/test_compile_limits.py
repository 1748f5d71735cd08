"""Where compiled functions end: errors, memory, modes, what is too large."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiling import BACKEND, IS_OURS, compiled, graphs, on_device, same, tensor

ours_only = pytest.mark.skipif(not IS_OURS, reason=f"{BACKEND} is not the compiler of the device")


def line_of(function: Callable[..., Any], text: str) -> str:
    """The place of a line of a function, as errors name it."""
    lines, first = inspect.getsourcelines(function)
    number = next(number for number, line in enumerate(lines, first) if text in line)
    return f"{inspect.getsourcefile(function).rpartition('/')[2]}:{number}"


def error_of(function: Callable[..., Any], *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("expected an exception, got none")


@on_device
def test_an_exception_of_the_function_comes_out() -> None:
    def body(x: torch.Tensor, fails: bool) -> torch.Tensor:
        y = x * 2
        if fails:
            raise KeyError("on purpose")
        return y.sin()

    function = compiled(body)
    x = tensor(3)
    same("before", function(x, False), body(x, False))
    error = error_of(function, x, True)
    assert isinstance(error, KeyError) and "on purpose" in str(error)
    same("afterwards", function(x, False), body(x, False))


@on_device
def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    error = error_of(compiled(lambda x, y: x.sin() @ y), tensor(3, 4), tensor(3, 4))
    assert isinstance(error, RuntimeError), repr(error)
    assert "size" in str(error) or "shape" in str(error), error


def out_of_range(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = y.index_select(0, index)  # the faulty one
    return z * 2


@on_device
def test_an_operation_that_fails_while_it_runs() -> None:
    function = compiled(out_of_range)
    index = torch.tensor([0, 9], device="tpu")
    error = error_of(function, tensor(3), index)
    assert isinstance(error, IndexError) or "out of range" in str(error), repr(error)
    good = torch.tensor([0, 1], device="tpu")
    same("afterwards", function(tensor(3), good), out_of_range(tensor(3), good))


@ours_only
@on_device
def test_an_operation_that_fails_names_its_line() -> None:
    error = error_of(compiled(out_of_range), tensor(3), torch.tensor([0, 9], device="tpu"))
    assert line_of(out_of_range, "# the faulty one") in str(error), error


def greedy(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = y.expand(512, -1).cumsum(0)  # 512 MiB
    return z.sum(0) + x


@on_device
def test_memory_ends_within_a_program() -> None:
    function = compiled(greedy)
    x = tensor(1, 1 << 18)
    before = torch.tpu.memory_allocated()
    error = error_of(function, x)
    assert isinstance(error, torch.OutOfMemoryError), repr(error)
    del error
    assert torch.tpu.memory_allocated() == before, "memory is kept"
    same("afterwards", compiled(lambda y: y + 1)(x), x + 1)


@ours_only
@on_device
def test_memory_that_ends_names_the_line() -> None:
    error = error_of(compiled(greedy), tensor(1, 1 << 18))
    assert line_of(greedy, "# 512 MiB") in str(error), error


def greedy_result(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return y.expand(512, -1).cumsum(0)  # 512 MiB


@ours_only
@on_device
def test_memory_for_a_result_names_the_line() -> None:
    error = error_of(compiled(greedy_result), tensor(1, 1 << 18))
    assert isinstance(error, torch.OutOfMemoryError), repr(error)
    assert line_of(greedy_result, "# 512 MiB") in str(error), error


@on_device
def test_programs_free_what_nobody_uses_any_more() -> None:
    """The program makes 30 tensors of 16 MiB on a device of 256 MiB, where few are alive at once."""

    def body(x: torch.Tensor) -> torch.Tensor:
        for number in range(30):
            x = (x + number).sin()
        return x.sum()

    x = tensor(1, 1 << 22)
    with torch.no_grad():
        same("sum", compiled(body)(x), body(x))


@on_device
def test_no_memory_is_kept_from_call_to_call() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).cos().sum()

    function = compiled(body)
    x = tensor(64, 64, gradient=True)

    def step() -> None:
        function(x).backward()
        x.grad = None

    step()
    before = torch.tpu.memory_allocated()
    for _ in range(20):
        step()
    assert torch.tpu.memory_allocated() == before


def counted() -> int:
    """The bytes that are held now, from which the peak is counted."""
    torch.tpu.reset_peak_memory_stats()
    return torch.tpu.memory_allocated()


@ours_only
@on_device
def test_arguments_are_let_go_of_in_the_middle_of_a_run() -> None:
    """Also those of a backward pass with an argument that needs no gradient, so that one result is None."""
    layers = 8
    weights = [tensor(64, 64, seed=at, gradient=True) for at in range(layers)]

    def body(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = (x @ weight).sin()
        return x.sum()

    function = compiled(body)
    x = tensor(4096, 64)
    of_one = x.nbytes
    function(x, *weights).backward()
    loss = function(x, *weights)
    before = counted()
    loss.backward()
    # Gradients of one layer come before what was saved for it goes, and no more than that.
    assert torch.tpu.max_memory_allocated() < before + 4 * of_one
    assert before > layers * of_one


@ours_only
@on_device
def test_a_loss_holds_no_more_memory_than_a_number_needs() -> None:
    def body(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(x, wanted)

    x = tensor(512, 1024)
    before = torch.tpu.memory_allocated()
    loss = compiled(body)(x, x)
    assert loss.item() == 0
    assert torch.tpu.memory_allocated() < before + 4096


@ours_only
@on_device
def test_a_cross_entropy_holds_its_scores_once_and_their_gradient_once() -> None:
    def body(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x * 2, chosen)

    function = compiled(body)
    x, chosen = tensor(512, 1024, gradient=True), torch.arange(512).to("tpu")
    function(x, chosen).backward()
    x.grad = None
    before = counted()
    loss = function(x, chosen)
    assert torch.tpu.max_memory_allocated() < before + 1.1 * x.nbytes
    before = counted()
    loss.backward()
    assert torch.tpu.max_memory_allocated() < before + 1.1 * x.nbytes


@ours_only
@pytest.mark.parametrize("mode", ["DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING"])
@on_device
def test_a_mode_is_not_changed_within_a_program(mode: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        with torch.tpu.set_eager_mode(mode):
            y = y * 2
        return y

    same("operation by operation", compiled(body)(tensor(3)), body(tensor(3)))
    error = error_of(compiled(body, fullgraph=True), tensor(3))
    assert "fullgraph" in str(error), repr(error)


@on_device
def test_a_mode_around_a_program_changes_nothing() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    x = tensor(3)
    function = compiled(body)
    same("in the usual mode", function(x), body(x))
    with torch.tpu.set_eager_mode("DEFER_NEVER_AND_LAUNCH_BLOCKING"):
        same("in Debug", function(x), body(x))
    assert graphs() == 1


@pytest.mark.full
@on_device
def test_a_graph_of_thousands_of_operations() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        for number in range(3000):
            x = x * 1.0001 + number
        return x

    x = tensor(4)
    began = time.process_time()
    found = compiled(body)(x)
    took = time.process_time() - began
    same("result", found, body(x))
    assert took < 120, f"{took:.0f} s"


@on_device
def test_too_many_kinds_of_calls_end_in_eager() -> None:
    """Behind torch's limit of compilations the results are still right."""

    def body(x: torch.Tensor, how: str) -> torch.Tensor:
        return getattr(x, how)() * 2

    function = compiled(body)
    x = tensor(3).abs()
    names = ["sin", "cos", "tan", "exp", "log", "sqrt", "abs", "neg", "relu", "tanh", "sigmoid", "square"]
    for how in names:
        same(how, function(x, how), body(x, how))
    assert graphs() <= 9


@ours_only
@on_device
def test_an_unknown_option_is_refused() -> None:
    error = error_of(compiled(torch.sin, options={"no such": 1}), tensor(3))
    assert "no such" in str(error), error


@on_device
def test_gradients_of_gradients_are_refused_or_right() -> None:
    def twice(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = tensor(3, gradient=True)
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    wanted = twice(lambda x: x.sin() * x)
    try:
        found = twice(compiled(lambda x: x.sin() * x))
    except RuntimeError as error:
        assert "double backward" in str(error)
    else:
        same("gradient", found, wanted)
