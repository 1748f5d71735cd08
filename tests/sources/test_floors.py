"""The floors of the sources: `.ci/floors.py` finds each kind of fault, and the repository has none."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / ".ci").exists())
sys.path.insert(0, str(ROOT / ".ci"))

import floors  # noqa: E402
import rust_source  # noqa: E402
from floors import Limits, Part, faults, parts_of, report  # noqa: E402


def workspace(root: Path, **sources: dict[str, str]) -> list[Part]:
    """Writes crates, each from its files, and reads them; `python` is the package."""
    crates = [name for name in sources if name != "python"]
    members = ", ".join(f'"{name}"' for name in crates)
    (root / "Cargo.toml").write_text(f"[workspace]\nmembers = [{members}]\n")
    for name, files in sources.items():
        folder = root / floors.PACKAGE if name == "python" else root / name / "src"
        for file, text in files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if name != "python":
            (root / name / "Cargo.toml").write_text(f'[package]\nname = "tpurun-{name}"\n')
    return parts_of(root)


def edges(root: Path, **files: str) -> dict[tuple[str, str], set[str]]:
    """The imports between the files of a made-up crate; two underscores stand for a folder."""
    named = {f"{name.replace('__', '/')}.rs": text for name, text in files.items()}
    graph = workspace(root, one=named)[0].graph
    return {(node, other): names for node, others in graph.items() for other, names in others.items()}


def test_imports_of_every_form(tmp_path: Path):
    found = edges(
        tmp_path,
        lib="mod a; mod b; mod c;",
        a="use crate::{b::{First, Second as Other}, c};\n"
        "use crate::b::{Fifth as _, Sixth as _};\n"
        "fn f() { c::inner::deep(); crate::b::third(); let x = super::b::FOURTH; }",
        b="pub struct First; pub struct Second; pub fn third() {} pub const FOURTH: u8 = 0;\n"
        "pub trait Fifth {} pub trait Sixth {} const _: () = ();",
        c="pub mod inner;",
        c__inner="pub fn deep() { use self::here::Near; } mod here { pub struct Near; }",
    )
    of_b = {"First", "Second", "third", "FOURTH", "Fifth", "Sixth"}
    assert found == {("a", "b"): of_b, ("a", "c/inner"): {"deep"}}


def test_a_name_that_is_passed_on_leads_to_its_own_file(tmp_path: Path):
    found = edges(
        tmp_path,
        lib="mod room; mod user; pub use room::Thing;",
        room="mod part; mod other; pub use part::Thing; pub use other::*;",
        room__part="pub struct Thing;",
        room__other="pub struct More;",
        user="use crate::Thing; use crate::room::More; use crate::room::Thing as Again;",
    )
    assert found == {("user", "room/part"): {"Thing"}, ("user", "room/other"): {"More"}}


def test_a_file_that_passes_a_name_on_and_uses_it_imports_it(tmp_path: Path):
    found = edges(
        tmp_path,
        lib="mod room;",
        room="mod part; pub use part::Thing; fn f(thing: Thing) {}",
        room__part="pub struct Thing;",
    )
    assert found == {("room", "room/part"): {"Thing"}}


def test_a_child_that_imports_its_parent(tmp_path: Path):
    parts = workspace(
        tmp_path,
        one={
            "lib.rs": "mod room;",
            "room/mod.rs": "mod part; use part::Thing; pub struct Limit;",
            "room/part.rs": "use super::Limit; use super::*; pub struct Thing;",
        },
    )
    assert parts[0].graph["room/part"] == {"room": {"Limit"}}
    assert floors.circles(parts[0].graph) == [["room", "room/part"]]
    assert not list(parts[0].circles_of_folders())
    assert not list(faults(parts, Limits()))


def test_texts_and_tests_import_nothing(tmp_path: Path):
    found = edges(
        tmp_path,
        lib="mod a; mod b; #[cfg(test)] mod tests; #[cfg(any(test, fuzzing))] pub mod fuzzing;",
        a="""
            //! [`crate::b::Thing`]
            /* use crate::b::Thing; /* */
            #[cfg(not(test))] const TEXT: &str = "use crate::b::Thing; \\" {";
            const RAW: &str = r#"crate::b::Thing " }"#; const SIGN: char = '"'; fn f<'a>(x: &'a u8) {}
            #[cfg(test)] use crate::b::Thing;
            #[cfg(all(test, not(tpurun_loom)))]
            #[allow(unused)]
            mod tests { use crate::b::Thing; }
            #[cfg(test)] fn of_tests() -> [u8; 2] { crate::b::Thing::new() }
            struct S { #[cfg(test)] field: crate::b::Thing, other: u8 }
            #[cfg(target_os = "linux")] use crate::b::OfLinux;
        """,
        b="pub struct Thing; pub struct OfLinux;",
        tests="use crate::b::Thing;",
        fuzzing="use crate::b::Thing;",
    )
    assert found == {("a", "b"): {"OfLinux"}}


def test_imports_of_other_crates(tmp_path: Path):
    one, two = workspace(
        tmp_path, one={"lib.rs": "pub mod a;"}, two={"lib.rs": "use tpurun_one::{a, a::Thing};"}
    )
    assert (one.others, two.others) == ({}, {"tpurun-one": {"a", "a::Thing"}})


def test_floors_are_counted_from_the_ground(tmp_path: Path):
    graph = workspace(
        tmp_path,
        one={
            "lib.rs": "mod top; mod left; mod right; mod ground;",
            "top.rs": "use crate::left::Left; use crate::ground::Ground;",
            "left.rs": "use crate::right::Right; pub struct Left;",
            "right.rs": "use crate::left::Left; use crate::ground::Ground; pub struct Right;",
            "ground.rs": "pub struct Ground;",
        },
    )[0].graph
    assert floors.floors(graph) == {"lib": 0, "ground": 0, "left": 1, "right": 1, "top": 2}


def test_a_circle_of_files_is_found(tmp_path: Path):
    names = "abcdef"
    files = {f"{x}.rs": f"use crate::{y}::Of; pub struct Of;" for x, y in zip(names, "bcdefa", strict=True)}
    parts = workspace(tmp_path, one={"lib.rs": "".join(f"mod {name};" for name in names), **files})
    assert list(faults(parts, Limits())) == ["tpurun-one 1: 6 files in a circle, expected at most 5"]
    assert not list(faults(parts, Limits(circles_of_files={"tpurun-one 1": 6})))
    assert not list(faults(parts, Limits(circle_files=6)))
    text = "\n".join(report(parts[0], Limits()))
    assert "circle of 6 files: a, b, c, d, e, f" in text
    assert "open if these 1 went:" in text
    assert text.count("^") == 1 and "a -> b: Of" in text


def test_a_circle_between_folders_is_found(tmp_path: Path):
    parts = workspace(
        tmp_path,
        one={
            "lib.rs": "mod a; mod b;",
            "a/mod.rs": "pub mod up; pub mod down;",
            "a/up.rs": "use crate::b::down::Down;",
            "a/down.rs": "pub struct Down;",
            "b/mod.rs": "pub mod up; pub mod down;",
            "b/up.rs": "use crate::a::down::Down;",
            "b/down.rs": "pub struct Down;",
        },
    )
    assert not floors.circles(parts[0].graph)
    assert list(faults(parts, Limits())) == ["tpurun-one a b: a circle between folders, expected none"]
    assert not list(faults(parts, Limits(circles_of_folders=["tpurun-one a b c"])))
    assert "circle of 2 rooms: a, b" in "\n".join(report(parts[0], Limits()))


def test_a_circle_within_a_folder_is_found_where_it_has_a_folder(tmp_path: Path):
    parts = workspace(
        tmp_path,
        one={
            "lib.rs": "mod house;",
            "house.rs": "mod room; mod hall;",
            "house/hall.rs": "use super::room::bed::Bed; pub struct Hall;",
            "house/room.rs": "pub mod bed; use super::hall::Hall;",
            "house/room/bed.rs": "pub struct Bed;",
        },
    )
    expected = ["tpurun-one house/hall house/room: a circle between folders, expected none"]
    assert list(faults(parts, Limits())) == expected


def test_methods_are_counted_over_all_files(tmp_path: Path):
    several = "".join(f"pub fn of_{number}(&self) {{ fn inner() {{}} }}" for number in range(20))
    parts = workspace(
        tmp_path,
        one={
            "lib.rs": "mod a; mod b;",
            "a.rs": "pub struct Big<'a, T> { one: &'a T, pub two: Vec<(u8, u8)>, }"
            f"\nimpl<'a, T> Big<'a, T> where T: Fn() -> u8 {{ {several} }}"
            "\n#[cfg(test)]\nimpl Big<'_, u8> { fn of_tests() {} }",
            "b.rs": f"use crate::a::Big;\nimpl Big<'_, u8> {{ {several} fn more() {{}} }}"
            "\nimpl Clone for Big<'_, u8> { fn clone(&self) -> Self { todo() } }\nstruct Big2; impl Big2 {}",
        },
    )
    big = next(one for one in parts[0].types if one.name == "Big")
    assert (big.methods, big.fields, big.public) == (41, 2, True)
    assert list(faults(parts, Limits())) == ["tpurun-one Big: 41 methods, expected at most 40"]


def test_types_of_one_name_are_counted_apart(tmp_path: Path):
    parts = workspace(
        tmp_path,
        one={
            "lib.rs": "mod a;\nstruct Same;\nimpl Same { fn one() {} }",
            "a.rs": "struct Same;\nimpl Same { fn one() {} fn two() {} }",
        },
    )
    assert sorted(one.methods for one in parts[0].types) == [1, 2]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("impl Of { fn long() {\n" + "\n" * 49 + "} }", "tpurun-one lib Of::long: 51 lines of a function"),
        ("impl A for Of { fn long(\n) {" + "\n" * 49 + "} }", "tpurun-one lib Of::long: 51 lines"),
        ("fn long() -> [u8; 2] {\n" + "\n" * 49 + "}", "tpurun-one lib long: 51 lines of a function"),
        ("// nothing\n" * 601, "tpurun-one lib: 601 lines of a file"),
    ],
)
def test_what_is_long_is_found(tmp_path: Path, text: str, expected: str):
    found = list(faults(workspace(tmp_path, one={"lib.rs": text}), Limits()))
    assert len(found) == 1 and found[0].startswith(expected), found


def test_tests_have_no_length(tmp_path: Path):
    text = "fn short() {}\n#[cfg(test)]\nmod tests {\n  fn long() {\n" + "\n" * 600 + "  }\n}\n"
    assert not list(faults(workspace(tmp_path, one={"lib.rs": text}), Limits()))


def test_an_exception_that_nothing_needs_is_a_fault(tmp_path: Path):
    parts = workspace(tmp_path, one={"lib.rs": "pub struct Small; fn short() {}"})
    limits = Limits(
        circles_of_files={"tpurun-one 1": 6},
        circles_of_folders=["tpurun-one a b"],
        many_methods={"tpurun-one Small": 50},
        long_functions={"tpurun-one lib short": 60},
        long_files={"tpurun-one gone": 700},
    )
    found = list(faults(parts, limits))
    assert len(found) == 5 and all("no longer needed" in fault for fault in found), found


def test_an_exception_goes_so_far(tmp_path: Path):
    parts = workspace(tmp_path, one={"lib.rs": "fn long() {\n" + "\n" * 60 + "}"})
    limits = Limits(long_functions={"tpurun-one lib long": 60})
    assert list(faults(parts, limits)) == ["tpurun-one lib long: 62 lines of a function, expected at most 60"]
    assert not list(faults(parts, replace(limits, long_functions={"tpurun-one lib long": 62})))


def test_circles_of_the_package_are_found(tmp_path: Path):
    package = workspace(
        tmp_path,
        python={
            "__init__.py": "from . import a\nhere = 1\n",
            "a.py": "from tpurun.b import name\nfrom . import here, compiled\nimport tpurun.room.inner\n",
            "b.py": "import os\ndef f():\n    from .room import inner, of_room\n",
            "room/__init__.py": "of_room = 1\n",
            "room/inner.py": "from .. import b\nfrom ..a import other\n",
        },
    )[0]
    assert package.graph == {
        "__init__": {"a": {"a"}},
        "a": {"b": {"name"}, "__init__": {"here"}, "room/inner": {"inner"}},
        "b": {"room/inner": {"inner (late)"}, "room": {"of_room (late)"}},
        "room": {},
        "room/inner": {"b": {"b"}, "a": {"other"}},
    }
    assert floors.circles(package.graph) == [["__init__", "a", "b", "room/inner"]]


def test_conditions_of_the_build_that_ships():
    assert rust_source.condition("all(any(test, fuzzing), not(tpurun_loom))") is False
    assert rust_source.condition("not(any(test, miri))") is True
    assert rust_source.condition('any(test, target_os = "linux")') is None


def test_the_repository_is_within_the_limits():
    found = list(faults(parts_of(ROOT), floors.LIMITS))
    assert not found, "see `make floors`:\n" + "\n".join(found)
