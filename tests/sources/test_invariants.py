"""The laws of docs/invariants.md: what it names exists, and its tables are what the sources say.

Sources are read as text, which is quick and finds what a person would write. It is no proof.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAWS = (ROOT / "docs/invariants.md").read_text()
CRATES = [
    "topology",
    "collectives/kernels",
    "collectives/memory",
    "collectives/protocol",
    "collectives/engine",
    "runtime",
    "runtime/program",
    "launcher",
]
# Crates without I/O, and what they may depend on.
PURE = {"topology": ["petgraph", "thiserror"], "runtime/program": ["thiserror", "twox-hash"]}
TESTED = re.compile(r"\n *#\[cfg\([^\n]*\btest\b[^\n]*\n *(?:pub(?:\([a-z]+\))? )?mod \w+ \{")


def law(number: int) -> str:
    """The section of one law."""
    return re.search(rf"^## I{number}\. .*?(?=^## I|\Z)", LAWS, re.M | re.S)[0]


def listed(number: int, ends: tuple[str, ...] = (".rs", ".cpp", ".py")) -> set[str]:
    """The files in the first column of the tables of a law."""
    cells = re.findall(r"^\| ([^|]+) \|", law(number), re.M)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell) if name.endswith(ends)}


@cache
def code(path: Path) -> str:
    """A source without its comments, and without the tests at its end."""
    return re.sub(r"//[^\n]*", "", TESTED.split(path.read_text())[0])


def sources() -> list[Path]:
    """The sources in Rust and C++ of what ranks and launcher run."""
    rust = [path for crate in CRATES for path in (ROOT / crate / "src").rglob("*.rs")]
    ours = [*rust, *(ROOT / "python/csrc").rglob("*.cpp")]
    tests = {"tests", "tests.rs", "fuzzing", "fuzzing.rs", "simulation.rs", "fuzz_smoke.rs", "model.rs"}
    return sorted(path for path in ours if not tests & set(path.relative_to(ROOT).parts))


def with_pattern(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in sources() if re.search(pattern, code(path))}


def test_laws_are_numbered_and_whole():
    titles = re.findall(r"^## I(\d+)\. ", LAWS, re.M)
    assert titles == [str(number) for number in range(1, len(titles) + 1)]
    for number in titles:
        for field in ("Owner", "Held by", "Limits"):
            assert f"- **{field}:** " in law(int(number)), f"I{number} does not say {field}"


def test_what_the_laws_name_exists():
    rust = "\n".join(path.read_text() for crate in CRATES for path in (ROOT / crate).rglob("*.rs"))
    for name in re.findall(r"\btest\((\w+)\)", LAWS.split("\n## ", 1)[1]):
        assert re.search(rf"\b(fn|mod) {name}\b", rust), f"no Rust test or module {name}"
    for path, node in re.findall(r"`((?:python/)?tests/[\w/]+\.py)::(\w+)`", LAWS):
        assert f"def {node}(" in (ROOT / path).read_text(), f"{path} has no {node}"
    for owner in re.findall(r"^- \*\*Owner:\*\* (.*(?:\n  .*)*)", LAWS, re.M):
        for path in re.findall(r"`([\w./]+/[\w.]+)`", owner):
            assert (ROOT / path).exists(), f"no {path}"


def test_laws_that_sources_name_exist():
    laws = set(re.findall(r"^## (I\d+)\. ", LAWS, re.M))
    for path in sources():
        text = path.read_text()
        named = set(re.findall(r"\blaws? (I\d+)\b", text))
        assert named <= laws, f"{path}: {named - laws}"
        assert not re.search(r"\bcontract C\d", text), f"{path} names a contract that no document has"


def test_plans_are_pure():
    pure = [path for path in sources() if any(path.is_relative_to(ROOT / crate) for crate in PURE)]
    execution = ROOT / "collectives/engine/src/execute/execution"
    pure += [execution.with_suffix(".rs"), *execution.glob("*.rs")]
    modules = "fs|io|net|time|thread|env|process|sync::(Mutex|Condvar|atomic)"
    impure = rf"\bstd::({modules})\b|\btracing::|\be?println!"
    for path in pure:
        found = path.name != "tests.rs" and re.search(impure, code(path))
        assert not found, f"{path}: {found[0]}"
    for crate, dependencies in PURE.items():
        manifest = (ROOT / crate / "Cargo.toml").read_text()
        needed = re.search(r"^\[dependencies\]\n(.*?)\n\n", manifest, re.M | re.S)[1]
        assert re.findall(r"^[\w-]+", needed, re.M) == dependencies, needed


def test_no_crate_knows_python():
    lock = (ROOT / "Cargo.lock").read_text()
    assert not re.findall(r'^name = "(?:pyo3|cpython|python3-sys|tch|torch-sys).*"', lock, re.M)
    borders = {
        "collectives/engine/src/ffi.rs",
        "collectives/engine/src/ffi/program_runs.rs",
        "runtime/src/ffi.rs",
        "runtime/src/ffi/program.rs",
    }
    # A handler of forks each, and the check of a thread that waits.
    others = {
        "collectives/memory/src/process.rs",
        "runtime/src/process.rs",
        "collectives/memory/src/sync/interrupt.rs",
    }
    foreign = {name for name in with_pattern(r'extern "C"') if name.endswith(".rs")}
    assert foreign == borders | others
    assert {name for name in with_pattern(r"no_mangle") if name.endswith(".rs")} == borders


def test_the_header_says_who_may_call_what():
    header = (ROOT / "python/csrc/abi/tpurun.h").read_text()
    body = header.split('extern "C" {', 1)[1]
    ends = [0, *(found.end() for found in re.finditer(r"^[A-Za-z][\w* ]* \*?tpurun_\w+\([^;]*;", body, re.M))]
    assert len(ends) > 20
    for begin, end in pairwise(ends):
        text = " ".join(body[begin:end].replace("//", " ").split())
        name = re.findall(r"\b(tpurun_\w+)\(", text)[-1]
        assert re.search(r"\b(Any|Only the) thread\b", text), f"{name} does not say which thread may call it"
        assert re.search(r"\b(Blocks|Never blocks)\b", text), f"{name} does not say whether it blocks"


def test_words_that_are_compared_and_swapped():
    assert with_pattern(r"\b(compare_exchange|fetch_update)") == listed(6)


def test_shared_memory_has_no_lock():
    assert with_pattern(r"\bunsafe impl\b.* Shareable for\b") == {"collectives/memory/src/region.rs"}
    region = (ROOT / "collectives/memory/src/region.rs").read_text()
    shared = re.findall(r"impl(?:<.*?>)? Shareable for (?:\w+::)*([\w\[\]; ]+) \{\}", region)
    words = {"Word", "AtomicU32", "AtomicU64", "[T; COUNT]"}
    primitives = {"Publication", "Attendance", "Hands", "Doorbell", "Meeting", "RingCounters", "PieceCount"}
    assert set(shared) == words | primitives, "a type that processes share: say here that it holds no lock"
    files = ["publication", "attendance", "hands", "doorbell", "meeting", "ring", "chain", "ballot"]
    for name in files:
        source = code(ROOT / f"collectives/memory/src/sync/{name}.rs")
        assert not re.search(r"\b(Mutex|RwLock|Condvar|pthread_mutex)\b", source), f"{name}.rs has a lock"


def test_unbounded_channels():
    assert with_pattern(r"\bunbounded_channel\b|\bmpsc::channel\(\)") == listed(8)


def test_threads_are_on_the_list():
    found = with_pattern(r"\bthread::(Builder|spawn\()|\bstd::thread\(|\bpthread_create\b")
    package = [path for path in (ROOT / "python/tpurun").rglob("*.py") if "Thread(" in path.read_text()]
    assert found | {str(path.relative_to(ROOT)) for path in package} == listed(9)


def test_the_launcher_reads_before_it_acts():
    acts = r"\btokio\b|\bthread::|\.spawn\("
    for room in ("command_line", "job", "place", "base"):
        for path in (ROOT / "launcher/src" / room).rglob("*.rs"):
            found = re.search(acts, code(path))
            assert not found or path.stem == "signals", f"{path.name}: {found[0]}"
    main = code(ROOT / "launcher/src/main.rs")
    assert not re.search(acts, main), "main.rs leaves what runs a job to its modules"
    assert "#![forbid(unsafe_code)]" in main
    body = main.split("fn main_code()", 1)[1].split("let cli = words::parse(", 1)[0]
    called = set(re.findall(r"\b((?:\w+::)+\w+)\(", body))
    begins = {"std::env::args_os", "ssh::follow", "Origin::parse", "agent::run", "decide::job"}
    assert called <= begins | {"words::parse"}, "what runs before the command line is understood"


@pytest.mark.parametrize("crate", CRATES)
def test_unsafe_code_is_on_the_list(crate: str):
    allowed = listed(15)
    folders = tuple(name.removesuffix(".rs") + "/" for name in allowed)
    for path in (ROOT / crate / "src").rglob("*.rs"):
        name = str(path.relative_to(ROOT))
        if re.search(r"allow\([^)]*\bunsafe_code\b", path.read_text()):
            assert name in allowed or name.startswith(folders), f"{name} allows unsafe code"
    for lint in ("unsafe_code", "undocumented_unsafe_blocks", "multiple_unsafe_ops_per_block"):
        assert f'{lint} = "deny"' in (ROOT / "Cargo.toml").read_text()
    assert "[lints]\nworkspace = true" in (ROOT / crate / "Cargo.toml").read_text()


def test_targets_of_the_launcher_run_as_tests():
    targets = {path.stem for path in (ROOT / "launcher/fuzz/fuzz_targets").glob("*.rs")}
    smoke = (ROOT / "launcher/src/fuzz_smoke.rs").read_text()
    assert targets == set(re.findall(r'\bsmoke\("(\w+)"', smoke))
