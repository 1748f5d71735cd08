"""Blocking collectives go past torch where nobody can tell, and through it where somebody could."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # what its first use would import on every rank
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.profiler import profile

import ranks
from tpurun import _C
from tpurun.backend import _shortcuts

NAMES = sorted(_C.Shortcut.PARAMETERS)
OLDER_NAMES = [name for name in NAMES if not name.endswith("_single") or name == "all_to_all_single"]


@contextmanager
def torch_is_asked(name: str = "all_reduce") -> Iterator[list[Any]]:
    """Collects the arguments with which torch's own function is called meanwhile."""
    function = getattr(dist, name)
    cell = function.__closure__[0]
    shortcut, calls = cell.cell_contents, []

    def ask(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return function.__wrapped__(*args, **kwargs)

    cell.cell_contents = _C.Shortcut(name, ask)
    try:
        yield calls
    finally:
        cell.cell_contents = shortcut


def ones(*size: int, **options: Any) -> torch.Tensor:
    return torch.ones(*(size or (3,)), **options)


def total() -> torch.Tensor:
    return torch.full((3,), float(dist.get_world_size()))


# --- Past torch ---------------------------------------------------------------------------------------------


def functions_stay_what_they_are() -> None:
    for name in OLDER_NAMES:
        function = getattr(dist, name)
        shortcut = function.__closure__[0].cell_contents
        assert type(shortcut) is _C.Shortcut
        assert shortcut.__name__ == function.__name__ == function.__code__.co_qualname == name
        assert inspect.signature(function) == inspect.signature(function.__wrapped__)
        assert tuple(inspect.signature(function).parameters) == _C.Shortcut.PARAMETERS[name]
    before = dist.all_reduce.__closure__[0].cell_contents
    _shortcuts.install(_C.Shortcut)
    assert dist.all_reduce.__closure__[0].cell_contents is before, "what is there already stays"


def results() -> dict[str, Callable[[dist.ProcessGroup | None, list[int]], None]]:
    """Each function in all the ways in which its arguments may be given, and what must come of it."""
    rank = dist.get_rank()

    def same(actual: torch.Tensor, expected: list[float]) -> None:
        assert actual.tolist() == expected

    def all_reduce(group: dist.ProcessGroup | None, members: list[int]) -> None:
        size = len(members)
        for args, keywords in [
            ((dist.ReduceOp.SUM, group, False), {}),
            ((), {"group": group}),
            ((), {"op": dist.ReduceOp.SUM, "group": group, "async_op": False}),
        ]:
            tensor = ones()
            assert dist.all_reduce(tensor, *args, **keywords) is None
            same(tensor, [size] * 3)
        for op, expected in [("MAX", max(members)), ("MIN", min(members)), ("AVG", sum(members) / size)]:
            tensor = torch.tensor([float(rank)])
            dist.all_reduce(tensor=tensor, op=getattr(dist.ReduceOp, op), group=group)
            same(tensor, [expected])

    def broadcast(group: dist.ProcessGroup | None, members: list[int]) -> None:
        for place, root in enumerate(members):
            ways = [{"group_src": place, "group": group}]
            ways += [{"src": root}] if group is None else []
            for keywords in ways:
                tensor = torch.tensor([float(rank)])
                dist.broadcast(tensor, **keywords)
                same(tensor, [root])
        if group is None:
            tensor = torch.tensor([float(rank)])
            dist.broadcast(tensor, members[-1])
            same(tensor, [members[-1]])

    def all_gather_into_tensor(group: dist.ProcessGroup | None, members: list[int]) -> None:
        out = torch.zeros(len(members))
        dist.all_gather_into_tensor(out, torch.tensor([float(rank)]), group=group)
        same(out, members)
        dist.all_gather_into_tensor(out.zero_(), torch.tensor([float(rank)]), group, False)
        same(out, members)

    def reduce_scatter_tensor(group: dist.ProcessGroup | None, members: list[int]) -> None:
        size, place = len(members), members.index(rank)
        for args, keywords in [((dist.ReduceOp.SUM, group), {}), ((), {"group": group})]:
            out = torch.zeros(1)
            dist.reduce_scatter_tensor(out, torch.arange(float(size)), *args, **keywords)
            same(out, [size * place])

    def all_to_all_single(group: dist.ProcessGroup | None, members: list[int]) -> None:
        out, place = torch.zeros(len(members)), members.index(rank)
        dist.all_to_all_single(out, torch.arange(float(len(members))) + 10 * rank, group=group)
        same(out, [10 * member + place for member in members])

    def barrier(group: dist.ProcessGroup | None, members: list[int]) -> None:
        dist.barrier(group)
        dist.barrier(group=group, async_op=False)

    checks = [
        all_gather_into_tensor,
        all_reduce,
        all_to_all_single,
        barrier,
        broadcast,
        reduce_scatter_tensor,
    ]
    assert [check.__name__ for check in checks] == OLDER_NAMES
    return {check.__name__: check for check in checks}


def torch_is_not_asked() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    some = list(range(1, size))
    group = dist.new_group(some)
    for name, check in results().items():
        with torch_is_asked(name) as calls:
            check(None, list(range(size)))
            if rank in some:
                check(group, some)
        assert calls == [], name


def torch_is_not_asked_in_ordinary_contexts() -> None:
    with torch_is_asked() as calls:
        for context in (torch.no_grad(), torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu")):
            with context:
                tensor = ones()
                dist.all_reduce(tensor)
                assert torch.equal(tensor, total())
        transposed = torch.ones(3, 2).t()
        dist.all_reduce(transposed)
        assert torch.equal(transposed, torch.full((2, 3), float(dist.get_world_size())))
    assert calls == []


def mistakes_are_told() -> None:
    out = torch.zeros(1)
    with torch_is_asked("all_gather_into_tensor") as calls:
        error = ranks.failure_of(lambda: dist.all_gather_into_tensor(out, torch.zeros(5)))
    assert isinstance(error, ValueError) and "expected an output tensor of" in str(error)
    assert calls == []
    # Another operation than rank 0: each is named with the line that posted it.
    tensor = ones()
    with torch_is_asked() as calls:
        here = ranks.here(+1)
        error = ranks.failure_of(lambda: dist.all_reduce(tensor, op=[dist.ReduceOp.MAX, dist.ReduceOp.SUM][bool(dist.get_rank())]))  # fmt: skip  # noqa: E501
    assert type(error).__name__ == "CollectiveMismatchError" and here in str(error), str(error)
    assert calls == [] and torch.equal(tensor, ones())


# --- Through torch ------------------------------------------------------------------------------------------


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def torch_is_asked_where_it_matters() -> None:
    def is_asked(call: Callable[[], Any], name: str = "all_reduce") -> None:
        with torch_is_asked(name) as calls:
            call()
        assert calls, f"{name} went past torch"

    size = dist.get_world_size()
    is_asked(lambda: dist.all_reduce(ones(), async_op=True).wait())
    is_asked(lambda: dist.all_reduce(ones(requires_grad=True)))
    is_asked(lambda: dist.all_reduce(ones().as_subclass(Sub)))
    is_asked(lambda: dist.all_reduce(ones(dtype=torch.complex64)))
    is_asked(lambda: dist.all_reduce(ones().to(torch.float8_e4m3fn)))
    is_asked(lambda: dist.all_reduce(torch.eye(2).to_sparse()))
    is_asked(lambda: dist.all_reduce(torch._neg_view(ones())))
    is_asked(lambda: dist.all_reduce(ones(), dist._make_nccl_premul_sum(2.0)))
    gloo = dist.new_group(backend="gloo")
    is_asked(lambda: dist.all_reduce(ones(), group=gloo))
    is_asked(lambda: dist.barrier(gloo), "barrier")
    is_asked(lambda: dist.barrier(timeout=ranks.TIMEOUT), "barrier")
    is_asked(lambda: dist.broadcast(ones(), src=0, group=dist.group.WORLD), "broadcast")
    rows = [1] * size
    is_asked(lambda: dist.all_to_all_single(ones(size), ones(size), rows, rows), "all_to_all_single")
    with Watching():
        is_asked(lambda: dist.all_reduce(ones()))
    with CommDebugMode() as seen:
        is_asked(lambda: dist.all_reduce(ones()))
    assert seen.get_total_counts() == 1
    with profile() as trace:
        is_asked(lambda: dist.all_reduce(ones()))
    assert any("allreduce_" in event.key for event in trace.key_averages())

    with dist._coalescing_manager(device=torch.device("cpu")):
        is_asked(lambda: dist.all_reduce(ones()))
    is_asked(lambda: torch.vmap(lambda row: _reduced(row))(ones(2, 3)))


def _reduced(row: torch.Tensor) -> torch.Tensor:
    """Torch refuses a collective under vmap; whoever calls it must get to torch to learn that."""
    error = ranks.failure_of(lambda: dist.all_reduce(row))
    assert not isinstance(error, AssertionError)
    return row.clone()


def hooks_see_every_call() -> None:
    world, seen = dist.group.WORLD, []
    if not hasattr(world, "register_pre_hook"):
        return  # torch before 2.15
    for register in (world.register_pre_hook, world.register_post_hook):
        register(7, seen.append)
        dist.all_reduce(ones())
        world.unregister_pre_hook(7)
        assert len(seen) == 1
        seen.clear()
    world.unregister_post_hook(7)
    dist.all_reduce(ones())
    assert seen == []


def arguments_that_are_wrong() -> None:
    for call in (
        lambda: dist.all_reduce(),
        lambda: dist.all_reduce(3),
        lambda: dist.all_reduce([ones()]),
        lambda: dist.all_reduce(ones(), unknown=1),
        lambda: dist.all_reduce(ones(), dist.ReduceOp.SUM, None, False, 5),
        lambda: dist.all_reduce(ones(), tensor=ones()),
        lambda: dist.all_reduce(ones(), op=None),
        lambda: dist.all_reduce(ones(), group="world"),
        lambda: dist.broadcast(ones()),
        lambda: dist.broadcast(ones(), src=0, group_src=0),
        lambda: dist.broadcast(ones(), src=dist.get_world_size()),
        lambda: dist.broadcast(ones(), src=-1),
        lambda: dist.broadcast(ones(), src=1 << 70),
    ):
        error = ranks.failure_of(call)
        assert isinstance(error, (TypeError, ValueError, RuntimeError, AttributeError)), repr(error)
    tensor = ones()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total()), "nothing was posted for any of them"


def compiled() -> None:
    def program(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor * 2

    assert torch.equal(torch.compile(program, backend="eager", fullgraph=True)(ones()), total() * 2)

    # A call that torch can not compile breaks the graph, as without shortcuts.
    def broken(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor + dist.get_rank()
        dist.broadcast(tensor, src=0)
        dist.barrier()
        return tensor * 2

    assert torch.equal(torch.compile(broken, backend="eager")(ones()), ones() * 2)


def after_the_end() -> None:
    dist.destroy_process_group()
    error = ranks.failure_of(lambda: dist.all_reduce(ones()))
    assert "process group" in str(error)


BODIES = [
    after_the_end,
    arguments_that_are_wrong,
    compiled,
    functions_stay_what_they_are,
    hooks_see_every_call,
    mistakes_are_told,
    torch_is_asked_where_it_matters,
    torch_is_not_asked,
    torch_is_not_asked_in_ordinary_contexts,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_shortcuts(body: Callable[[], None]) -> None:
    ranks.run(3, body)


def test_functions_of_another_shape_are_left_alone() -> None:
    def plain(tensor, op, group, async_op):
        pass

    def decorated(tensor, op, group, async_op, more):
        pass

    decorated.__wrapped__ = plain
    assert _shortcuts._inside(None, ()) is None
    assert _shortcuts._inside(plain, _C.Shortcut.PARAMETERS["all_reduce"]) is None
    assert _shortcuts._inside(decorated, _C.Shortcut.PARAMETERS["all_reduce"]) is None
    with pytest.raises(ValueError, match="expected a name of PARAMETERS, got nothing"):
        _C.Shortcut("nothing", plain)


def test_a_torch_with_another_world_is_left_alone(monkeypatch) -> None:
    from torch.distributed import distributed_c10d

    before = dist.all_reduce.__closure__[0].cell_contents
    monkeypatch.setattr(distributed_c10d, "_world", object())
    _shortcuts.install(_C.Shortcut)
    assert dist.all_reduce.__closure__[0].cell_contents is before
