"""Reads the sources of a crate as far as its imports, its types and the lengths of its functions need it.

No compiler is asked, so this also reads a tree that does not build. Comments and strings are blanked first,
then everything that only tests, fuzz targets and models see. Modules are found as the compiler finds them,
from the root by their ``mod`` lines. A path leads to the file that defines its name, through re-exports of
other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TEXTS = re.compile(
    r"""//[^\n]* | /\*.*?\*/
    | \b(?:b|c)?r(?P<hashes>\#*)".*?"(?P=hashes)
    | (?:\b[bc])?"(?:\\.|[^"\\])*"
    | (?:\bb)?'(?:\\(?:u\{[^}]*\}|x..|.)|[^\\'\n])'""",
    re.X | re.S,
)
OPENING, CLOSING = "([{", ")]}"
VISIBILITY = r"(?P<visible>pub(?:\s*\([^)]*\))?\s+)?"
ITEM = re.compile(
    VISIBILITY
    + r"""(?:(?P<use>use)\s+(?P<tree>[^;]+);
    | mod\s+(?P<mod>\w+)\s*(?P<opens>[{;])
    | (?:default\s+|const\s+|async\s+|unsafe\s+|extern\s+)*fn\s+(?P<fn>\w+)
    | (?:unsafe\s+)?(?P<kind>struct|enum|union|trait|type|static|const)\s+(?:mut\s+)?(?P<name>\w+)
    | macro_rules!\s*(?P<macro>\w+)
    | (?:unsafe\s+)?(?P<impl>impl)\b)""",
    re.X,
)
# The conditions under which nothing that ships is compiled; all others are unknown.
FALSE = {"test", "fuzzing", "tpurun_loom", "miri"}
ITEM_WORDS = re.compile(
    r"\s*(?:pub\b|fn\b|struct\b|enum\b|impl\b|mod\b|use\b|trait\b|unsafe\b|const\b|async\b)"
)
ENDS_WITH_SEMICOLON = re.compile(r"\s*(?:pub(?:\s*\([^)]*\))?\s+)?(?:use|let|static|const(?!\s+fn)|type)\b")
SCANNED = re.compile(r"[{(\[]|\b(?:pub|use|mod)\b|" + ITEM.pattern, re.X)
IMPL = re.compile(r"^[ \t]*(?:unsafe\s+)?impl\b", re.M)
# One dot before it is a field or a method, two are a range.
PATH = re.compile(r"(?<![\w:])(?<![^.]\.)\w+(?:\s*::\s*\w+)+")


def blanked(text: str) -> str:
    """The text with its comments, strings and characters blanked; every offset and line stays."""
    return TEXTS.sub(lambda match: blank(match[0]), text)


def blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def closes(code: str, opening: int) -> int:
    """The offset of the bracket that closes the one at `opening`, or the end of the text."""
    depth = 0
    for match in re.compile(r"[()\[\]{}]").finditer(code, opening):
        depth += 1 if match[0] in OPENING else -1
        if depth == 0:
            return match.start()
    return len(code)


def condition(text: str) -> bool | None:
    """The value of a ``cfg`` predicate in the build that ships; None where that depends on the machine."""
    text = text.strip()
    match = re.fullmatch(r"(all|any|not)\s*\((.*)\)", text, re.S)
    if not match:
        return False if text in FALSE else None
    parts = [condition(part) for part in split(match[2])]
    if match[1] == "not":
        return None if parts[0] is None else not parts[0]
    deciding = match[1] == "any"
    if deciding in parts:
        return deciding
    return None if None in parts else not deciding


def split(text: str) -> list[str]:
    """The parts of a list that commas divide, those within brackets excepted."""
    parts, depth, begin = [], 0, 0
    for offset, sign in enumerate(text + ","):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append(text[begin:offset].strip())
            begin = offset + 1
    return [part for part in parts if part]


def end_of_item(code: str, begin: int) -> int:
    """The offset after the item, statement, field or arm that begins at `begin`."""
    while match := re.compile(r"\s*#!?\[").match(code, begin):
        begin = closes(code, match.end() - 1) + 1
    is_item = ITEM_WORDS.match(code, begin)
    needs_semicolon = ENDS_WITH_SEMICOLON.match(code, begin)
    at = begin
    while match := re.compile(r"[()\[\]{};,]").search(code, at):
        sign, at = match[0], match.end()
        if sign in OPENING:
            at = closes(code, match.start()) + 1
            if sign == "{" and not needs_semicolon:
                return at
        elif sign in CLOSING:
            return match.start()
        elif sign == ";" or not is_item:
            return at
    return len(code)


def shipped(code: str) -> tuple[str, int]:
    """The code without what only tests, fuzz targets and models see, and how many lines are left out."""
    attribute = re.compile(r"#!?\[\s*cfg\s*\(")
    at, left_out = 0, 0
    while match := attribute.search(code, at):
        at = closes(code, match.start() + code[match.start() :].index("[")) + 1
        predicate = code[match.end() : closes(code, match.end() - 1)]
        if condition(predicate) is False:
            end = len(code) if match[0].startswith("#!") else end_of_item(code, at)
            left_out += code.count("\n", match.start(), end)
            code = code[: match.start()] + blank(code[match.start() : end]) + code[end:]
            at = end
    return code, left_out


def expanded(tree: str) -> Iterator[tuple[list[str], str]]:
    """Every path of a ``use``, and the name it gives it; the name of a glob is ``*``."""
    tree = " ".join(tree.split())
    if match := re.fullmatch(r"((?:\w+ ?:: ?)*(?::: ?)?)\{(.*)\}", tree):
        for part in split(match[2]):
            yield from expanded(match[1] + part)
        return
    path, _, alias = tree.partition(" as ")
    segments = [segment for segment in re.split(r"\s*::\s*", path.strip()) if segment]
    if segments[-1] == "self" and len(segments) > 1:
        segments.pop()
    yield segments, alias.strip() or segments[-1]


@dataclass
class Function:
    name: str
    lines: int


@dataclass
class Type:
    """A struct, an enum, a union, a trait or an alias."""

    name: str
    kind: str
    public: bool
    fields: int = 0
    methods: int = 0


@dataclass
class Import:
    segments: list[str]
    public: bool


@dataclass
class Module:
    """A module with its own names; one that is written within another module's file shares that file."""

    path: tuple[str, ...]
    file: Path
    code: str = ""
    children: dict[str, Module] = field(default_factory=dict)
    items: set[str] = field(default_factory=set)
    types: dict[str, Type] = field(default_factory=dict)
    imports: dict[str, Import] = field(default_factory=dict)
    globs: list[Import] = field(default_factory=list)

    def all(self) -> Iterator[Module]:
        yield self
        for child in self.children.values():
            yield from child.all()


@dataclass
class Target:
    """The place that a path leads to: an item of a module, or the module itself."""

    module: Module
    item: str | None


@dataclass
class Crate:
    name: str
    src: Path
    root: Module
    functions: dict[Path, list[Function]] = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)

    def modules(self) -> Iterator[Module]:
        yield from self.root.all()


class Reader:
    """Reads one crate."""

    def __init__(self, name: str, src: Path) -> None:
        file = next(path for path in (src / "lib.rs", src / "main.rs") if path.exists())
        self.crate = Crate(name, src, Module((), file))
        self.file(self.crate.root, src)
        for module in self.crate.modules():
            self.count_methods(module)

    def file(self, module: Module, folder: Path) -> None:
        """Reads the file of a module; files of its children are in `folder`."""
        text = module.file.read_text()
        code, left_out = shipped(blanked(text).replace("$crate", " crate"))
        self.crate.lines[module.file] = len(text.splitlines()) - left_out
        self.crate.functions[module.file] = list(functions(code))
        self.body(module, code, folder)

    def body(self, module: Module, code: str, folder: Path) -> None:
        """Reads the items of a module; `code` is cut down to what is its own."""
        at, kept = 0, []
        while match := SCANNED.search(code, at):
            if match[0] in OPENING:
                at = match.end()
                continue
            item = ITEM.match(code, match.start())
            if not item:
                at = match.end()
                continue
            at = item.end()
            if item["use"]:
                self.use(module, item)
                kept.append((item.start(), item.end()))
            elif item["mod"]:
                at = self.child(module, item, code, folder)
                kept.append((item.start(), at))
            elif at_top(code, item.start()):
                self.item(module, item, code)
        for begin, end in reversed(kept):
            code = code[:begin] + blank(code[begin:end]) + code[end:]
        module.code = code

    def use(self, module: Module, item: re.Match[str]) -> None:
        public = bool(item["visible"])
        for segments, name in expanded(item["tree"]):
            if name == "*":
                module.globs.append(Import(segments[:-1], public))
            else:
                # Traits that are imported for their methods alone have no names of their own.
                key = name if name != "_" else "_ " + "::".join(segments)
                module.imports[key] = Import(segments, public)

    def child(self, module: Module, item: re.Match[str], code: str, folder: Path) -> int:
        """Reads a child module; the offset after it."""
        name = item["mod"]
        if item["opens"] == "{":
            end = closes(code, item.end() - 1)
            child = Module((*module.path, name), module.file)
            module.children[name] = child
            self.body(child, code[item.end() : end], folder / name)
            return end + 1
        file = next(
            (path for path in (folder / f"{name}.rs", folder / name / "mod.rs") if path.exists()), None
        )
        if file:
            child = Module((*module.path, name), file)
            module.children[name] = child
            self.file(child, folder / name)
        return item.end()

    def item(self, module: Module, item: re.Match[str], code: str) -> None:
        name = item["fn"] or item["name"] or item["macro"]
        if not name or name == "_":
            return
        module.items.add(name)
        if item["kind"] in ("struct", "enum", "union", "trait", "type"):
            kind, public = item["kind"], bool(item["visible"])
            module.types[name] = Type(name, kind, public, fields(code, item.end()) if kind == "struct" else 0)

    def count_methods(self, module: Module) -> None:
        for match in IMPL.finditer(module.code):
            opening = module.code.find("{", match.end())
            name = implementing(module.code[match.end() : opening])
            found = name and resolve(self.crate, module, [name])
            if not found or found.item not in found.module.types:
                continue
            body = module.code[opening + 1 : closes(module.code, opening)]
            found.module.types[found.item].methods += sum(
                at_top(body, method.start()) for method in re.finditer(r"\bfn\s+\w+", body)
            )


def at_top(code: str, offset: int) -> bool:
    """Whether an offset stands within no bracket."""
    before = code[:offset]
    return before.count("{") == before.count("}") and before.count("(") == before.count(")")


def implementing(header: str) -> str | None:
    """The type of an ``impl`` with methods of its own; None for that of a trait."""
    rest = re.split(r"\bwhere\b", header.replace("->", "  "))[0]
    while (shorter := re.sub(r"<[^<>]*>", "", rest)) != rest:
        rest = shorter
    if re.search(r"\bfor\b", rest):
        return None
    return (re.findall(r"\w+", rest) or [None])[-1]


def fields(code: str, at: int) -> int:
    """How many fields a struct has, whose name ends at `at`."""
    match = re.compile(r"[({;]").search(code, at)
    if not match or match[0] == ";":
        return 0
    body = code[match.end() : closes(code, match.start())]
    if match[0] == "(":
        return len(split(body))
    return sum(bool(re.search(r"\w+\s*:", part)) for part in split(re.sub(r"<[^<>]*>", "", body)))


def functions(code: str) -> Iterator[Function]:
    """Every function with a body, by the name of its type and its own, with its lines."""
    owners = []
    for match in IMPL.finditer(code):
        opening = code.find("{", match.end())
        header = code[match.end() : opening]
        name = implementing(header) or implementing(re.split(r"\bfor\b", header)[-1])
        owners.append((opening, closes(code, opening), name))
    for match in re.finditer(r"\bfn\s+(\w+)", code):
        at = match.end()
        while sign := re.compile(r"[(\[{;]").search(code, at):
            if sign[0] in "([":
                at = closes(code, sign.start()) + 1
                continue
            break
        if not sign or sign[0] == ";":
            continue
        lines = code.count("\n", match.start(), closes(code, sign.start())) + 1
        owner = next((name for begin, end, name in owners if begin < match.start() < end), None)
        yield Function(f"{owner}::{match[1]}" if owner else match[1], lines)


def resolve(
    crate: Crate, module: Module, segments: list[str], seen: frozenset = frozenset()
) -> Target | None:
    """Where a path leads that `module` writes; None when that is out of the crate."""
    head, rest = segments[0], segments[1:]
    if head == "crate":
        return walk(crate, crate.root, rest, seen)
    if head == "self":
        return walk(crate, module, rest, seen)
    if head == "super":
        parent = crate.root
        for name in module.path[:-1]:
            parent = parent.children[name]
        if rest[:1] == ["super"]:
            return resolve(crate, parent, rest, seen)
        return walk(crate, parent, rest, seen)
    if knows(module, head):
        return walk(crate, module, segments, seen)
    return None


def knows(module: Module, name: str) -> bool:
    return name in module.children or name in module.items or name in module.imports


def walk(crate: Crate, module: Module, segments: list[str], seen: frozenset) -> Target | None:
    """Follows the segments of a path down from a module."""
    if not segments:
        return Target(module, None)
    head, rest = segments[0], segments[1:]
    if head in module.children:
        return walk(crate, module.children[head], rest, seen)
    if head in module.items:
        return Target(module, head)
    if (module.path, head) in seen:
        return None
    seen = seen | {(module.path, head)}
    if head in module.imports:
        return resolve(crate, module, module.imports[head].segments + rest, seen)
    for glob in module.globs:
        base = resolve(crate, module, glob.segments, seen)
        if base and base.item is None and base.module is not module:
            found = walk(crate, base.module, segments, seen)
            if found and (found.item is None or found.item in found.module.items):
                return found
    return Target(module, head)


def mentioned(module: Module) -> Iterator[list[str]]:
    """Every path that a module writes: its imports that it uses itself, and the paths in its code."""
    words = set(re.findall(r"\w+", module.code))
    for name, found in module.imports.items():
        # A name that is only passed on makes its file a door, not a user.
        if not found.public or name in words:
            yield found.segments
    for match in PATH.finditer(module.code):
        yield re.split(r"\s*::\s*", match[0])


def imports(crate: Crate) -> dict[Path, dict[Path, set[str]]]:
    """Which files of a crate import which others, and which names."""
    graph: dict[Path, dict[Path, set[str]]] = {module.file: {} for module in crate.modules()}
    for module in crate.modules():
        targets = [resolve(crate, module, segments) for segments in mentioned(module)]
        targets += used_of_globs(crate, module)
        for target in targets:
            # An import of a whole module says nothing; the paths through it do.
            if target and target.item and target.module.file != module.file:
                graph[module.file].setdefault(target.module.file, set()).add(target.item)
    return graph


def used_of_globs(crate: Crate, module: Module) -> Iterator[Target]:
    words = set(re.findall(r"\w+", module.code))
    for glob in module.globs:
        base = resolve(crate, module, glob.segments)
        if base and base.item is None and not glob.public:
            for name in sorted(base.module.items & words):
                yield Target(base.module, name)


def from_crates(crate: Crate, others: dict[str, str]) -> dict[str, set[str]]:
    """The names that a crate imports from others; `others` has these by their names in code."""
    found: dict[str, set[str]] = {}
    for module in crate.modules():
        for segments in mentioned(module):
            if segments[0] in others and len(segments) > 1:
                found.setdefault(others[segments[0]], set()).add("::".join(segments[1:]))
    return found
