"""``torch.tpu.optimizers``: the same bits as ``torch.optim``, and whole steps that are one program."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import ranks

SIZES = (1, 7, 33, 1000, 4099)  # single elements, rests of vectors, whole vectors, and more than one tile
STEPS = 20
ADAMW = [{"lr": 1e-3, "weight_decay": 0.0}, {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-6}]
SGD = [
    {"lr": 1e-2},
    {"lr": 1e-2, "momentum": 0.9},
    {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
]
MUON = [
    {"lr": 1e-2},
    {"lr": 1e-2, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": 1e-2, "ns_steps": 3, "adjust_lr_fn": "spectral_unclamped"},
]


def apart(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own: tests after it could not fork one that has used autograd."""

    @functools.wraps(test)
    def forked(**arguments: Any) -> None:
        ranks.fork(1, lambda _rank: test(**arguments))

    return forked


def expect_the_same_bits(
    ours: Any, make_theirs: Callable[[list[torch.Tensor]], torch.optim.Optimizer], start: list[torch.Tensor]
) -> None:
    """Give both the same gradients, step after step."""
    theirs = [one.clone().requires_grad_() for one in start]
    optimizer = make_theirs(theirs)
    group = ours.init_param_group({str(index): one.clone() for index, one in enumerate(start)})
    for step in range(STEPS):
        for index, param in enumerate(theirs):
            param.grad = torch.randn_like(param)
            if (step + index) % 5 == 4:
                param.grad[0] = 0.0
        optimizer.step()
        assert ours(group, {str(index): one.grad for index, one in enumerate(theirs)}) is group
    for index, param in enumerate(theirs):
        assert torch.equal(group.params[str(index)], param), index


def vectors(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype).to(device) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", ADAMW)
@apart
def test_adamw_is_that_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = torch.tpu.optimizers.AdamW(**options, beta1=0.8, beta2=0.95, use_bfloat16_moments=False)
    theirs = {**options, "betas": (0.8, 0.95), "foreach": False}
    expect_the_same_bits(ours, lambda params: torch.optim.AdamW(params, **theirs), vectors(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", SGD)
@apart
def test_sgd_is_that_of_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = torch.tpu.optimizers.Sgd(**options)
    expect_the_same_bits(
        ours, lambda params: torch.optim.SGD(params, **options, foreach=False), vectors(dtype)
    )


@pytest.mark.parametrize("options", MUON)
@apart
def test_muon_is_that_of_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((4, 4), (64, 16), (16, 50))]
    ours = torch.tpu.optimizers.Muon(**options)
    expect_the_same_bits(ours, lambda params: torch.optim.Muon(params, **options), start)


@apart
def test_on_the_device_they_are_those_of_torch() -> None:
    optimizers, start = torch.tpu.optimizers, vectors(torch.float32, "tpu")
    adamw = optimizers.AdamW(lr=1e-3, weight_decay=0.01, use_bfloat16_moments=False)
    expect_the_same_bits(
        adamw, lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, foreach=False), start
    )
    sgd = optimizers.Sgd(lr=1e-2, momentum=0.9)
    expect_the_same_bits(
        sgd, lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False), start
    )


@apart
def test_moments_of_bfloat16_are_near() -> None:
    start = vectors(torch.float32)[3]
    wide, narrow = (torch.tpu.optimizers.AdamW(use_bfloat16_moments=is_narrow) for is_narrow in (False, True))
    groups = [one.init_param_group({"w": start.clone()}) for one in (wide, narrow)]
    assert groups[1].state["exp_avg"]["w"].dtype == torch.bfloat16
    for _ in range(STEPS):
        grad = torch.randn_like(start)
        for optimizer, group in zip((wide, narrow), groups, strict=True):
            optimizer.step(group, {"w": grad})
    assert groups[1].state["exp_avg_sq"]["w"].dtype == torch.bfloat16
    apart = (groups[0].params["w"] - groups[1].params["w"]).abs().max().item()
    # A moment has 8 bits; no step is longer than about the learning rate.
    assert 0 < apart < STEPS * 1e-3 / 16


@apart
def test_an_update_leaves_alone_what_it_is_given() -> None:
    optimizer = torch.tpu.optimizers.Sgd(lr=0.5, momentum=0.9)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    state = optimizer.init(params)
    new_params, new_state = optimizer.update({"a": torch.ones(2), "b": None}, state, params)
    assert params["a"].tolist() == [1.0, 1.0] and state["step"].item() == 0.0
    assert new_params["a"].tolist() == [0.5, 0.5] and new_state["step"].item() == 1.0
    assert new_params["b"] is params["b"]
    assert new_state["momentum_buffer"]["b"] is state["momentum_buffer"]["b"]


class Net(nn.Module):
    """With buffers, a parameter that has no gradient, one that gets none, and two that are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.fixed = nn.Parameter(torch.ones(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x)))) * self.fixed


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int, rows: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 8), torch.randn(rows, 8)) for _ in range(count)]


def trainer_of(model: nn.Module, **options: Any) -> Any:
    optimizers = torch.tpu.optimizers
    adamw = optimizers.AdamW(lr=0.01, use_bfloat16_moments=False)
    return optimizers.SingleTraceTrainer(model, adamw, **{"backend": "aot_eager", **options})


def eager_losses(
    model: nn.Module, given: list[tuple[torch.Tensor, torch.Tensor]], rates: list[float]
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for (x, wanted), rate in zip(given, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Counting:
    """A backend that counts the programs that it is asked for."""

    def __init__(self) -> None:
        self.programs: list[torch.fx.GraphModule] = []
        self._compile = aot_autograd(fw_compiler=self._keep, keep_inference_input_mutations=True)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.programs.append(graph)
        return graph.forward

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return self._compile(graph, inputs)


@apart
def test_a_trainer_computes_what_eager_steps_do() -> None:
    given, rates = batches(6), [0.01, 0.01, 0.02, 0.02, 0.005, 0.005]
    ours, theirs = net(), net()
    trainer, losses = trainer_of(ours), []
    for (x, wanted), rate in zip(given, rates, strict=True):
        trainer.lr = rate
        loss = trainer.step(x, targets=wanted)
        assert not loss.requires_grad
        losses.append(loss.item())
    assert losses == eager_losses(theirs, given, rates)
    assert trainer.lr == 0.005
    for (name, mine), wanted in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(mine, wanted), name
    assert ours.norm.num_batches_tracked.item() == 6
    assert ours.first.weight.requires_grad and ours.first.weight.grad is None


@apart
def test_the_same_on_the_device() -> None:
    torch.tpu.init()
    given, rates = [(x.tpu(), wanted.tpu()) for x, wanted in batches(3)], [0.01] * 3
    ours, theirs = net().tpu(), net().tpu()
    trainer = trainer_of(ours)
    losses = [trainer.step(x, targets=wanted).item() for x, wanted in given]
    assert losses == eager_losses(theirs, given, rates)
    states = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    assert all(torch.equal(mine, wanted) for mine, wanted in states)


@apart
def test_a_step_is_one_program_that_another_rate_does_not_change() -> None:
    backend, model = Counting(), net()
    trainer = trainer_of(model, backend=backend)
    (x, wanted), *_ = batches(1)
    for rate in (0.1, 0.2, 0.3):
        trainer.lr = rate
        trainer.step(x, targets=wanted)
    assert len(backend.programs) == 1
    operations = {str(node.target) for node in backend.programs[0].graph.nodes}
    assert {"aten.addmm.default", "aten.tanh_backward.default", "aten.lerp.Scalar"} <= operations


@apart
def test_another_layout_or_mode_is_another_program() -> None:
    backend, model = Counting(), net()
    trainer = trainer_of(model, backend=backend)
    for x, wanted in (*batches(2), *batches(2, rows=6)):
        trainer.step(x, targets=wanted)
    assert len(backend.programs) == 2
    model.eval()
    mean = model.norm.running_mean.clone()
    for x, wanted in batches(2):
        trainer.step(x, targets=wanted)
    assert len(backend.programs) == 3
    assert torch.equal(model.norm.running_mean, mean)


@apart
def test_what_is_loaded_counts() -> None:
    given = batches(4)
    first, second = net(), net()
    one, other = trainer_of(first), trainer_of(second)
    for x, wanted in given[:2]:
        one.step(x, targets=wanted)
    second.load_state_dict(first.state_dict())
    other.load_state_dict(one.state_dict())
    for x, wanted in given[2:]:
        assert one.step(x, targets=wanted).item() == other.step(x, targets=wanted).item()
    one.step(*given[0][:1], targets=given[0][1])
    assert one.param_group.state["step"].item() == other.param_group.state["step"].item() + 1


class Loss(nn.Module):
    """Returns its loss, with a factor that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
        return {"loss": factor * F.mse_loss(self.layer(x), wanted)}


@apart
def test_where_a_loss_comes_from() -> None:
    (x, wanted), *_ = batches(1)
    torch.manual_seed(0)
    model = Loss()
    expected = model(x, wanted)["loss"].item()
    trainer = trainer_of(model)
    assert trainer.step(x, wanted=wanted, factor=2.0).item() == pytest.approx(2 * expected)
    assert trainer.step(x, wanted, 1.0).item() < expected
    assert trainer_of(net(), loss_fn=lambda out: out.abs().mean()).step(x).item() > 0
    assert trainer_of(net(), loss_fn=F.l1_loss).step(x, targets=wanted).item() > 0


@apart
def test_the_function_of_torch_tpu() -> None:
    given = batches(3)
    (x, wanted), *_ = given
    ours, theirs = net(), net()
    trainer = torch.tpu.optimizers.SingleTraceTrainer(
        ours,
        torch.tpu.optimizers.AdamW(lr=0.01, use_bfloat16_moments=False),
        lambda graph: torch.compile(graph, backend="aot_eager"),
    )
    train_step = trainer.make_compiled_train_step(x, wanted)
    losses = [train_step(x, wanted).item() for x, wanted in given]
    assert losses == eager_losses(theirs, given, [0.01] * 3)
    assert trainer.params["first.weight"] is ours.first.weight
    assert trainer.bufs["norm.running_mean"] is ours.norm.running_mean
    with pytest.raises(ValueError, match="expected targets when there are example_targets"):
        train_step(x)


@apart
def test_bad_input_is_told_so() -> None:
    optimizers, (x, wanted) = torch.tpu.optimizers, batches(1)[0]
    adamw, params = optimizers.AdamW(), {"w": torch.ones(2)}
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "expected lr of at least 0, got -1", lambda: optimizers.AdamW(lr=-1)),
        (ValueError, "expected beta2 from 0 to below 1, got 1", lambda: optimizers.AdamW(beta2=1)),
        (
            ValueError,
            "expected momentum and no dampening with nesterov",
            lambda: optimizers.Sgd(nesterov=True),
        ),
        (
            ValueError,
            "expected adjust_lr_fn as one of original, ",
            lambda: optimizers.Muon(adjust_lr_fn="no"),
        ),
        (ValueError, "expected ns_steps from 0 to 99, got 100", lambda: optimizers.Muon(ns_steps=100)),
        (ValueError, "matrices for Muon, got 'w' of shape [2]", lambda: optimizers.Muon().init(params)),
        (ValueError, "expected parameters, got none", lambda: adamw.init({})),
        (TypeError, "got 'w' of torch.int64", lambda: adamw.init({"w": torch.ones(2).long()})),
        (
            ValueError,
            "shape [2], got [3]",
            lambda: adamw.update({"w": torch.ones(3)}, adamw.init(params), params),
        ),
        (
            ValueError,
            "got one of 'v'",
            lambda: adamw.update({"v": torch.ones(2)}, adamw.init(params), params),
        ),
        (TypeError, "expected a torch.nn.Module, got int", lambda: optimizers.SingleTraceTrainer(3, adamw)),
        (
            TypeError,
            "got Adam; those of torch.optim can not be part of a program",
            lambda: optimizers.SingleTraceTrainer(net(), torch.optim.Adam(net().parameters())),
        ),
        (ValueError, "parameters that need gradients, got none", lambda: trainer_of(nn.ReLU())),
        (
            ValueError,
            "expected a backend of torch.compile, got 'no'",
            lambda: trainer_of(net(), backend="no"),
        ),
        (ValueError, "loss without dimensions, got shape [4, 8]", lambda: trainer_of(net()).step(x)),
        (
            TypeError,
            "plain values as inputs, got set",
            lambda: trainer_of(net()).step(x, {1}, targets=wanted),
        ),
        (ValueError, "expected a state of this optimizer", lambda: trainer_of(net()).load_state_dict({})),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value) and str(caught.value).startswith("tpurun: ")
        assert "\n" not in str(caught.value)
