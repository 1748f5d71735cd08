"""``python -m op_programs`` in `tests`: random programs of operations on device tpu.

They run against the CPU, step by step (`--way cpu`), or as whole programs against the mode that runs each
operation at once: through torch.compile (`--way compiled`), or in the mode that fuses (`--way fused`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from tools.compiling import BACKEND

from . import whole
from .program import Wrong, run
from .whole import Way

WAYS = ("cpu", *(way.value for way in Way))


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    if options.replay is not None:
        runner(options, print)(options.replay)
        return 0
    run_one = runner(options)
    wrong, of_torch, began = 0, 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.programs):
        try:
            of_torch += bool(run_one(seed))
        except Wrong as error:
            wrong += 1
            print(f"program {seed}: {str(error)[:1500]}")
            print(f"  replay: python -m op_programs --way {options.way} --replay {seed}", flush=True)
        if (seed - options.seed) % 1000 == 999:
            print(f"{seed - options.seed + 1} of {options.programs}", file=sys.stderr, flush=True)
    if of_torch:
        print(f"{of_torch} differ by torch's own tracing")
    print(f"{options.programs} programs, {wrong} wrong, in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


def runner(options: argparse.Namespace, tell: Callable[[str], None] | None = None) -> Callable[[int], object]:
    """Returns a function that runs the program of a seed, and tells first what the program is."""
    if options.way == "cpu":
        return run
    return lambda seed: whole.run(seed, Way(options.way), options.backend, tell)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m op_programs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=300, metavar="N", help="[300]")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; each has the next [0]")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one and show where it fails")
    parser.add_argument("--way", choices=WAYS, default="cpu", help="[cpu]")
    parser.add_argument("--backend", default=BACKEND, help=f"of torch.compile [{BACKEND}]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
