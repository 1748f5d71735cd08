"""Compiled training on device tpu: gradients, optimizers, checkpoints of activations, control flow, ranks."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ranks
from compiling import BACKEND, IS_OURS, check, compiled, graphs, on_device, same, tensor, trained


class Net(nn.Module):
    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(rate), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.drop(functional.gelu(self.norm(self.first(x)))))


def net(rate: float = 0.3) -> Net:
    torch.manual_seed(2)
    return Net(rate).to("tpu")


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x), x.sin())


Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Compiled code counts steps in tensors, which Adam does in eager only if it is told to be capturable.
OPTIMIZERS: dict[str, Maker] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01, capturable=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, capturable=True),
    "sgd, one by one": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}


def training(optimizer: Maker, *, forward: bool, step: bool, schedule: bool = False) -> dict[str, Any]:
    """Trains with these parts compiled, and returns all that the training leaves."""
    model = net()
    made = optimizer(list(model.parameters()))
    rates = torch.optim.lr_scheduler.ExponentialLR(made, 0.7) if schedule else None
    update = compiled(made.step) if step else made.step

    def whole() -> None:
        update()
        if rates is not None:
            rates.step()

    return trained(model, partial(loss_of, compiled(model) if forward else model), made, update=whole)


@on_device
def test_training_with_dropout_and_batch_norm() -> None:
    plain, ours = (training(OPTIMIZERS["adam"], forward=forward, step=False) for forward in (False, True))
    same("training", ours, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_device
def test_optimizers_step_compiled(name: str) -> None:
    plain, ours = (training(OPTIMIZERS[name], forward=step, step=step) for step in (False, True))
    same("training", ours, plain)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@on_device
def test_learning_rates_that_change(kind: str) -> None:
    def maker(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if kind == "tensor":
            rate = torch.tensor(0.01, device="tpu")
            return torch.optim.Adam(parameters, lr=rate, capturable=True)
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    plain, ours = (training(maker, forward=False, step=step, schedule=True) for step in (False, True))
    same("training", ours, plain)
    assert graphs() <= 4, f"{graphs()} graphs for 4 learning rates"


@on_device
def test_a_whole_step_is_one_function() -> None:
    def history(compile_it: bool) -> list[Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        function = compiled(step) if compile_it else step
        torch.manual_seed(1)
        losses = [function(tensor(8, 6, seed=number)) for number in range(3)]
        return [losses, dict(model.state_dict())]

    same("history", history(True), history(False))


@on_device
def test_gradients_gather_in_parameters() -> None:
    def gathered(function: Callable[[nn.Module], Callable[..., Any]]) -> list[Any]:
        model = net(0.0)
        called = function(model)
        for number in range(3):
            loss_of(called, tensor(8, 6, seed=number)).backward()
        return [one.grad for one in model.parameters()]

    same("gradients", gathered(compiled), gathered(lambda model: model))


@on_device
def test_hooks_and_gradients_of_inner_tensors() -> None:
    def seen(function: Callable[..., torch.Tensor]) -> list[Any]:
        x, found = tensor(4, 6, gradient=True), []
        y = x * 2
        y.register_hook(lambda gradient: found.append(gradient) or gradient * 3)
        function(y).sum().backward()
        return [*found, x.grad]

    same("gradients", seen(compiled(torch.sin)), seen(torch.sin))


@on_device
def test_backward_twice_over_one_graph() -> None:
    def twice(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = tensor(4, 6, gradient=True)
        loss = function(x)
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad

    body = lambda x: functional.dropout(x.sin(), 0.5).square().sum()  # noqa: E731
    torch.manual_seed(4)
    wanted = twice(body)
    torch.manual_seed(4)
    same("gradient", twice(compiled(body)), wanted)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        # Not the derivative, so that a compiler can not find it by itself.
        return gradient * x * 5


@on_device
def test_functions_with_their_own_gradient() -> None:
    check(lambda x: Cube.apply(x.sin()) * 2, lambda: [tensor(4, 5, gradient=True)], fullgraph=True)


def blocks(rate: float, options: dict[str, Any], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def block(y: torch.Tensor) -> torch.Tensor:
        y = (y @ weight).sin()
        return functional.dropout(y, rate).cos() if rate else y.cos()

    for _ in range(2):
        x = checkpoint(block, x, use_reentrant=False, **options)
    return x


def products_are_kept(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "all": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, products_are_kept)},
    "list": {"context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])},
}


# Torch's own tracing saves the state of random generators for the devices alone that it knows.
RATES = (
    0.0,
    pytest.param(0.4, marks=pytest.mark.skipif(not IS_OURS, reason=f"{BACKEND} keeps no such state")),
)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
@on_device
def test_activations_are_computed_again(kind: str, rate: float) -> None:
    def body(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return blocks(rate, CHECKPOINTS[kind], x, weight)

    check(body, lambda: [tensor(4, 5, gradient=True), tensor(5, 5, seed=2, gradient=True)])


@on_device
def test_conditions() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() - 1, (x,))

    check(body, lambda: [tensor(4).abs()], lambda: [-tensor(4).abs()], fullgraph=True)
    check(body, lambda: [tensor(4, gradient=True)], fullgraph=True)


@on_device
def test_loops_while_a_condition_holds() -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def body(number: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return while_loop(lambda n, _: n < 5, lambda n, y: (n + 1, y.sin() + n), (number, x))

    def plain(number: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        while number < 5:
            number, x = number + 1, x.sin() + number
        return number, x

    for start in (0, 3, 7):
        given = torch.tensor(start, device="tpu"), tensor(4)
        same(f"from {start}", tuple(compiled(body, fullgraph=True)(*given)), plain(*given))


@on_device
def test_scans() -> None:
    from torch._higher_order_ops.scan import scan

    def step(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fresh = (carry * x).tanh() + x
        return fresh, fresh * 2

    def body(first: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scan(step, first, xs)

    first, xs = tensor(5), tensor(7, 5, seed=2)
    carry, rows = first, []
    for x in xs:
        carry, row = step(carry, x)
        rows.append(row)
    found = compiled(body, fullgraph=True)(first, xs)
    same("scan", tuple(found), (carry, torch.stack(rows)))


def define_operations() -> None:
    """Operations of a user, with Python kernels; once in each process that has the device."""

    @torch.library.custom_op("tpurun_test::halves", mutates_args=())
    def halves(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.sin() * scale / 2

    @halves.register_fake
    def _(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    def gradient(context: Any, given: torch.Tensor) -> tuple[torch.Tensor, None]:
        return given * context.saved_tensors[0].cos() * context.scale / 2, None

    halves.register_autograd(gradient, setup_context=keep)

    @torch.library.custom_op("tpurun_test::fill", mutates_args=("x",))
    def fill(x: torch.Tensor, value: float) -> None:
        x.fill_(value)


@on_device
def test_operations_of_a_user() -> None:
    define_operations()

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.tpurun_test.halves(x + 1, 3.0) * 2

    def writing(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch.ops.tpurun_test.fill(y[0], 5.0)
        torch.ops.tpurun_test.fill(x, 3.0)
        return y + x

    check(body, lambda: [tensor(4, gradient=True)], fullgraph=True)
    check(writing, lambda: [tensor(4, 2)], fullgraph=True)


# --- ranks ------------------------------------------------------------------------------------------------

RANKS = 2


def of_all(body: Callable[[], None]) -> Callable[[], None]:
    """Runs a test on two ranks, each with a device."""

    def test() -> None:
        import os

        def prepare() -> None:
            os.environ.update(TPURUN_HBM="256MiB", LOCAL_WORLD_SIZE=str(RANKS))
            torch.tpu.init()

        def ranked() -> bool:
            body()
            return True

        assert ranks.run(RANKS, ranked, prepare=prepare, backend="tpu:tpu_dist") == [True] * RANKS

    test.__name__ = body.__name__
    return test


WIDTH = 6
# The weight of one of three such layers fills the first bucket of DDP.
WIDE = 600


class Block(nn.Module):
    """Dynamo begins to trace in a user's own `forward`, not in one of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(x).tanh())


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_ranks(wrap: Callable[[nn.Module], Callable[..., Any]], width: int = WIDTH) -> dict[str, Any]:
    """Trains a wrapped model on all ranks, and returns what the training leaves."""
    torch.manual_seed(2)
    model = Stack(width).to("tpu")
    called = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5 + dist.get_rank())
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = loss_of(called, tensor(8, width, seed=number * RANKS + dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = {name: whole(one.detach()) for name, one in model.named_parameters()}
    return {"losses": losses, "parameters": parameters}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@of_all
def test_ddp_splits_graphs_at_its_buckets() -> None:
    def small_buckets(model: nn.Module) -> DDP:
        return DDP(model, bucket_cap_mb=1)

    parts = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        parts.append(graph)
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

    plain = of_ranks(small_buckets, WIDE)
    ours = of_ranks(lambda model: compiled(small_buckets(model), backend=counting), WIDE)
    assert len(parts) >= 2, "the graph was not split"
    same("training", ours, plain)


@of_all
def test_ddp_around_a_compiled_module() -> None:
    plain = of_ranks(DDP)
    ours = of_ranks(lambda model: DDP(compiled(model)))
    assert graphs() > 0, "nothing was compiled"
    same("training", ours, plain)


def sharded(model: Stack, each: Callable[[nn.Module], None] = lambda block: None) -> nn.Module:
    for block in model.blocks:
        each(block)
        fully_shard(block)
    return fully_shard(model)


@of_all
def test_fsdp2_around_compiled_blocks_and_within_a_compiled_model() -> None:
    plain = of_ranks(sharded)
    blocks = of_ranks(lambda model: sharded(model, lambda block: block.compile(backend=BACKEND)))
    same("compiled blocks", blocks, plain)
    before = graphs()
    assert before > 0, "nothing was compiled"
    torch._dynamo.reset()
    together = of_ranks(lambda model: compiled(sharded(model)))
    same("compiled as a whole", together, plain)
    assert graphs() > before, "nothing was compiled"


@of_all
def test_dtensors_in_graphs_and_around_them() -> None:
    mesh = init_device_mesh("tpu", (RANKS,))
    weight, x = tensor(6, 6, seed=3), tensor(4, 6)

    def inside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ours = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return (ours @ DTensor.from_local(weight, mesh, [Shard(1)], run_check=False)).sin().full_tensor()

    part = weight.chunk(RANKS, 1)[dist.get_rank()].contiguous()
    same("within", compiled(inside)(x, part), inside(x, part))

    def around(x: DTensor, weight: DTensor) -> DTensor:
        return (x @ weight).relu().redistribute(mesh, [Replicate()]) * 2

    def given() -> tuple[DTensor, DTensor]:
        leaf = distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
        return distribute_tensor(x, mesh, [Replicate()]), leaf

    results = []
    for function in (around, compiled(around)):
        arguments = given()
        found = function(*arguments)
        found.sum().backward()
        results.append([found.to_local().detach(), arguments[1].grad.to_local()])
    same("around", results[1], results[0])


@of_all
def test_collectives_are_part_of_a_graph() -> None:
    group = dist.group.WORLD

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        total = funcol.all_reduce(x * 2, "sum", group)
        every = funcol.all_gather_tensor(total.sin() + x, 0, group)
        share = funcol.reduce_scatter_tensor(every.cos(), "avg", 0, group)
        turned = funcol.all_to_all_single(share + 1, None, None, group)
        last = turned * 3
        dist.all_reduce(last, dist.ReduceOp.MAX)
        return [total + 1, every, share, funcol.broadcast(turned, 0, group) - 1, last]

    def settled(function: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        x = tensor(4, 6, seed=dist.get_rank())
        return [funcol.wait_tensor(one) for one in function(x)]

    same("results", settled(compiled(body, fullgraph=True)), settled(body))


@of_all
def test_gradients_through_collectives() -> None:
    import torch.distributed.nn.functional as with_gradients

    def body(x: torch.Tensor) -> torch.Tensor:
        total = funcol.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
        return funcol.reduce_scatter_tensor_autograd(total * 2, "sum", 0, dist.group.WORLD)

    assert with_gradients is not None
    gradients = []
    for function in (body, compiled(body)):
        x = tensor(4, 6, seed=dist.get_rank(), gradient=True)
        found = funcol.wait_tensor(function(x))
        found.square().sum().backward()
        gradients.append([found.detach(), x.grad])
    same("gradients", gradients[1], gradients[0])


def test_copies_of_models_are_independent() -> None:
    """Guards the oracle of this file: two nets of one seed are the same, and share nothing."""
    torch.manual_seed(2)
    first = Net()
    second = copy.deepcopy(first)
    with torch.no_grad():
        first.last.weight.zero_()
    assert second.last.weight.any()
