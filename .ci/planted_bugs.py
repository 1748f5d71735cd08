"""Plants bugs in the concurrent parts, one at a time, and shows that the models catch each of them.

So does the simulation of several hosts with those in what they tell each other.

    .ci/planted_bugs.py [FILE ..]      for example meeting.rs

Works on a copy of the sources under target/planted. A bug that nothing catches is a hole in the models.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).parents[1]
COPY = ROOT / "target" / "planted"
SOURCES = Path("collectives")
# A bug may make a model run for ever: it is caught then, too.
LIMIT_S = 120
BUGS = ROOT / "collectives" / "planted-bugs.toml"


@dataclass(frozen=True)
class Bug:
    """`before` occurs once in `file`, or `which` says which one is meant."""

    file: str
    what: str
    before: str
    after: str
    which: int = 0
    caught_by: str = "loom"


@dataclass(frozen=True)
class Models:
    """Tests of a package whose names have `names` in them, compiled with these flags."""

    package: str
    names: str
    flags: str


MODELS = {
    "loom": Models("tpurun-memory", "loom", "--cfg tpurun_loom"),
    "simulation": Models("tpurun-engine", "network::tests::hosts", ""),
}


def main() -> int:
    # As for Ctrl-C: what runs is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    files = set(sys.argv[1:])
    bugs = [Bug(**entry) for entry in tomllib.loads(BUGS.read_text())["bug"]]
    bugs = [bug for bug in bugs if not files or Path(bug.file).name in files]
    copy_sources()
    for models in {bug.caught_by for bug in bugs}:
        if run(MODELS[models]) is not None:
            print(f"planted bugs: {models} fails without any", file=sys.stderr)
            return 1
    missed = 0
    for bug in bugs:
        began = time.monotonic()
        caught_by = planted(bug)
        missed += caught_by is None
        took = time.monotonic() - began
        print(f"{bug.file:<46} {bug.what:<45} {took:>4.0f} s  {caught_by or 'MISSED'}", flush=True)
    print(f"{len(bugs)} bugs planted, {len(bugs) - missed} caught")
    return 1 if missed else 0


def copy_sources() -> None:
    COPY.mkdir(parents=True, exist_ok=True)
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    for name in names:
        there = COPY / name
        there.parent.mkdir(parents=True, exist_ok=True)
        write(there, (ROOT / name).read_bytes())


def planted(bug: Bug) -> str | None:
    """The models that catch it; None if none does."""
    path = COPY / SOURCES / bug.file
    whole = path.read_text()
    parts = whole.split(bug.before)
    at = bug.which + 1
    if len(parts) <= at:
        raise SystemExit(f"planted bugs: {bug.file} has no {bug.before!r} any more")
    path.write_text(bug.before.join(parts[:at]) + bug.after + bug.before.join(parts[at:]))
    try:
        return run(MODELS[bug.caught_by])
    finally:
        path.write_text(whole)


def run(models: Models) -> str | None:
    """The names of the models that fail; None if all pass."""
    env = os.environ | {
        "RUSTFLAGS": models.flags,
        "LOOM_MAX_PREEMPTIONS": "2",
        "CARGO_TARGET_DIR": str(ROOT / "target" / f"planted-{models.names.partition(':')[0]}"),
    }
    command = ["cargo", "test", "--package", models.package, "--release", "--locked", "--lib"]
    command.append(models.names)
    build = subprocess.run([*command, "--no-run"], cwd=COPY, env=env, capture_output=True, text=True)
    if build.returncode != 0:
        raise SystemExit(f"planted bugs: does not compile:\n{build.stderr}")
    # A group of its own: cargo that is killed would leave the models running.
    tests = subprocess.Popen(
        command, cwd=COPY, env=env, stdout=PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        output, _ = tests.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "no end"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
    if tests.returncode == 0:
        return None
    # A model that blocks for ever panics twice, and takes the whole run with it.
    told = re.finditer(r"::(?:loom_)?(\w+)(?: \.\.\. FAILED$|' .*panicked)", output, re.MULTILINE)
    failed = sorted({match[1] for match in told})
    return ", ".join(failed) or "a crash"


def write(path: Path, content: bytes) -> None:
    """Not if it is the same: cargo would compile it again."""
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
