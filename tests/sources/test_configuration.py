"""docs/configuration.md names every variable `TPURUN_*` that the sources do, and no other."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/configuration.md"
PRODUCT = ("launcher", "collectives", "runtime", "topology", "python")
# Where the variables of tests and measurements are.
AROUND = ("tests", "examples", "Makefile", ".ci")
NAME = re.compile(r"\bTPURUN_[A-Z][A-Z0-9_]*\b")
QUOTED = re.compile(rf"""["']({NAME.pattern})""")
# Comments and texts of C and C++. Constants and macros of the headers are called TPURUN_*, too, but they
# stand in the code.
NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
NATIVE = (".c", ".cpp", ".h")


def texts(places: Iterable[str]) -> dict[PurePosixPath, str]:
    """The files of the repository there that can name a variable."""
    # Also those of a change that is not committed yet.
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [PurePosixPath(path) for path in listed.split("\0") if path and "seeds" not in path]
    files = [path for path in paths if (ROOT / path).is_file()]
    return {path: (ROOT / path).read_text(errors="replace") for path in files}


def variables(files: dict[PurePosixPath, str]) -> dict[str, PurePosixPath]:
    """The variables that these files name, each with the first of the files."""
    constants: set[str] = set()
    found: dict[str, PurePosixPath] = {}
    for path, text in files.items():
        for name in NAME.findall(text):
            found.setdefault(name, path)
        if path.suffix in NATIVE:
            constants.update(NAME.findall(NO_CODE.sub(" ", text)))
    read = {name for text in files.values() for name in QUOTED.findall(text)}
    return {name: path for name, path in found.items() if name not in constants or name in read}


def is_product(path: PurePosixPath) -> bool:
    return "tests" not in path.parts


def undocumented(files: dict[PurePosixPath, str], page: str) -> list[str]:
    """The variables of the product that the page does not name, each with where it is."""
    product = {path: text for path, text in files.items() if is_product(path)}
    named = set(NAME.findall(page))
    return [f"{name} ({path})" for name, path in sorted(variables(product).items()) if name not in named]


def unknown(files: dict[PurePosixPath, str], page: str) -> list[str]:
    """The variables of the page that are nowhere else."""
    return sorted(set(NAME.findall(page)) - variables(files).keys())


def test_the_page_names_every_variable_of_the_sources() -> None:
    missing = undocumented(texts(PRODUCT), (ROOT / PAGE).read_text())
    assert not missing, f"{PAGE}: expected a row for each variable, none for: {', '.join(missing)}"


def test_the_page_names_no_variable_that_is_not_there() -> None:
    files = texts([*PRODUCT, *AROUND])
    del files[PurePosixPath(Path(__file__).resolve().relative_to(ROOT))]
    gone = unknown(files, (ROOT / PAGE).read_text())
    assert not gone, f"{PAGE}: expected variables of the sources, given: {', '.join(gone)}"


def test_the_page_is_one_that_people_read() -> None:
    assert len((ROOT / PAGE).read_bytes()) <= 16 << 10


def test_a_variable_is_told_from_a_constant_of_a_header() -> None:
    header = 'enum { TPURUN_OK = 0, TPURUN_BOTH = 1 };  // as TPURUN_NEW says\nchar a[] = "TPURUN_TEXT";'
    files = {
        PurePosixPath("python/csrc/a.h"): header,
        PurePosixPath("launcher/src/a.rs"): '// TPURUN_OK\nvar("TPURUN_BOTH"); "TPURUN_X2: bad"; TPURUN_*',
        PurePosixPath("python/tests/a.py"): '"TPURUN_TEST_ONLY"',
    }
    assert undocumented(files, "`TPURUN_TEXT`, `TPURUN_OK`") == [
        "TPURUN_BOTH (python/csrc/a.h)",
        "TPURUN_NEW (python/csrc/a.h)",
        "TPURUN_X2 (launcher/src/a.rs)",
    ]
    assert unknown(files, "`TPURUN_TEST_ONLY`, `TPURUN_OK`, `TPURUN_GONE`") == ["TPURUN_GONE", "TPURUN_OK"]
