"""Shows on how many floors the crates stand, what imports each other in a circle, and what is long.

    .ci/floors.py            prints that, crate by crate, and for the Python package its circles
    .ci/floors.py --check    prints one line for each broken limit, and fails if there is one

A file imports another one that defines a name it uses, whichever file passes the name on. Tests, fuzz
targets and models are left out. A module and its children are one room: a circle between a parent and its
child is one of files and none of folders. The file at the root of a crate is the roof over its rooms and
belongs to none of them.

The lists of exceptions may only shrink: an entry that nothing needs any more is a fault, too.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import rust_source

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("python/tpurun")
Graph = dict[str, dict[str, set[str]]]


@dataclass
class Limits:
    """The limits, and today's exceptions from them: a number is how far the one that is named may go.

    Files and functions are named without folders, so that a move needs no new entry: `crate stem` for a
    file, `crate stem Type::name` for a function, `crate name` for a struct, `crate 1` for its largest circle
    of files. For a circle between folders the crate comes first, then the only rooms the circle may have.
    """

    circle_files: int = 5
    methods: int = 40
    function_lines: int = 50
    file_lines: int = 600
    circles_of_files: dict[str, int] = field(default_factory=dict)
    circles_of_folders: list[str] = field(default_factory=list)
    many_methods: dict[str, int] = field(default_factory=dict)
    long_functions: dict[str, int] = field(default_factory=dict)
    long_files: dict[str, int] = field(default_factory=dict)


LIMITS = Limits(
    circles_of_files={},
    circles_of_folders=[],
    many_methods={},
    long_functions={
        "tpurun-engine p2p Messages::progress_receives": 65,
        "tpurun-engine rounds Rounds::wait": 55,
    },
    long_files={
        "tpurun-engine ffi": 740,
    },
)


# --- graphs ---------------------------------------------------------------------------------------------


def circles(graph: Graph) -> list[list[str]]:
    """The groups of nodes that lead to each other, largest first (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return sorted((group for group in found if len(group) > 1), key=lambda group: (-len(group), group))


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each node: one above the highest that it imports. The nodes of a circle share one."""
    group = {node: tuple(nodes) for nodes in circles(graph) for node in nodes}
    known: dict[tuple[str, ...], int] = {}

    def floor(nodes: tuple[str, ...]) -> int:
        if nodes not in known:
            below = {other for node in nodes for other in graph[node]} - set(nodes)
            known[nodes] = 1 + max((floor(group.get(other, (other,))) for other in below), default=-1)
        return known[nodes]

    return {node: floor(group.get(node, (node,))) for node in graph}


def upwards(graph: Graph, nodes: list[str]) -> set[tuple[str, str]]:
    """Edges whose removal opens a circle: few, though not always the fewest (Eades, Lin and Smyth)."""
    inner = {node: {other for other in graph[node] if other in nodes} for node in nodes}
    left, first, last = set(nodes), [], []

    def degrees(node: str) -> tuple[int, int]:
        ways_in = sum(node in inner[other] for other in left if other != node)
        return len(inner[node] & left - {node}), ways_in

    while left:
        sinks = [node for node in sorted(left) if degrees(node)[0] == 0]
        if sinks:
            last.insert(0, sinks[0])
            left.remove(sinks[0])
            continue
        top = max(sorted(left), key=lambda node: degrees(node)[0] - degrees(node)[1])
        first.append(top)
        left.remove(top)
    order = {node: place for place, node in enumerate(first + last)}
    return {(node, other) for node in nodes for other in inner[node] if order[other] < order[node]}


def at_level(graph: Graph) -> dict[str, Graph]:
    """The names that the rooms of each folder import from each other: by folder, by room. Nodes are paths."""
    levels: dict[str, Graph] = {}
    for node in graph:
        parts = node.split("/")
        for depth in range(len(parts)):
            levels.setdefault("/".join(parts[:depth]), {}).setdefault("/".join(parts[: depth + 1]), {})
    for node, others in graph.items():
        for other, names in others.items():
            here, there = node.split("/"), other.split("/")
            common = 0
            while common < min(len(here), len(there)) and here[common] == there[common]:
                common += 1
            # A module is the room of its children.
            if common < min(len(here), len(there)):
                level = levels["/".join(here[:common])]
                room, neighbour = "/".join(here[: common + 1]), "/".join(there[: common + 1])
                level[room].setdefault(neighbour, set()).update(names)
    return levels


# --- sources --------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A crate or a package, with all that is said of it."""

    name: str
    graph: Graph
    root: str = ""
    types: list[rust_source.Type] = field(default_factory=list)
    functions: list[tuple[str, rust_source.Function]] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    others: dict[str, set[str]] = field(default_factory=dict)

    def below_the_roof(self) -> Graph:
        rest = {node: dict(others) for node, others in self.graph.items() if node != self.root}
        for others in rest.values():
            others.pop(self.root, None)
        return rest

    def circles_of_folders(self) -> Iterator[tuple[Graph, list[str]]]:
        graph = self.below_the_roof()
        folders = {node.rsplit("/", 1)[0] for node in graph if "/" in node}
        for level in at_level(graph).values():
            for group in circles(level):
                if folders & set(group):
                    yield level, group


def crates(root: Path) -> list[rust_source.Crate]:
    """The crates of a workspace, in the order of its members."""
    found = []
    for member in tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["members"]:
        name = tomllib.loads((root / member / "Cargo.toml").read_text())["package"]["name"]
        found.append(rust_source.Reader(name, root / member / "src").crate)
    return found


def crate_part(crate: rust_source.Crate, names: Iterable[str]) -> Part:
    label: dict[Path, str] = {}
    for module in crate.modules():
        label.setdefault(module.file, "/".join(module.path) or module.file.stem)
    graph = {
        label[file]: {label[other]: set(names) for other, names in others.items()}
        for file, others in rust_source.imports(crate).items()
    }
    return Part(
        crate.name,
        graph,
        label[crate.root.file],
        [found for module in crate.modules() for found in module.types.values()],
        [(label[file], function) for file, several in crate.functions.items() for function in several],
        {label[file]: lines for file, lines in crate.lines.items()},
        rust_source.from_crates(
            crate, {name.replace("-", "_"): name for name in names if name != crate.name}
        ),
    )


def python_part(folder: Path) -> Part:
    """The modules of a package; an import that waits within a function is one, too, and says so."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        modules["/".join(parts[:-1] if parts[-1] == "__init__" else parts) or "__init__"] = path
    graph: Graph = {name: {} for name in modules}
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    for name, path in modules.items():
        tree = trees[name]
        late = {id(inner) for node in ast.walk(tree) if is_function(node) for inner in ast.walk(node)}
        package = path.parent.relative_to(folder).parts
        for node in ast.walk(tree):
            for parts, names in imported(node, package, folder.name):
                for target, what in targets(parts, names, trees):
                    if target != name:
                        waits = " (late)" if id(node) in late else ""
                        graph[name].setdefault(target, set()).add(what + waits)
    return Part(folder.name, graph, "__init__")


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def imported(
    node: ast.AST, package: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The module within the package that a statement imports, and the names it takes from there."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == name and len(parts) > 1:
                yield tuple(parts[1:]), []
    if isinstance(node, ast.ImportFrom):
        parts = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            parts = package[: len(package) - node.level + 1] + parts
        elif parts[:1] == (name,):
            parts = parts[1:]
        else:
            return
        yield parts, [alias.name for alias in node.names]


def targets(
    parts: tuple[str, ...], names: list[str], trees: dict[str, ast.Module]
) -> Iterator[tuple[str, str]]:
    module = "/".join(parts) or "__init__"
    if not names and module in trees:
        yield module, parts[-1]
    for name in names:
        child = "/".join((*parts, name))
        if child in trees:
            yield child, name
        # Any other name of a package is a module that was compiled.
        elif module in trees and (name in written(trees[module]) or module != "__init__"):
            yield module, name


def written(tree: ast.Module) -> set[str]:
    """The names that a module defines, imports or assigns."""
    names = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    names |= {
        alias.asname or alias.name for node in ast.walk(tree) if is_import(node) for alias in node.names
    }
    return names


def parts_of(root: Path) -> list[Part]:
    read = crates(root)
    found = [crate_part(crate, [other.name for other in read]) for crate in read]
    return found + ([python_part(root / PACKAGE)] if (root / PACKAGE).exists() else [])


# --- the report -----------------------------------------------------------------------------------------


def lines_of_circle(graph: Graph, nodes: list[str], what: str) -> Iterator[str]:
    back = upwards(graph, nodes)
    yield f"  circle of {len(nodes)} {what}: {', '.join(nodes)}"
    yield f"    open if these {len(back)} went:"
    inner = [(node, other) for node in nodes for other in sorted(graph[node]) if other in nodes]
    for node, other in sorted(inner, key=lambda edge: (edge not in back, edge)):
        sign = "^" if (node, other) in back else " "
        yield f"    {sign} {node} -> {other}: {', '.join(sorted(graph[node][other]))}"


def report(part: Part, limits: Limits, most: int = 5) -> Iterator[str]:
    rooms = at_level(part.below_the_roof()).get("", {})
    by_floor: dict[int, list[str]] = {}
    for room, floor in floors(rooms).items():
        by_floor.setdefault(floor, []).append(room)
    high = 1 + max(floors(part.graph).values(), default=-1)
    yield f"{part.name}: {len(rooms)} rooms on {len(by_floor)} floors, {len(part.graph)} files on {high}"
    for floor in sorted(by_floor, reverse=True):
        yield f"  {floor:>3}  {', '.join(sorted(by_floor[floor]))}"
    for other, names in sorted(part.others.items()):
        yield f"  imports {len(names)} names of {other}"
    for group in circles(part.graph):
        yield from lines_of_circle(part.graph, group, "files")
    for level, group in part.circles_of_folders():
        yield from lines_of_circle(level, group, "rooms")
    structs = sorted((one for one in part.types if one.kind == "struct"), key=lambda one: -one.methods)
    for one in structs[:most]:
        yield f"  {one.name}: {one.methods} methods, {one.fields} fields"
    for file, function in sorted(part.functions, key=lambda found: -found[1].lines):
        if function.lines > limits.function_lines:
            yield f"  {file} {function.name}: {function.lines} lines"
    for file, lines in sorted(part.lines.items(), key=lambda found: -found[1]):
        if lines > limits.file_lines:
            yield f"  {file}: {lines} lines"


# --- the check ------------------------------------------------------------------------------------------


def stem(file: str) -> str:
    return file.rsplit("/", 1)[-1]


def over(found: dict[str, int], limit: int, exceptions: dict[str, int], what: str) -> Iterator[str]:
    """Faults of one kind: too much of something, and exceptions that are not needed."""
    for name, number in sorted(found.items()):
        if number > exceptions.get(name, limit):
            yield f"{name}: {number} {what}, expected at most {exceptions.get(name, limit)}"
    for name in sorted(exceptions):
        if found.get(name, 0) <= limit:
            yield f"{name}: an exception from {limit} {what} that is no longer needed"


def most_of(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, number in pairs:
        found[name] = max(number, found.get(name, 0))
    return found


def faults(parts: list[Part], limits: Limits) -> Iterator[str]:
    sizes = {
        f"{part.name} {place}": len(group)
        for part in parts
        for place, group in enumerate(circles(part.graph), 1)
    }
    yield from over(sizes, limits.circle_files, limits.circles_of_files, "files in a circle")
    rooms = [[part.name, *group] for part in parts for _, group in part.circles_of_folders()]
    for group in rooms:
        if not any(set(group) <= set(names.split()) for names in limits.circles_of_folders):
            yield f"{' '.join(group)}: a circle between folders, expected none"
    for names in limits.circles_of_folders:
        if not any(set(group) <= set(names.split()) for group in rooms):
            yield f"{names}: an exception for a circle between folders that is no longer needed"
    methods = most_of((f"{part.name} {one.name}", one.methods) for part in parts for one in part.types)
    yield from over(methods, limits.methods, limits.many_methods, "methods")
    functions = most_of(
        (f"{part.name} {stem(file)} {function.name}", function.lines)
        for part in parts
        for file, function in part.functions
    )
    yield from over(functions, limits.function_lines, limits.long_functions, "lines of a function")
    files = most_of(
        (f"{part.name} {stem(file)}", lines) for part in parts for file, lines in part.lines.items()
    )
    yield from over(files, limits.file_lines, limits.long_files, "lines of a file")


def main(arguments: list[str]) -> int:
    parts = parts_of(ROOT)
    if arguments == ["--check"]:
        found = list(faults(parts, LIMITS))
        print("\n".join(found) if found else f"floors: {len(parts)} parts are within the limits")
        return min(len(found), 1)
    for part in parts:
        print("\n".join(report(part, LIMITS)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
