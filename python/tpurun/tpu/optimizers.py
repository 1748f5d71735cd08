"""``torch.tpu.optimizers``: optimizers as functions, and a trainer whose whole step is one compiled program.

The step of a ``torch.optim`` optimizer can not be part of a compiled program: it keeps state beside the
tensors that it updates. An optimizer of this module is a function of gradients, state and parameters, so that
`SingleTraceTrainer` traces forward, backward and update together. The names and the order of the arguments
are TorchTPU's.

The learning rate and the number of the step are tensors without dimensions in the state: another learning
rate needs no other program. These tensors are float64, as are the numbers of Python that ``torch.optim``
computes with. Parameters of float32 and float64 become the same, bit for bit, as those of ``torch.optim``
with ``foreach=False``.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree

__all__ = ["AdamW", "Muon", "Optimizer", "Sgd", "SingleTraceTrainer"]

Tensors = dict[str, torch.Tensor]
State = dict[str, Any]
"""`lr` and `step`, tensors without dimensions, and by the name of each moment its tensors by parameter."""
Scalars = dict[str, torch.Tensor]

_ADJUSTMENTS: dict[str | None, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
_ADJUSTMENTS[None] = _ADJUSTMENTS["original"]


@dataclass
class ParamGroup:
    """Parameters by name, and the state that an optimizer has for them."""

    params: Tensors
    state: State


class Optimizer(abc.ABC):
    """The base of all optimizers of this module: functions of gradients, state and parameters.

    Args:
        lr: The learning rate that `init` puts into the state.
        weight_decay: How much of the parameters each step takes away; its meaning is the optimizer's.

    Raises:
        ValueError: for a number below zero.
    """

    MOMENTS: tuple[str, ...] = ()
    """Names of what the state has for each parameter, as ``torch.optim`` has them."""

    def __init__(self, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        self.lr = _at_least_zero("lr", lr)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)

    def init(self, params: Mapping[str, torch.Tensor]) -> State:
        """The state before the first step.

        # Shape
        Moments have the shape of their parameter; `lr` and `step` have none.

        Raises:
            TypeError: for parameters that are not tensors of real numbers with a fraction.
            ValueError: for parameters of several devices, and for none.
        """
        device = _device_of(params)
        state: State = {
            "lr": torch.tensor(self.lr, dtype=torch.float64, device=device),
            "step": torch.tensor(0.0, dtype=torch.float64, device=device),
        }
        for moment in self._moments():
            state[moment] = {name: self._moment_of(param) for name, param in params.items()}
        return state

    def update(
        self,
        grads: Mapping[str, torch.Tensor | None],
        state: State,
        params: Mapping[str, torch.Tensor],
    ) -> tuple[Tensors, State]:
        """The parameters and the state after a step; what is given stays as it is.

        A parameter whose gradient is None or missing stays, as do its moments.

        # Shape
        A gradient has the shape of its parameter.

        Raises:
            ValueError: for a gradient of another shape than its parameter, and for one without a parameter.
        """
        _check_gradients(grads, params)
        new_state = {name: dict(part) if isinstance(part, dict) else part for name, part in state.items()}
        new_state["step"] = state["step"] + 1
        scalars = self._scalars(state["lr"], new_state["step"])
        new_params = dict(params)
        for name, param in params.items():
            if (grad := grads.get(name)) is None:
                continue
            moments = {moment: state[moment][name] for moment in self._moments()}
            new_params[name], changed = self._updated(param, grad, moments, scalars)
            for moment, tensor in changed.items():
                new_state[moment][name] = tensor
        return new_params, new_state

    def init_param_group(self, params: Mapping[str, torch.Tensor] | torch.nn.Module) -> ParamGroup:
        """The parameters of a module, or named ones, with their state before the first step."""
        if isinstance(params, torch.nn.Module):
            params = {name: param.detach() for name, param in params.named_parameters()}
        return ParamGroup(dict(params), self.init(params))

    @torch.no_grad()
    def step(self, param_group: ParamGroup, grads: Mapping[str, torch.Tensor | None]) -> ParamGroup:
        """Update parameters and state in place, and return the same group."""
        new_params, new_state = self.update(grads, param_group.state, param_group.params)
        _copy((param_group.params, param_group.state), (new_params, new_state))
        return param_group

    def __call__(self, param_group: ParamGroup, grads: Mapping[str, torch.Tensor | None]) -> ParamGroup:
        """As `step`."""
        return self.step(param_group, grads)

    def _moments(self) -> tuple[str, ...]:
        return self.MOMENTS

    def _moment_of(self, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(param, requires_grad=False)

    @abc.abstractmethod
    def _scalars(self, lr: torch.Tensor, step: torch.Tensor) -> Scalars:
        """The numbers of one step that all parameters have in common."""

    @abc.abstractmethod
    def _updated(
        self, param: torch.Tensor, grad: torch.Tensor, moments: Tensors, scalars: Scalars
    ) -> tuple[torch.Tensor, Tensors]:
        """The new parameter, and its new moments by name."""


class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.

    Args:
        lr: The learning rate.
        weight_decay: The share of a parameter, times the learning rate, that each step takes away.
        beta1: How much of the mean of the gradients stays.
        beta2: How much of the mean of their squares stays.
        eps: Added to the root of the latter.
        use_bfloat16_moments: Whether both means are stored as bfloat16, as TorchTPU does. Turned off, they
            have the dtype of the parameter, and all bits are those of ``torch.optim.AdamW``.

    Raises:
        ValueError: for a number below zero, and for betas that are not below 1.
    """

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        lr: float = 1e-3,
        weight_decay: float = 1e-2,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_bfloat16_moments: bool = True,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.beta1, self.beta2 = _below_one("beta1", beta1), _below_one("beta2", beta2)
        self.eps = _at_least_zero("eps", eps)
        self.use_bfloat16_moments = use_bfloat16_moments

    def _moment_of(self, param: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if self.use_bfloat16_moments else param.dtype
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)

    def _scalars(self, lr: torch.Tensor, step: torch.Tensor) -> Scalars:
        return {
            "kept": 1 - lr * self.weight_decay,
            "rate": -(lr / (1 - self.beta1**step)),
            "root": torch.sqrt(1 - self.beta2**step),
        }

    def _updated(
        self, param: torch.Tensor, grad: torch.Tensor, moments: Tensors, scalars: Scalars
    ) -> tuple[torch.Tensor, Tensors]:
        stored = moments["exp_avg"].dtype
        mean, square = (moments[name].to(param.dtype) for name in self.MOMENTS)
        mean = mean.lerp(grad, 1 - self.beta1)
        square = square.mul(self.beta2).addcmul(grad, grad, value=1 - self.beta2)
        root = square.sqrt().div(scalars["root"]).add(self.eps)
        if self.weight_decay:
            param = param * scalars["kept"]
        # The order of addcdiv, which takes the rate as a number only.
        param = param + (mean * scalars["rate"]) / root
        return param, {"exp_avg": mean.to(stored), "exp_avg_sq": square.to(stored)}


class Sgd(Optimizer):
    """Gradient descent with momentum, by Nesterov if asked.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, section 2;
    the learning rate multiplies the momentum, too, as in ``torch.optim.SGD``.

    Args:
        lr: The learning rate.
        momentum: How much of the momentum stays; 0 keeps none.
        dampening: The share of a gradient that does not go into the momentum; the first one goes whole.
        weight_decay: Times the parameter, it is added to the gradient.
        nesterov: Whether the step looks ahead.

    Raises:
        ValueError: for a number below zero, and for `nesterov` without momentum or with dampening.
    """

    MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.momentum = _at_least_zero("momentum", momentum)
        self.dampening = dampening
        self.nesterov = nesterov
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                "tpurun: expected momentum and no dampening with nesterov, "
                f"got momentum={momentum}, dampening={dampening}"
            )

    def _moments(self) -> tuple[str, ...]:
        return self.MOMENTS if self.momentum else ()

    def _moment_of(self, param: torch.Tensor) -> torch.Tensor:
        # Minus zero is what any gradient, minus zero included, is added to without a change.
        return torch.full_like(param, -0.0, requires_grad=False)

    def _scalars(self, lr: torch.Tensor, step: torch.Tensor) -> Scalars:
        return {"rate": -lr, "is_first": step == 1}

    def _updated(
        self, param: torch.Tensor, grad: torch.Tensor, moments: Tensors, scalars: Scalars
    ) -> tuple[torch.Tensor, Tensors]:
        if self.weight_decay:
            grad = grad.add(param, alpha=self.weight_decay)
        changed: Tensors = {}
        if self.momentum:
            buffer = moments["momentum_buffer"].mul(self.momentum).add(grad, alpha=1 - self.dampening)
            if self.dampening:
                buffer = torch.where(scalars["is_first"], grad, buffer)
            changed["momentum_buffer"] = buffer
            grad = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        # One rounding, as add with a number for alpha has.
        return torch.addcmul(param, grad, scalars["rate"].to(param.dtype)), changed


class Muon(Optimizer):
    """Momentum whose matrix is made orthogonal by a Newton-Schulz iteration in bfloat16.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the adjustment
    ``match_rms_adamw`` is that of Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2.

    Args:
        lr: The learning rate.
        weight_decay: The share of a parameter, times the learning rate, that each step takes away.
        momentum: How much of the mean of the gradients stays.
        nesterov: Whether the step looks ahead.
        ns_coefficients: Those of the iteration's polynomial of degree five.
        eps: The least norm that the iteration divides by.
        ns_steps: The steps of the iteration, below 100.
        adjust_lr_fn: How the shape of a matrix changes its rate: ``original``, which is the default,
            ``match_rms_adamw`` or ``spectral_unclamped``.

    Raises:
        ValueError: for a number out of these bounds, another name, and in `init` for parameters that are
            not matrices.
    """

    MOMENTS = ("momentum_buffer",)

    def __init__(
        self,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.momentum = _at_least_zero("momentum", momentum)
        self.eps = _at_least_zero("eps", eps)
        self.nesterov = nesterov
        if len(ns_coefficients) != 3:
            raise ValueError(f"tpurun: expected three ns_coefficients, got {ns_coefficients!r}")
        if not 0 <= ns_steps < 100:
            raise ValueError(f"tpurun: expected ns_steps from 0 to 99, got {ns_steps!r}")
        if adjust_lr_fn not in _ADJUSTMENTS:
            names = ", ".join(name for name in _ADJUSTMENTS if name)
            raise ValueError(f"tpurun: expected adjust_lr_fn as one of {names}, got {adjust_lr_fn!r}")
        self.ns_coefficients, self.ns_steps = tuple(ns_coefficients), ns_steps
        self.adjust_lr_fn = adjust_lr_fn

    def init(self, params: Mapping[str, torch.Tensor]) -> State:
        """As that of all optimizers, for matrices alone."""
        for name, param in params.items():
            if param.dim() != 2:
                raise ValueError(
                    f"tpurun: expected matrices for Muon, got {name!r} of shape {[*param.shape]}; "
                    "give other parameters to AdamW"
                )
        return super().init(params)

    def _scalars(self, lr: torch.Tensor, step: torch.Tensor) -> Scalars:
        return {"kept": 1 - lr * self.weight_decay, "lr": lr}

    def _updated(
        self, param: torch.Tensor, grad: torch.Tensor, moments: Tensors, scalars: Scalars
    ) -> tuple[torch.Tensor, Tensors]:
        buffer = moments["momentum_buffer"].lerp(grad, 1 - self.momentum)
        ahead = grad.lerp(buffer, self.momentum) if self.nesterov else buffer
        rate = -(scalars["lr"] * _ADJUSTMENTS[self.adjust_lr_fn](*param.shape))
        kept = param * scalars["kept"]
        updated = torch.addcmul(kept, self._orthogonal(ahead).to(param.dtype), rate.to(param.dtype))
        return updated, {"momentum_buffer": buffer}

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """The nearest matrix whose singular values are about 1, in bfloat16."""
        first, second, third = self.ns_coefficients
        is_tall = matrix.size(0) > matrix.size(1)
        wide = matrix.to(torch.bfloat16)
        wide = wide.T if is_tall else wide
        wide = wide / wide.norm().clamp(min=self.eps)
        for _ in range(self.ns_steps):
            gram = wide @ wide.T
            polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)
            wide = torch.addmm(wide, polynomial, wide, beta=first)
        return wide.T if is_tall else wide


class SingleTraceTrainer:
    """Trains a module with steps that are one compiled program: forward, backward and optimizer.

    The program changes parameters, buffers and the state of the optimizer in place, so that the module is an
    ordinary one between steps: it can be evaluated, saved, and loaded into. A program is made for each layout
    of the inputs, and again when the module changes between training and evaluation or moves to another
    device or dtype. Everything else that Python decides in `forward` is decided once, when the program is
    made. Buffers have to be changed in place, as those of BatchNorm are.

    Args:
        model: The module. Parameters that need no gradient stay as they are.
        optimizer: One of this module.
        compile_fn: Makes the program of a ``torch.fx.GraphModule`` instead of the backend, such as
            ``torch.compile``.
        loss_fn: The loss of what the module returns and of the targets, ``mse_loss`` if there are any. A
            module without either returns its loss, or an object or dictionary with a `loss`.
        backend: The backend of ``torch.compile`` that makes the program, by name or as a function.

    Raises:
        TypeError: for what is no module or no optimizer of this module.
        ValueError: for a module without parameters that need gradients, and for an unknown backend.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        compile_fn: Callable[[torch.fx.GraphModule], Callable[..., Any]] | None = None,
        *,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        backend: str | Callable[..., Any] = "tpu",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"tpurun: expected a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"tpurun: expected an optimizer of torch.tpu.optimizers, got {type(optimizer).__name__}; "
                "those of torch.optim can not be part of a program"
            )
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._compile = compile_fn or _compiler(backend)
        self._takes_inputs = compile_fn is None
        self._programs: dict[Any, Callable[..., Any]] = {}
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        if not trained:
            raise ValueError("tpurun: expected a module with parameters that need gradients, got none")
        self.param_group = ParamGroup(dict(trained), optimizer.init(trained))
        self._frozen = {name: param for name, param in model.named_parameters() if name not in trained}
        self._first = next(iter(trained.values()))
        self._state_leaves = _pytree.tree_leaves(self.param_group.state)
        self._fixed = [*trained.values(), *self._frozen.values()]
        # Where the buffers are: a module may put other tensors there, such as `Module.to` does.
        owners = [model.get_submodule(name.rpartition(".")[0])._buffers for name, _ in model.named_buffers()]
        self._buffers = list(zip(owners, (name.rpartition(".")[2] for name in self.bufs), strict=True))

    @property
    def params(self) -> Tensors:
        """The parameters that are trained, by name."""
        return dict(self.param_group.params)

    @property
    def bufs(self) -> Tensors:
        """The buffers of the module, by name."""
        return dict(self.model.named_buffers())

    @property
    def lr(self) -> float:
        """The learning rate of the steps to come; set, it needs no other program."""
        return self.param_group.state["lr"].item()

    @lr.setter
    def lr(self, rate: float) -> None:
        self.param_group.state["lr"].fill_(_at_least_zero("lr", rate))

    def state_dict(self) -> State:
        """The state of the optimizer: the tensors that the next steps go on to change."""
        return _pytree.tree_map(lambda part: part, self.param_group.state)

    def load_state_dict(self, state: State) -> None:
        """Go on with a state of the same optimizer and the same parameters.

        Raises:
            ValueError: when it is of another optimizer, or of other parameters.
        """
        leaves, spec = _pytree.tree_flatten(state)
        shapes = [getattr(leaf, "shape", None) for leaf in leaves]
        if spec != _pytree.tree_structure(self.param_group.state) or shapes != [
            leaf.shape for leaf in self._state_leaves
        ]:
            raise ValueError("tpurun: expected a state of this optimizer and of these parameters")
        for ours, given in zip(self._state_leaves, leaves, strict=True):
            ours.copy_(given)

    def step(self, *inputs: Any, targets: Any = None, **named: Any) -> torch.Tensor:
        """One step with these inputs of the module; returns the loss before it.

        # Shape
        The loss has no dimensions.

        Raises:
            TypeError: when the module returns no loss, and for inputs that a program can not depend on.
            ValueError: for a loss with dimensions.
        """
        given, spec = _pytree.tree_flatten((inputs, named, targets))
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        key = (spec, self.model.training, *_layouts([self._first, *tensors]), *_constants(given))
        try:
            program = self._programs.get(key)
        except TypeError:
            raise TypeError(
                f"tpurun: expected tensors and plain values as inputs, got {_unhashable(given)}"
            ) from None
        with torch.no_grad():
            if program is None:
                program = self._programs[key] = self._program(given, spec, tensors)
            return program(*self._leaves(), *tensors)[0]

    def make_compiled_train_step(
        self, example_inputs: Any, example_targets: Any = None
    ) -> Callable[..., torch.Tensor]:
        """A function of inputs and targets that does a step, as TorchTPU has it.

        Inputs are one for the module, or a tuple or list of them, or a dictionary by the names of its
        arguments. The program is made at the first step. The examples say whether there are targets.
        """

        def train_step(inputs: Any, targets: Any = None) -> torch.Tensor:
            if (targets is None) != (example_targets is None):
                raise ValueError("tpurun: expected targets when there are example_targets, and only then")
            if isinstance(inputs, Mapping):
                return self.step(targets=targets, **inputs)
            several = isinstance(inputs, (tuple, list))
            return self.step(*(inputs if several else (inputs,)), targets=targets)

        return train_step

    def _leaves(self) -> list[torch.Tensor]:
        """The tensors of the trainer, in the order of the program's arguments."""
        return [*self._fixed, *(owner[name] for owner, name in self._buffers), *self._state_leaves]

    def _program(
        self, given: list[Any], spec: _pytree.TreeSpec, tensors: list[torch.Tensor]
    ) -> Callable[..., Any]:
        """Traces a step with these inputs, and compiles it."""
        arguments = [*self._leaves(), *tensors]
        count = len(arguments) - len(tensors)
        names = [*self.param_group.params, *self._frozen, *self.bufs]
        state_spec = _pytree.tree_structure(self.param_group.state)

        def traced(*leaves: torch.Tensor) -> tuple[torch.Tensor]:
            own, rest = leaves[: len(names)], iter(leaves[count:])
            state = _pytree.tree_unflatten(leaves[len(names) : count], state_spec)
            filled = [next(rest) if isinstance(one, torch.Tensor) else one for one in given]
            return (
                self._traced(dict(zip(names, own, strict=True)), state, _pytree.tree_unflatten(filled, spec)),
            )

        # Tensors that are neither parameters nor buffers become constants of the program.
        graph = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return self._compile(graph, arguments) if self._takes_inputs else self._compile(graph)

    def _traced(self, tensors: Tensors, state: State, given: tuple[Any, Any, Any]) -> torch.Tensor:
        """One step in operations that are traced: what is given is changed in place."""
        inputs, named, targets = given
        params = {name: tensors[name] for name in self.param_group.params}
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        with torch.enable_grad():
            result = torch.func.functional_call(self.model, {**tensors, **leaves}, inputs, named)
            loss = self._loss(result, targets)
        found = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        grads = dict(zip(leaves, found, strict=True))
        _copy((params, state), self.optimizer.update(grads, state, params))
        return loss.detach()

    def _loss(self, result: Any, targets: Any) -> torch.Tensor:
        if targets is not None:
            loss = (self.loss_fn or torch.nn.functional.mse_loss)(result, targets)
        elif self.loss_fn is not None:
            loss = self.loss_fn(result)
        else:
            loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"tpurun: expected a loss, got {type(loss).__name__}; give loss_fn or targets")
        if loss.dim():
            raise ValueError(f"tpurun: expected a loss without dimensions, got shape {[*loss.shape]}")
        return loss


def _copy(into: Any, new: Any) -> None:
    """Copies tensors of one structure over those of the same structure; those that are the same stay."""
    for old, changed in zip(_pytree.tree_leaves(into), _pytree.tree_leaves(new), strict=True):
        if changed is not old:
            old.copy_(changed)


def _compiler(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    # It takes long to import.
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(backend)
    except InvalidBackend:
        raise ValueError(f"tpurun: expected a backend of torch.compile, got {backend!r}") from None


def _layouts(tensors: list[torch.Tensor]) -> Iterator[Any]:
    """The properties of its inputs that a program depends on."""
    for tensor in tensors:
        yield (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _constants(given: list[Any]) -> Iterator[Any]:
    """The inputs that are no tensors, with their types: 1 and 1.0 are equal, and are two programs."""
    for one in given:
        if not isinstance(one, torch.Tensor):
            yield (type(one), one)


def _unhashable(given: list[Any]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in given if type(one).__hash__ is None}))


def _device_of(params: Mapping[str, torch.Tensor]) -> torch.device:
    """Returns the device that all parameters are on."""
    if not params:
        raise ValueError("tpurun: expected parameters, got none")
    for name, param in params.items():
        if not (isinstance(param, torch.Tensor) and param.is_floating_point()):
            what = param.dtype if isinstance(param, torch.Tensor) else type(param).__name__
            raise TypeError(f"tpurun: expected floating-point parameters, got {name!r} of {what}")
    devices = dict.fromkeys(param.device for param in params.values())
    if len(devices) > 1:
        raise ValueError(f"tpurun: expected parameters of one device, got {', '.join(map(str, devices))}")
    return next(iter(devices))


def _check_gradients(grads: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]) -> None:
    for name, grad in grads.items():
        if name not in params:
            raise ValueError(f"tpurun: expected gradients of parameters, got one of {name!r}")
        if grad is not None and grad.shape != params[name].shape:
            raise ValueError(
                f"tpurun: expected the gradient of {name!r} in shape {[*params[name].shape]}, "
                f"got {[*grad.shape]}"
            )


def _at_least_zero(name: str, value: float) -> float:
    if not value >= 0:
        raise ValueError(f"tpurun: expected {name} of at least 0, got {value!r}")
    return float(value)


def _below_one(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ValueError(f"tpurun: expected {name} from 0 to below 1, got {value!r}")
    return float(value)
