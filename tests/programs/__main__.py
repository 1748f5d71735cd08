"""``python -m programs`` in `tests`: runs programs under a launcher and says what is wrong."""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatch

from tools.compiling import BACKEND
from tools.namespaces import NotAllowed

from .case import FAMILIES, WAYS, Program
from .start import LAUNCHERS, Verdict, all_programs, run, run_beside_strict

DEVICES = ["cpu", "tpu", "tpu:rank", "tpu:rank+set"]


def main() -> int:
    options = parse()
    there = all_programs(options.families, options.device.partition(":")[0])
    chosen = [one for one in there if fnmatch(one.name, options.only)]
    if options.ranks is not None:
        chosen = [one for one in chosen if options.ranks in one.sizes]
    if not chosen:
        sys.exit(f"expected a pattern that a program fits, given {options.only}")
    try:
        verdicts = run_chosen(chosen, options)
    except NotAllowed as why:
        sys.exit(f"network namespaces: {why}")
    for verdict in verdicts:
        word = "WRONG" if verdict.problems else "ok"
        ranks = f"{verdict.program.ranks:2} ranks"
        print(f"{word:<5} {verdict.seconds:6.1f} s  {ranks}  {verdict.program.name}")
        for problem in verdict.problems:
            print("      " + problem.replace("\n", "\n      "))
    wrong = sum(bool(verdict.problems) for verdict in verdicts)
    how = f"under {options.launcher} on {options.backend} and {options.device}"
    print(f"{len(verdicts)} programs {how}, {wrong} wrong")
    return 1 if wrong else 0


def run_chosen(chosen: list[Program], options: argparse.Namespace) -> list[Verdict]:
    how = {"launcher": options.launcher, "backend": options.backend, "each": options.ranks}
    if options.way == "strict":
        return run(chosen, device=options.device, **how)
    return run_beside_strict(chosen, options.way, compiler=options.compiler, **how)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m programs", description=__doc__)
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="tpurun",
        help="`nodes`: one tpurun in each of 4 network namespaces, as root; `hosts`: pretended ones [tpurun]",
    )
    parser.add_argument("--backend", choices=["tpu_dist", "gloo"], default="tpu_dist", help="[tpu_dist]")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="[cpu]")
    parser.add_argument(
        "--way",
        choices=WAYS,
        default="strict",
        help="compiled, fused: on device tpu, against strict [strict]",
    )
    parser.add_argument("--compiler", default=BACKEND, help=f"the backend of torch.compile [{BACKEND}]")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="of all programs that are for so many (1, 4, 8, 16) [its own]"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as 'ddp/*' [*]")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="[all]")
    options = parser.parse_args()
    if options.way != "strict":
        options.device = "tpu"
    return options


if __name__ == "__main__":
    sys.exit(main())
