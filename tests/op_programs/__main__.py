"""``python -m op_programs`` in `tests`: random programs of operations on device tpu, against the CPU."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from .program import Wrong, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m op_programs", description=__doc__)
    parser.add_argument("--programs", type=int, default=300, metavar="N", help="[300]")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; each has the next [0]")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one and show where it fails")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay is not None:
        run(options.replay)
        return 0
    wrong, began = 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.programs):
        try:
            run(seed)
        except Wrong as error:
            wrong += 1
            print(f"program {seed}: {str(error)[:1500]}")
            print(f"  replay: python -m op_programs --replay {seed}", flush=True)
        if (seed - options.seed) % 1000 == 999:
            print(f"{seed - options.seed + 1} of {options.programs}", file=sys.stderr, flush=True)
    print(f"{options.programs} programs, {wrong} wrong, in {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
