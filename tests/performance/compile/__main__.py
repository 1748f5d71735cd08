"""``python -m tests.performance.compile``: measures, and prints the tables.

Under a launcher it is the rank.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

from ..job import TPURUN, Failed, Job, Late, Row
from . import alone, rank
from .options import Options, parse
from .report import disagreements, report

LIMIT_S = 900.0
"""For a work: inductor compiles an unrolled network for a minute, on a machine that others use, too."""


def main() -> int:
    # Ends the job that is being measured before this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = parse(sys.argv[1:])
    rows: list[Row] = []
    for row in measured(options):
        rows.append(row)
        print(
            f"compile: {row.get('work') or row.get('alone') or next(iter(row))}", file=sys.stderr, flush=True
        )
    print(report(rows, options))
    wrong = disagreements(rows)
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    return 1 if wrong else 0


def measured(options: Options) -> Iterator[Row]:
    """The parts that are measured in one rank, then those that need fresh processes."""
    in_rank = options.of_part("steps", "call")
    if in_rank.parts:
        yield from rank.measured(in_rank) if rank.is_rank() else in_a_rank(in_rank)
    yield from alone.measured(options)


def in_a_rank(options: Options) -> Iterator[Row]:
    """The rows of a job of one rank."""
    command = [TPURUN, "-n", "1", "-m", f"{__package__}.rank", *options.arguments()]
    try:
        with Job(command) as job:
            yield from job.rows(LIMIT_S)
    except Late:
        yield {"missing": f"over {LIMIT_S:.0f} s"}
    except Failed as failed:
        yield {"missing": str(failed)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
