"""From a graph of ATen operations, as AOTAutograd makes it, to a program of the runtime.

Every node becomes an operation of the program, or a view, or a number that is known when the program runs.
Nothing is decomposed further: an operation that eager calls is called with the same arguments, so that
results have the bits of eager ones.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tpurun import _C as _native
from tpurun.compile._parts import Part, Related, find_endings
from tpurun.compile._sizes import Sizes


class NotLowered(Exception):
    """A node that a program cannot have; the text says which and why."""


# An operation on lists of tensors is as many operations on tensors, which then go into tiles.
_FOREACH = "aten::_foreach_"

# A graph of more operations is cut into programs. A plan takes time and memory by the operations of its
# program, and 64 sets of sizes have a plan each.
MOST_OPERATIONS = 16_384

Lowered = Any  # _native.Ref | _native.Unknown | int | list of them


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _line(node: fx.Node) -> str:
    """``train.py:12`` of the innermost line of the user's program that a node comes from."""
    trace = node.stack_trace
    if not trace:
        return ""
    for entry in reversed(trace.strip().splitlines()):
        entry = entry.strip()
        if entry.startswith('File "'):
            file, _, rest = entry[6:].partition('", line ')
            if "/torch/" not in file:
                return f"{file.rpartition('/')[2]}:{rest.partition(',')[0]}"
    return ""


@functools.cache
def _told(op: OpOverload) -> str | None:
    """The overload of an operation that is told where to put its results, if it has one."""
    schema = op._schema
    packet = op.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)._schema
        outs = [argument for argument in other.arguments if argument.is_out]
        ins = [argument for argument in other.arguments if not argument.is_out]
        if len(outs) != len(schema.returns) or any(str(out.type) != "Tensor" for out in outs):
            continue
        if [(one.name, str(one.type)) for one in ins] == [
            (one.name, str(one.type)) for one in schema.arguments
        ]:
            return overload if overload != "default" else ""
    return None


# Their schemas promise a new tensor, and their kernels return a view.
_SECRET_VIEWS = ("aten::_unsafe_view",)


@functools.cache
def _view_of(op: OpOverload) -> int | None:
    """The argument that the results of an operation are views of."""
    if op._schema.name in _SECRET_VIEWS:
        return 0
    returns = op._schema.returns
    if not returns or any(one.alias_info is None or one.alias_info.is_write for one in returns):
        return None
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and not argument.alias_info.is_write:
            return at
    return None


def _name(op: OpOverload) -> tuple[str, str]:
    overload = op._overloadname
    return op._schema.name, "" if overload == "default" else overload


class Lowering:
    """Writes a program down for one graph, or several where the graph is too large for one."""

    def __init__(self, graph: fx.GraphModule, most_operations: int | None = None) -> None:
        self.graph = graph
        self.most_operations = most_operations or MOST_OPERATIONS
        self.sizes = Sizes()
        self.parts: list[Part] = []  # the last one is the one that is written down
        self.operations = 0  # of all parts
        self.crossing: dict[
            int, int
        ] = {}  # inputs of the program that are of the graph, or of programs before it
        self.arguments = 0
        self.crossed = 0
        self.related: list[Related] = []
        self._begin_part()
        self.known: dict[fx.Node, Lowered] = {}
        self.constants: list[torch.Tensor] = []
        self.inputs: list[str] = []  # "tensor" or "number" for each argument of the graph
        self.results: list[tuple[str, Any]] = []

    def run(self) -> None:
        nodes = list(self.graph.graph.nodes)
        numbers = {node: number for number, node in enumerate(nodes)}
        last_uses = {node: max((numbers[user] for user in node.users), default=-1) for node in nodes}
        begun = 0
        for number, node in enumerate(nodes):
            if node.op == "call_function" and self.operations - begun >= self.most_operations:
                self._cut({one: self.known[one] for one in self.known if last_uses[one] >= number})
                begun = self.operations
            getattr(self, f"_{node.op}")(node)
        if not self.sizes.are_given():
            raise NotLowered("sizes that depend on data")
        self.program.finish()
        find_endings(self.parts)

    # --- several programs ---

    @property
    def program(self) -> Any:
        return self.parts[-1].program

    def _begin_part(self) -> None:
        self.parts.append(Part(_native.Program()))
        self.values: dict[int, torch.Tensor] = {}  # fake ones, by their number in the program
        self.roots: dict[int, int] = {}
        self.made: set[int] = set()  # by operations of this program or those before it
        self.views: dict[int, tuple[Any, ...]] = {}  # as the program was told of them
        self.absolute: set[int] = set()  # views whose offset counts from the start of their storage

    def _cut(self, needed: dict[fx.Node, Lowered]) -> None:
        """Ends the program before a node, and begins another one that knows what is still needed.

        Only roots cross. Views of them are views of the same root again, so that the next program knows as
        well as this one what shares memory.
        """
        before, made = self.parts[-1], self.made
        values, roots, views = self.values, self.roots, self.views
        refs = {ref.value for lowered in needed.values() for ref in _refs(lowered)}
        crossing = {root: self._leave(root) for root in dict.fromkeys(roots[ref] for ref in sorted(refs))}
        before.program.finish()
        self._begin_part()
        self.crossing = {}
        moved: dict[int, _native.Ref] = {}
        for root, number in crossing.items():
            moved[root] = self._crossed(values[root], number)
            if root in made:
                self.made.add(moved[root].value)
        for ref in sorted(refs - set(crossing)):
            moved[ref] = self._view(moved[roots[ref]].value, values[ref], *views[ref])
        self.known = {node: _moved(lowered, moved) for node, lowered in needed.items()}

    def _leave(self, root: int) -> int:
        """The number by which later programs know a root; the program that has made it returns it."""
        if root not in self.crossing:
            self.crossed += 1
            self.crossing[root] = -self.crossed
            self.program.output(root)
            self.parts[-1].outputs.append(-self.crossed)
        return self.crossing[root]

    def _crossed(self, fake: torch.Tensor, number: int) -> _native.Ref:
        ref = self._next_input(fake)
        self.crossing[ref.value] = number
        self.parts[-1].inputs.append(number)
        return ref

    def _relate(self, outputs: Sequence[int]) -> None:
        """Finds results that share memory which an earlier program has made."""
        by_root: dict[int, list[int]] = {}
        for at, value in enumerate(outputs):
            if self.crossing.get(self.roots[value], 0) < 0:
                by_root.setdefault(self.roots[value], []).append(at)
        count = len(outputs)
        for root, views in by_root.items():
            if len(views) > 1:
                whole = next((at for at in views if outputs[at] == root), None)
                if whole is None:
                    self.program.output(root)
                    whole, count = count, count + 1
                self.related.append(Related(whole, views))

    # --- kinds of nodes ---

    def _placeholder(self, node: fx.Node) -> None:
        fake = node.meta.get("val")
        if _is_tensor(fake):
            if _is_random_state(node):
                fake = _random_state()
            self.inputs.append("tensor")
            self.sizes.tensor(fake)
            self.known[node] = self._input(fake)
        elif isinstance(fake, (torch.SymInt, int)) and not isinstance(fake, bool):
            self.inputs.append("number")
            self.known[node] = self.sizes.argument(fake)
        elif fake is None:
            self.inputs.append("none")
            self.known[node] = None
        else:
            raise NotLowered(f"an argument of type {type(fake).__name__}")

    def _get_attr(self, node: fx.Node) -> None:
        value: Any = self.graph
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not _is_tensor(value):
            raise NotLowered(f"{node.target}, which is no tensor")
        self.constants.append(value)
        self.known[node] = self._input(node.meta.get("val", value))

    def _output(self, node: fx.Node) -> None:
        results = node.args[0]
        outputs = []
        for result in results if isinstance(results, (list, tuple)) else [results]:
            lowered = self.known[result] if isinstance(result, fx.Node) else result
            if isinstance(lowered, _native.Ref):
                self.program.output(lowered.value)
                outputs.append(lowered.value)
                self.results.append(("tensor", None))
            elif isinstance(lowered, _native.Unknown):
                self.results.append(("size", lowered.number))
            else:
                self.results.append(("constant", lowered))
        self._relate(outputs)

    def _call_function(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            of, at = node.args
            self.known[node] = self.known[of][at]
            return
        fake = node.meta.get("val")
        if isinstance(fake, (torch.SymInt, int)) and not isinstance(fake, bool):
            self.known[node] = self.sizes.of(fake)
            return
        if (random := _RANDOM.get(str(node.target))) is not None:
            random(self, node)
            return
        if not isinstance(node.target, OpOverload):
            raise NotLowered(f"{node.target}")
        op = node.target
        arguments = self._in_order(op, node.args, node.kwargs)
        view_of = _view_of(op)
        if op is torch.ops.aten.copy.default and self._is_moved(node, arguments[1], fake):
            self.known[node] = arguments[1]
        elif op.namespace == "aten" and view_of is not None:
            is_absolute = op is torch.ops.aten.as_strided.default
            self.known[node] = self._views(arguments[view_of], fake, is_absolute)
        elif op._schema.name.startswith(_FOREACH) and (single := _single(op, arguments)) is not None:
            self._each(node, single, arguments)
        else:
            self.known[node] = self._operation(node, op, arguments, fake)

    # --- values ---

    def _strided(self, fake: torch.Tensor) -> tuple[list[Lowered], list[Lowered]]:
        if fake.layout != torch.strided or fake.is_quantized or fake.is_conj() or fake.is_neg():
            raise NotLowered(f"a tensor of layout {fake.layout}, or conjugate")
        return [self.sizes.of(one) for one in fake.shape], [self.sizes.of(one) for one in fake.stride()]

    def _remember(self, number: int, fake: torch.Tensor, root: int) -> _native.Ref:
        self.values[number] = fake
        self.roots[number] = root
        return _native.Ref(number)

    def _input(self, fake: torch.Tensor) -> _native.Ref:
        self.arguments += 1
        return self._crossed(fake, self.arguments - 1)

    def _next_input(self, fake: torch.Tensor) -> _native.Ref:
        number = self.program.input(fake.dtype, fake.device, *self._strided(fake))
        return self._remember(number, fake, number)

    def _result(self, fake: torch.Tensor) -> _native.Ref:
        number = self.program.result(fake.dtype, fake.device, *self._strided(fake))
        self.made.add(number)
        return self._remember(number, fake, number)

    def _views(self, of: _native.Ref, fake: Any, is_absolute: bool = False) -> Any:
        """One view, or several, of a value.

        Most begin so many elements after the first one of their root. Those that are strided by the program
        count from the start of a storage, and so do views of them.
        """
        if isinstance(fake, (list, tuple)):
            return [self._views(of, one, is_absolute) for one in fake]
        root = self.roots[of.value]
        sizes, strides = self._strided(fake)
        is_absolute = is_absolute or of.value in self.absolute
        base = self.values[root]
        before = 0 if is_absolute else base.storage_offset() * base.element_size() // fake.element_size()
        offset = self.sizes.of(fake.storage_offset() - before)
        return self._view(of.value, fake, sizes, strides, offset, is_absolute)

    def _view(self, of: int, fake: torch.Tensor, *laid: Any) -> _native.Ref:
        number = self.program.view(of, fake.dtype, *laid)
        self.views[number] = laid
        if laid[-1]:
            self.absolute.add(number)
        return self._remember(number, fake, self.roots[of])

    def _is_moved(self, node: fx.Node, source: Lowered, fake: torch.Tensor) -> bool:
        """Whether ``copy(old, source)`` is `source` itself.

        It has to be as large and of the same type, to be made by this program, so that nothing changes it
        later, and not to be a result that a caller would find in two places.
        """
        if not isinstance(source, _native.Ref):
            return False
        given, root = self.values[source.value], self.roots[source.value]
        alike = all(getattr(given, one) == getattr(fake, one) for one in ("dtype", "shape", "device"))
        returned = any(user.op == "output" for user in node.users)
        return alike and given.stride() == fake.stride() and root in self.made and not returned

    # --- operations ---

    def _in_order(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Lowered]:
        """The arguments of an operation in the order of its schema, each lowered."""
        others = op._schema.arguments[len(args) :]
        named = [kwargs.get(argument.name, argument.default_value) for argument in others]
        return [self._lowered(one) for one in (*args, *named)]

    def _lowered(self, given: Any) -> Lowered:
        if isinstance(given, fx.Node):
            return self.known[given]
        if isinstance(given, (list, tuple)):
            return [self._lowered(one) for one in given]
        if isinstance(given, torch.SymInt):
            return self.sizes.of(given)
        return given

    def _made(self, fake: Any) -> tuple[Any, list[int | None]]:
        """The value that a node is known by, and the numbers of the tensors that its operation makes."""
        if fake is None:
            return None, [None]
        if _is_tensor(fake):
            ref = self._result(fake)
            return ref, [ref.value]
        refs, numbers = [], []
        for one in fake:
            ref, made = self._made(one)
            refs.append(ref)
            numbers += made
        return refs, numbers

    def _operation(self, node: fx.Node, op: OpOverload, arguments: Sequence[Lowered], fake: Any) -> Any:
        name, overload = _name(op)
        returns = op._schema.returns
        written = [one.alias_info is not None and one.alias_info.is_write for one in returns]
        if any(written):
            # Such an operation returns an argument that it has written to.
            back = [at for at, one in enumerate(op._schema.arguments) if one.is_write]
            if not all(written) or len(back) != len(returns):
                raise NotLowered(f"{op}, which returns what it was given and more")
            self._write(name, overload, None, arguments, [], node)
            refs = [arguments[at] for at in back]
            return refs[0] if len(refs) == 1 else refs
        ref, numbers = self._made(fake) if returns else (None, [])
        self._write(name, overload, _told(op), arguments, numbers, node)
        return ref

    def _write(self, name: str, overload: str, told: str | None, *given: Any) -> None:
        """One operation: its arguments, the numbers of its results, and the node that it comes from."""
        arguments, results, node = given
        self.operations += 1
        self.program.operation(name, overload, told, arguments, results, _line(node))

    def random(self, name: str, arguments: Sequence[Lowered], node: fx.Node) -> Any:
        """One of our operations on the state of the random numbers."""
        ref, numbers = (None, []) if name == "set_random_state" else self._made(_random_state())
        self._write(f"tpurun::{name}", "", None, arguments, numbers, node)
        return ref

    def inner(self, node: fx.Node, op: OpOverload, given: Sequence[Any]) -> Any:
        """An operation that is the argument of another."""
        fake = _fake_of(op, given, node.kwargs)
        return self._operation(node, op, self._in_order(op, given, node.kwargs), fake)

    def _each(self, node: fx.Node, single: OpOverload, arguments: Sequence[Lowered]) -> None:
        """An operation on lists as one operation for each of their tensors."""
        fakes = node.meta.get("val")
        count = len(next(one for one in arguments if isinstance(one, list)))
        known = []
        for at in range(count):
            of_one = [one[at] if isinstance(one, list) else one for one in arguments]
            schema = single._schema.arguments
            of_one += [argument.default_value for argument in schema[len(of_one) :]]
            known.append(self._operation(node, single, of_one, fakes[at] if fakes is not None else None))
        self.known[node] = known


def _refs(lowered: Lowered) -> Iterator[_native.Ref]:
    if isinstance(lowered, _native.Ref):
        yield lowered
    elif isinstance(lowered, (list, tuple)):
        for one in lowered:
            yield from _refs(one)


def _moved(lowered: Lowered, refs: Mapping[int, _native.Ref]) -> Lowered:
    """The same in the next program."""
    if isinstance(lowered, _native.Ref):
        return refs[lowered.value]
    return [_moved(one, refs) for one in lowered] if isinstance(lowered, (list, tuple)) else lowered


# --- random numbers that are drawn again ---


def _random_state() -> torch.Tensor:
    """A tensor like the state of the device's random numbers: a seed and an offset."""
    return torch.empty(16, dtype=torch.uint8, device="cpu")


def _is_random_state(node: fx.Node) -> bool:
    return any(str(user.target) == "run_with_rng_state" and user.args[0] is node for user in node.users)


def _fake_of(op: OpOverload, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The results of an operation on fake tensors; the nodes that hold it have no record of it."""
    return op(*fx.node.map_arg(tuple(given), _val), **fx.node.map_arg(dict(named), _val))


def _val(node: fx.Node) -> Any:
    return node.meta["val"]


def _run_and_save(lowering: Lowering, node: fx.Node) -> None:
    """``(state, results)`` of an operation that draws random numbers; the state is that before it."""
    state = lowering.random("random_state", [], node)
    op, *given = node.args
    lowering.known[node] = [state, lowering.inner(node, op, given)]


def _run_with(lowering: Lowering, node: fx.Node) -> None:
    """An operation that draws what another has drawn; the state after it is as it was."""
    state, op, *given = node.args
    before = lowering.random("exchange_random_state", [lowering.known[state]], node)
    lowering.known[node] = lowering.inner(node, op, given)
    lowering.random("set_random_state", [before], node)


_RANDOM = {"run_and_save_rng_state": _run_and_save, "run_with_rng_state": _run_with}

# Operations on lists, and those on tensors that they are made of where there is no faster kernel for lists.
_SINGLES = {
    "add": ("add", {"List": "Tensor", "Scalar": "Tensor", "ScalarList": "Tensor"}),
    "sub": ("sub", {"List": "Tensor", "Scalar": "Tensor", "ScalarList": "Tensor"}),
    "mul": ("mul", {"List": "Tensor", "Scalar": "Tensor", "ScalarList": "Tensor", "Tensor": "Tensor"}),
    "div": ("div", {"List": "Tensor", "Scalar": "Tensor", "ScalarList": "Tensor", "Tensor": "Tensor"}),
    "neg": ("neg", {"default": "default"}),
    "sqrt": ("sqrt", {"default": "default"}),
    "rsqrt": ("rsqrt", {"default": "default"}),
    "abs": ("abs", {"default": "default"}),
    "exp": ("exp", {"default": "default"}),
    "sign": ("sign", {"default": "default"}),
    "reciprocal": ("reciprocal", {"default": "default"}),
    "lerp": ("lerp", {"Scalar": "Scalar", "List": "Tensor", "ScalarList": "Scalar"}),
    "addcmul": ("addcmul", {"Scalar": "default", "ScalarList": "default"}),
    "addcdiv": ("addcdiv", {"Scalar": "default", "ScalarList": "default"}),
    "maximum": ("maximum", {"List": "default"}),
    "minimum": ("minimum", {"List": "default"}),
    "clamp_min": ("clamp_min", {"Scalar": "default", "List": "Tensor"}),
    "clamp_max": ("clamp_max", {"Scalar": "default", "List": "Tensor"}),
    "pow": ("pow", {"Scalar": "Tensor_Scalar", "List": "Tensor_Tensor"}),
}


def _single(op: OpOverload, arguments: Sequence[Lowered]) -> OpOverload | None:
    name = op._schema.name.removeprefix(_FOREACH)
    found = _SINGLES.get(name)
    overload = found[1].get(op._overloadname) if found else None
    if found is None or overload is None:
        return None
    single = getattr(getattr(torch.ops.aten, found[0]), overload)
    # Arguments by position, as both have them.
    return single if len(arguments) <= len(single._schema.arguments) else None
