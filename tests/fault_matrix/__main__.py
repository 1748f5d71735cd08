"""``python -m tests.fault_matrix``: runs the matrix, or a part of it, and says what is wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..tools.choices import names_of
from . import other, start
from .cells import FAULTS, MODES, OPS, Cell, cells
from .judge import Judged
from .oracle import MEANINGLESS, expected
from .other import Outcome
from .table import page

# Gloo on 64 ranks takes minutes for what takes seconds here, and says the same.
GLOO_RANKS = 8
WIDTH = 400


def main() -> int:
    options = parse()
    chosen = list(cells(options.ranks, options.faults, options.ops, options.modes))
    began = time.monotonic()
    judged: list[Judged] = []
    others: list[Outcome] = []
    if options.backend != "gloo":
        judged = start.run(chosen, Progress(chosen).judged)
    if options.backend != "tpu_dist":
        few = [cell for cell in chosen if cell.ranks <= GLOO_RANKS]
        others = other.run(few, "gloo", Progress(few).outcome)
    wrong = [one for one in judged if not one.is_right]
    if options.out is not None:
        command = "python -m tests.fault_matrix " + " ".join(sys.argv[1:])
        options.out.write_text(page(judged, others, command, time.monotonic() - began))
    print(f"{len(judged)} cells, {len(judged) - len(wrong)} right, {len(wrong)} wrong", flush=True)
    return 1 if wrong else 0


class Progress:
    """One line for each cell."""

    def __init__(self, chosen: Sequence[Cell]) -> None:
        self.total = sum(expected(cell).kind != MEANINGLESS for cell in chosen)
        self.done = 0

    def judged(self, one: Judged) -> None:
        took = "" if one.seconds is None else f" {one.seconds * 1e3:.1f} ms"
        self.line("ok" if one.is_right else "WRONG", one.cell, f"{one.kind}{took} {'; '.join(one.problems)}")

    def outcome(self, one: Outcome) -> None:
        self.line("gloo", one.cell, f"{one.what} {one.text}")

    def line(self, lead: str, cell: Cell, text: str) -> None:
        self.done += 1
        folded = " ".join(text.split())
        print(f"{self.done:>4}/{self.total} {lead:<5} {cell.name}  {folded[:WIDTH]}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_matrix", description=__doc__)
    parser.add_argument("--ranks", type=numbers, default=[2, 8, 64], help="numbers of ranks [2,8,64]")
    for name, known in [("faults", FAULTS), ("ops", OPS), ("modes", MODES)]:
        parser.add_argument(
            f"--{name}", type=names_of(known), default=list(known), help=f"all, or some of {','.join(known)}"
        )
    parser.add_argument(
        "--backend",
        choices=["tpu_dist", "gloo", "both"],
        default="tpu_dist",
        help="Gloo up to 8 ranks [tpu_dist]",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as Markdown")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    given = [int(part) for part in text.split(",")]
    if min(given) < 2:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 2 ranks, given {text}")
    return given


if __name__ == "__main__":
    sys.exit(main())
