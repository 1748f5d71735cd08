"""``python -m tests.conformance.ops``: compares the device with the CPU, and writes down what came out.

With `--way compiled` or `--way fused` it compares the device with itself: each operation through
torch.compile,
or in DEFER_AND_FUSE, with Strict.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from pathlib import Path

# One thread: sums over several have other bits. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ...tools.choices import names_of
from ...tools.compiling import BACKEND
from . import workers
from .cases import COMPILED_KINDS, KINDS, NAMES, Choice, Done, chosen
from .report import page
from .running import Way
from .tally import Tally


def main() -> int:
    options = parse()
    # The way out is through `finally`, which ends the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = options.names if options.exact else chosen(options.names, options.slice)
    choice = Choice(options.kinds, options.dtypes, options.way, options.backend)
    began = time.monotonic()
    cases = []
    for done in workers.run_all(names, choice, options.jobs, options.limit):
        cases.append(done)
        tell(done, f"{len(cases)}/{len(names)}")
    tally = Tally.of(
        " ".join(["python -m tests.conformance.ops", *sys.argv[1:]]), time.monotonic() - began, cases
    )
    if options.out is not None:
        path = options.out / "conformance" / "ops.json"
        if len(names) < len(NAMES):
            tally = tally.over(Tally.read(path))
        tally.write(path)
        (options.out / "conformance-ops.md").write_text(page(tally))
    for row in tally.rows():
        print("{:<16} passed {:>7}  failed {:>6}  excused {:>6}".format(*row))
    return 1 if tally.failed else 0


def tell(done: Done, where: str) -> None:
    counts = " ".join(f"{kind} {count}" for kind, count in sorted(done.passed.items()))
    print(f"{where} {done.name}: {counts}", flush=True)
    for one in done.failed:
        print(f"  FAILED {one.kind} {one.dtype} x{one.count}: {one.text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.ops", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of operations [all]")
    parser.add_argument("--exact", action="store_true", help="the names as a whole, not parts of them")
    parser.add_argument("--kinds", type=names_of(KINDS), help=f"of {','.join(KINDS)} [all that the way has]")
    parser.add_argument("--way", choices=[way.value for way in Way], default="cpu", help="[cpu]")
    parser.add_argument("--backend", default=BACKEND, help=f"of torch.compile [{BACKEND}]")
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=(), help="float32,int64,.. [what the CPU has]"
    )
    parser.add_argument("--slice", type=slice_of, default=(1, 1), metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes [1]")
    parser.add_argument(
        "--limit", type=float, default=600, metavar="SECONDS", help="of computing for one name [600]"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="write the results and the page there; those of other names stay",
    )
    options = parser.parse_args()
    if options.kinds is None:
        options.kinds = COMPILED_KINDS if options.way == Way.COMPILED.value else KINDS
    if options.exact and (unknown := set(options.names) - set(NAMES)):
        parser.error(f"expected names of operations, given {', '.join(sorted(unknown))}")
    if options.out is not None and options.way != Way.CPU.value:
        parser.error(f"expected --out with --way cpu, given {options.way}")
    if options.out is not None and (options.dtypes or len(options.kinds) < len(KINDS)):
        parser.error("expected --out with all kinds and dtypes, given some")
    return options


def slice_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, given {text!r}")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    sys.exit(main())
