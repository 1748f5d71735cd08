"""Counts the instructions of `benches/instructions.rs` and compares them with those that are known.

``python .ci/instructions.py [--accept]``: needs valgrind. Fails when a case executes more than a few per cent
more or less than `collectives/engine/benches/instructions.json` says; `--accept` writes what is found there.
The numbers are of one compiler for one kind of CPU: with others nothing is compared.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "collectives" / "engine" / "benches" / "instructions.json"
BUILD = [
    "cargo",
    "bench",
    "--package",
    "tpurun-engine",
    "--locked",
    "--bench",
    "instructions",
    "--no-run",
]
COUNT = [
    "valgrind",
    "--quiet",
    "--tool=callgrind",
    "--collect-atstart=no",
    "--toggle-collect=tpurun_measured",
]
TOLERANCE = 0.03
LIMIT_S = 300


def compiler() -> str:
    text = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = next(line.removeprefix("host: ") for line in text.splitlines() if line.startswith("host: "))
    return f"{text.splitlines()[0]}, {host}"


def built() -> str:
    messages = subprocess.run(
        [*BUILD, "--message-format=json"], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout
    found = [json.loads(line).get("executable") for line in messages.splitlines()]
    return [executable for executable in found if executable][-1]


def counted(binary: str, case: str) -> int:
    """Instructions of one call."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = [*COUNT, f"--callgrind-out-file={out}", binary, case]
        # Variables that a test or a job has set would change what is counted.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN_")}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S, env=kept)
        total = re.search(r"^(?:totals|summary): (\d+)", out.read_text(), re.MULTILINE)
    if total is None or int(total[1]) == 0:
        raise SystemExit(f"instructions: callgrind has counted nothing of {case!r}")
    return int(total[1]) // 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accept", action="store_true", help="write what is found to instructions.json")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("instructions: not counted, there is no valgrind (apt-get install valgrind)")
        return 0
    binary = built()
    cases = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.splitlines()
    found = {case: counted(binary, case) for case in cases}
    if options.accept:
        KNOWN.write_text(json.dumps({"compiler": compiler(), "instructions": found}, indent=2) + "\n")
    known = json.loads(KNOWN.read_text())
    is_comparable = known["compiler"] == compiler()
    failed = False
    for case, count in found.items():
        before = known["instructions"].get(case)
        change = None if before is None else count / before - 1
        is_other = is_comparable and (change is None or abs(change) > TOLERANCE)
        failed |= is_other
        shown = "new" if change is None else f"{change:+.1%}"
        print(f"{case:<32} {count:>8} instructions  {shown:>7}{'  NOT AS KNOWN' if is_other else ''}")
    if not is_comparable:
        print(f"instructions: not compared, those known are of {known['compiler']}, this is {compiler()}")
    if failed:
        print(
            f"instructions: expected at most {TOLERANCE:.0%} more or less than in {KNOWN.relative_to(ROOT)}; "
            "if that is meant, run `python .ci/instructions.py --accept` and say why in the commit"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
