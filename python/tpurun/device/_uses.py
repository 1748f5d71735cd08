"""Whether a program uses device ``tpu``, as far as its text, its arguments and its environment say so.

A name counts where it is used as a device: as an argument of ``torch.device``, ``.to``, ``device=`` and the
like, or as the value of a variable or an option that is named for a device. It does not count in comparisons,
lists of choices and messages, nor under a condition that does not hold. Values are followed through names,
attributes, arguments and options without their scopes. A wrong "yes" changes what a program for the CPU does;
after a wrong "no" torch refuses the name, and ``--device tpu`` helps.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_DEVICE = re.compile(r"tpu(:\d*)?")
# The beginning of a text that is put together: "tpu:{}", f"tpu:{rank}".
_BEGINS_DEVICE = re.compile(r"tpu(:.*)?", re.DOTALL)
# Among arguments: --device tpu, --device=tpu:0, trainer.device=tpu.
_IN_WORD = re.compile(r"(?:^|[\s=,])tpu(?::\d*)?(?:$|[\s,])")
# Functions whose first argument is a device, and arguments that are devices wherever they occur.
_TAKE_DEVICE = frozenset(
    {"DeviceMesh", "Generator", "autocast", "device", "get_device_module", "init_device_mesh", "to"}
    | {"set_default_device", "to_empty"}
)
_KEYWORDS = frozenset({"device", "device_id", "device_type", "map_location"})
# Variables and options that hold one.
_HOLDS_DEVICE = re.compile(r"(^|_)(dev|device|accelerator|platform|hardware)(_?(name|type|str))?$", re.I)
# Questions that torch.tpu answers without the device; `_device` has the answers.
QUESTIONS = frozenset(
    {"_is_in_bad_fork", "current_device", "device_count", "empty_cache", "is_available", "is_bf16_supported"}
    | {"is_initialized", "manual_seed", "manual_seed_all", "memory_allocated", "synchronize"}
)
_ADD_OPTION = frozenset({"add_argument", "option", "Option"})
_SAME_TEXT = frozenset({"lower", "strip", "casefold"})
_CONVERT = frozenset({"bool", "device", "int", "str"})
# Deep enough for programs, and no endless way through values that are made of each other.
_MAX_DEPTH = 40
_MAX_MODULES = 200
# Expressions that are looked at for one use and for one module, of up to 0.1 ms each.
_MAX_STEPS_OF_USE = 1000
_MAX_STEPS = 10_000

# Conditions, and whether each must hold.
Guards = tuple[tuple[ast.expr, bool], ...]


@dataclass(frozen=True)
class Said:
    """An expression of the program, and the conditions under which it counts."""

    value: ast.expr
    guards: Guards


@dataclass(frozen=True)
class Values:
    """Constants that an expression may be, and whether it may be nothing else."""

    found: frozenset[Any]
    is_all: bool


_UNKNOWN = Values(frozenset(), False)


@dataclass
class Program:
    """A program, as far as its modules have been read."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    _skipped: list[bytes] = field(default_factory=list)
    _is_interesting: bool = False
    _count: int = 0
    # By the name of a variable, attribute, key or parameter; `f()` is what function f returns.
    _values: dict[str, list[Said]] = field(default_factory=dict)
    _options: dict[str, list[ast.Call]] = field(default_factory=dict)
    _parameters: dict[str, list[str]] = field(default_factory=dict)
    _calls: list[tuple[str, list[ast.expr], Guards]] = field(default_factory=list)
    _uses: list[Said] = field(default_factory=list)
    _active: set[str] = field(default_factory=set)
    _steps_left: int = 0
    _steps_of_use_left: int = 0

    def says_device(self) -> bool:
        """Whether an argument has the name, other than as that of a backend."""

        def is_of_backend(before: str, word: str) -> bool:
            name, is_one, _ = word.partition("=")
            return "backend" in (name if is_one or not before.startswith("-") else before)

        pairs = zip(["", *self.arguments], self.arguments, strict=False)
        return any(_IN_WORD.search(word) and not is_of_backend(before, word) for before, word in pairs)

    def add(self, source: bytes) -> bool:
        """Reads one more module; whether the program uses the device, as far as it is known."""
        names_it = b"tpu" in source
        is_first = not self._is_interesting
        self._is_interesting |= names_it or any(map(_DEVICE.fullmatch, self.environment.values()))
        self._skipped.append(source)
        if not self._is_interesting:
            return False
        already = len(self._uses)
        for one in self._skipped:
            if self._count < _MAX_MODULES:
                self._count += 1
                self._read(one)
        self._skipped.clear()
        self._steps_left, self._steps_of_use_left = _MAX_STEPS, 0
        bound = self._bind()
        self._begin()
        # A module that does not name the device can use it only by what others hand to it.
        if any(map(self._is_of_device, self._uses[already:])):
            return True
        if not (is_first or names_it or any(map(self._may_be_device, bound))):
            return False
        names = [name for name in self._values.keys() | self._options.keys() if _HOLDS_DEVICE.search(name)]
        return any(map(self._holds_device, names)) or any(map(self._is_of_device, self._uses[:already]))

    def _is_of_device(self, use: Said) -> bool:
        self._begin()
        return self._holds(use.guards) and self._may_be_device(use.value)

    def _holds_device(self, name: str) -> bool:
        self._begin()
        return any(map(_is_device, self._lookup(name).found))

    def _begin(self) -> None:
        self._steps_left += self._steps_of_use_left
        self._steps_of_use_left = min(_MAX_STEPS_OF_USE, self._steps_left)
        self._steps_left -= self._steps_of_use_left

    # --- Reading -------------------------------------------------------------------------------------------

    def _read(self, source: bytes) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        try:
            self._visit(tree, (), "")
        except RecursionError:
            return

    def _visit(self, node: ast.AST, guards: Guards, function: str) -> None:
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            self._visit(node.test, guards, function)
            for held, part in ((True, node.body), (False, node.orelse)):
                for child in part if isinstance(part, list) else [part]:
                    self._visit(child, (*guards, (node.test, held)), function)
            return
        if isinstance(node, ast.BoolOp):
            for index, value in enumerate(node.values):
                before = [(one, isinstance(node.op, ast.And)) for one in node.values[:index]]
                self._visit(value, (*guards, *before), function)
            return
        if isinstance(node, ast.Match):
            for case in node.cases:
                more = guards
                if isinstance(case.pattern, ast.MatchValue):
                    is_it = ast.Compare(node.subject, [ast.Eq()], [case.pattern.value])
                    more = (*guards, (is_it, True))
                for child in case.body:
                    self._visit(child, more, function)
            return
        self._note(node, guards, function)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        for child in ast.iter_child_nodes(node):
            self._visit(child, guards, function)

    def _note(self, node: ast.AST, guards: Guards, function: str) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, guards)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            self._assign(node.target, node.value, guards)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._assign(node.target, ast.Starred(node.iter), guards)
        elif isinstance(node, ast.Return) and node.value is not None:
            self._say(f"{function}()", node.value, guards)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    self._say(key.value, value, guards)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._note_parameters(node.name, node.args, guards)
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef) and child.name == "__init__":
                    self._note_parameters(node.name, child.args, guards)
        elif isinstance(node, ast.Call):
            self._note_call(node, guards)
        elif isinstance(node, ast.Attribute):
            if _is_torch_tpu(node.value) and node.attr not in QUESTIONS:
                self._uses.append(Said(ast.Constant("tpu"), guards))
        elif isinstance(node, ast.Import):
            if any(name.name.startswith("torch.tpu.") for name in node.names):
                self._uses.append(Said(ast.Constant("tpu"), guards))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.tpu"):
            asked = node.module == "torch.tpu" and all(name.name in QUESTIONS for name in node.names)
            self._uses += [] if asked else [Said(ast.Constant("tpu"), guards)]

    def _assign(self, target: ast.expr, value: ast.expr, guards: Guards) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                for one, of_it in zip(target.elts, value.elts, strict=True):
                    self._assign(one, of_it, guards)
        elif (name := _key(target)) is not None:
            self._say(name, value, guards)

    def _say(self, name: str, value: ast.expr, guards: Guards) -> None:
        self._values.setdefault(name, []).append(Said(value, guards))

    def _note_parameters(self, function: str, args: ast.arguments, guards: Guards) -> None:
        names = [one.arg for one in (*args.posonlyargs, *args.args)]
        for name, default in zip(names[len(names) - len(args.defaults) :], args.defaults, strict=True):
            self._say(name, default, guards)
        for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            if default is not None:
                self._say(one.arg, default, guards)
        self._parameters[function] = names[1:] if names[:1] in (["self"], ["cls"]) else names

    def _note_call(self, node: ast.Call, guards: Guards) -> None:
        name = _called(node)
        if name in _ADD_OPTION:
            self._note_option(node)
            return
        for keyword in node.keywords:
            if keyword.arg in _KEYWORDS:
                self._uses.append(Said(keyword.value, guards))
            elif keyword.arg is not None and keyword.arg != "backend":
                self._say(keyword.arg, keyword.value, guards)
        if name in _TAKE_DEVICE and node.args:
            self._uses.append(Said(node.args[0], guards))
        elif name == "load" and len(node.args) > 1:
            self._uses.append(Said(node.args[1], guards))
        elif name == "tpu" and isinstance(node.func, ast.Attribute):
            self._uses.append(Said(ast.Constant("tpu"), guards))
        elif name is not None and node.args:
            self._calls.append((name, node.args, guards))

    def _note_option(self, node: ast.Call) -> None:
        flags = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        dest = given.get("dest")
        long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
        name = dest.value if isinstance(dest, ast.Constant) else long.lstrip("-").replace("-", "_")
        self._options.setdefault(str(name), []).append(node)

    def _bind(self) -> list[ast.expr]:
        """Makes what functions of the program are called with values of their parameters; returns these."""
        waiting, self._calls = self._calls, []
        bound: list[ast.expr] = []
        for call in waiting:
            name, args, guards = call
            if name not in self._parameters:
                self._calls.append(call)  # of a module that may come
                continue
            for parameter, value in zip(self._parameters[name], args, strict=False):
                self._say(parameter, value, guards)
                bound.append(value)
        return bound

    # --- Values --------------------------------------------------------------------------------------------

    def _may_be_device(self, node: ast.expr) -> bool:
        return any(map(_is_device, self._of(node).found))

    def _holds(self, guards: Guards) -> bool:
        return all(self._truth(test) is not (not held) for test, held in guards)

    def _of(self, node: ast.expr) -> Values:
        """Returns the values that an expression may have."""
        if self._steps_of_use_left <= 0:
            return _UNKNOWN
        self._steps_of_use_left -= 1
        if isinstance(node, ast.Constant):
            return Values(frozenset({node.value}), True)
        if isinstance(node, ast.JoinedStr):
            return self._of_parts(node.values[0]) if node.values else _UNKNOWN
        if isinstance(node, ast.FormattedValue):
            return self._of(node.value)
        if isinstance(node, ast.BinOp):
            return self._of_parts(node.left)
        if isinstance(node, ast.IfExp):
            truth = self._truth(node.test)
            return self._union([] if truth is False else [node.body], [] if truth else [node.orelse])
        if isinstance(node, ast.Starred):
            return self._union(self._elements(node.value))
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if _is_condition(node):
            truth = self._truth(node)
            return _UNKNOWN if truth is None else Values(frozenset({truth}), True)
        if isinstance(node, ast.BoolOp):
            return self._union(self._reached(node))
        if isinstance(node, ast.Attribute) and node.attr == "type":
            return self._of(node.value)
        if isinstance(node, ast.Subscript) and _is_environ(node.value):
            return self._variable(node.slice, None)
        name = _key(node)
        return _UNKNOWN if name is None else self._lookup(name)

    def _of_parts(self, first: ast.expr) -> Values:
        """A text that begins with this."""
        found = self._of(first).found
        begun = any(isinstance(one, str) and _BEGINS_DEVICE.fullmatch(one) for one in found)
        return Values(frozenset({"tpu:"} if begun else ()), False)

    def _union(self, *lists: list[ast.expr]) -> Values:
        all_of = [self._of(one) for nodes in lists for one in nodes]
        found: frozenset[Any] = frozenset().union(*(one.found for one in all_of))
        return Values(found, bool(all_of) and all(one.is_all for one in all_of))

    def _reached(self, node: ast.BoolOp) -> list[ast.expr]:
        """Operands that may be the value: none after one that decides."""
        decides = isinstance(node.op, ast.Or)
        for index, one in enumerate(node.values):
            values = self._of(one)
            if values.is_all and all(bool(value) is decides for value in values.found):
                return [*node.values[: index + 1]]
        return node.values

    def _elements(self, node: ast.expr) -> list[ast.expr]:
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return node.elts
        name = _key(node)
        said = self._values.get(name, []) if name is not None else []
        lists = [one.value for one in said if isinstance(one.value, (ast.List, ast.Tuple, ast.Set))]
        return [element for one in lists for element in one.elts]

    def _of_call(self, node: ast.Call) -> Values:
        name = _called(node)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        is_variable = name == "getenv" or (name == "get" and receiver is not None and _is_environ(receiver))
        if is_variable and node.args:
            return self._variable(node.args[0], node.args[1] if len(node.args) > 1 else None)
        if (truth := self._answer(node)) is not None:
            return Values(frozenset({truth}), True)
        if name in _CONVERT and node.args:
            return _converted(name, self._of(node.args[0]))
        if receiver is not None and name in _SAME_TEXT:
            return self._of(receiver)
        if receiver is not None and name == "format":
            return self._of_parts(receiver)
        if name == "get" and node.args and isinstance(node.args[0], ast.Constant):
            here = self._lookup(str(node.args[0].value))
            return Values(here.found | self._union(node.args[1:2]).found, False)
        return self._lookup(f"{name}()") if name is not None else _UNKNOWN

    def _variable(self, name: ast.expr, default: ast.expr | None) -> Values:
        given = self._of(name).found
        if len(given) != 1 or not isinstance(key := next(iter(given)), str):
            return _UNKNOWN
        if key in self.environment:
            return Values(frozenset({self.environment[key]}), True)
        return Values(frozenset({None}), True) if default is None else self._of(default)

    def _lookup(self, name: str) -> Values:
        """Returns the values that a name may have. A name that is being looked up already has only those of
        its option."""
        options = [self._of_option(call) for call in self._options.get(name, [])]
        all_of = list(options)
        if name not in self._active and len(self._active) < _MAX_DEPTH:
            self._active.add(name)
            try:
                said = [one for one in self._values.get(name, []) if self._holds(one.guards)]
                all_of += [self._of(one.value) for one in said]
            finally:
                self._active.discard(name)
        found: frozenset[Any] = frozenset().union(*(one.found for one in all_of))
        return Values(found, bool(all_of) and all(one.is_all for one in all_of))

    def _of_option(self, call: ast.Call) -> Values:
        flags = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        action = _constant(given["action"]) if "action" in given else None
        if action in ("store_true", "store_false"):
            is_given = any(flag in self.arguments for flag in flags)
            return Values(frozenset({is_given == (action == "store_true")}), True)
        for flag in flags:
            for index, word in enumerate(self.arguments):
                if word == flag and flag.startswith("-"):
                    return Values(frozenset(self.arguments[index + 1 : index + 2]), True)
                if word.startswith(f"{flag}=") and flag.startswith("--"):
                    return Values(frozenset({word.partition("=")[2]}), True)
        default = given.get("default")
        if default is not None:
            return self._of(default)
        # A positional one may be any word.
        is_positional = bool(flags) and not flags[0].startswith("-")
        return Values(frozenset(self.arguments), False) if is_positional else Values(frozenset({None}), True)

    # --- Conditions ----------------------------------------------------------------------------------------

    def _truth(self, node: ast.expr) -> bool | None:
        """Whether a condition holds; None when that is not known, and it is not about the device."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            truths = [self._truth(one) for one in node.values]
            decides = isinstance(node.op, ast.Or)
            return decides if decides in truths else None if None in truths else not decides
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node.left, node.ops[0], node.comparators[0])
        if _is_torch_tpu(node):
            return True
        if isinstance(node, ast.Call):
            answer = self._answer(node)
            if answer is not None:
                return answer
            if _called(node) == "startswith" and node.args and isinstance(node.func, ast.Attribute):
                return self._compare(node.args[0], ast.In(), node.func.value)
        values = self._of(node)
        if not values.is_all:
            # "args.use_tpu" that nothing else is known about: a program for the CPU must stay one.
            name = _key(node) or (_called(node) if isinstance(node, ast.Call) else None)
            return False if name is not None and "tpu" in name.lower() and not any(values.found) else None
        truths = {bool(one) for one in values.found}
        return truths.pop() if len(truths) == 1 else None

    def _answer(self, node: ast.Call) -> bool | None:
        """Returns the answer to a question about the device."""
        if isinstance(node.func, ast.Attribute) and _is_torch_tpu(node.func.value):
            return True if node.func.attr in QUESTIONS else None
        if getattr(node.func, "id", None) in ("getattr", "hasattr"):
            return True if [_constant(one) for one in node.args[1:2]] == ["tpu"] else None
        return None

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        is_negated = isinstance(op, (ast.NotEq, ast.NotIn, ast.IsNot))
        if isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
            if _constant(right) is None and isinstance(right, ast.Constant) and self._truth(left) is True:
                truth: bool | None = False
            else:
                truth = self._are_same(left, right)
        elif isinstance(op, (ast.In, ast.NotIn)):
            truth = self._is_in(left, right)
        else:
            return True if isinstance(left, ast.Call) and self._answer(left) else None
        return None if truth is None else truth != is_negated

    def _are_same(self, left: ast.expr, right: ast.expr) -> bool | None:
        one, other = self._of(left), self._of(right)
        if one.is_all and other.is_all and len(one.found) == len(other.found) == 1:
            return one.found == other.found
        for name, values in ((_constant(left), other), (_constant(right), one)):
            if _is_device(name):
                return None if any(map(_is_device, values.found)) else False
        return None if not (one.is_all and other.is_all) or one.found & other.found else False

    def _is_in(self, left: ast.expr, right: ast.expr) -> bool | None:
        if _is_device(_constant(left)):  # "tpu" in name
            return None if any(isinstance(v, str) and "tpu" in v for v in self._of(right).found) else False
        values = self._of(left)
        elements = self._union(self._elements(right))
        if elements.is_all and values.is_all:
            return values.found <= elements.found if len(values.found) == 1 else None
        is_about_device = bool(elements.found) and all(map(_is_device, elements.found))
        return False if is_about_device and not any(map(_is_device, values.found)) else None


def _is_condition(node: ast.expr) -> bool:
    """Whether `_truth` knows more of it than `_of`."""
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or (isinstance(node, ast.Compare) and len(node.ops) == 1) or _is_torch_tpu(node)


def _converted(kind: str, values: Values) -> Values:
    if kind not in ("bool", "int"):
        return values
    convert = bool if kind == "bool" else int
    try:
        return Values(frozenset(convert(one) for one in values.found), values.is_all)
    except (TypeError, ValueError):
        return _UNKNOWN


def _is_device(value: object) -> bool:
    return isinstance(value, str) and _DEVICE.fullmatch(value) is not None


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _called(node: ast.Call) -> str | None:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def _key(node: ast.expr | None) -> str | None:
    """The name by which values of a variable, an attribute or a key are known."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(key := _constant(node.slice), str):
        return key
    return None


def _is_torch_tpu(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "tpu" and getattr(node.value, "id", "") == "torch"


def _is_environ(node: ast.expr) -> bool:
    return _key(node) == "environ"
