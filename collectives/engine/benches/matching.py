"""Runs two builds of the matching benchmark in turn and says what matching costs.

``python matching.py MATCHED UNMATCHED [TURNS [BLOCK_MS]]``: each cell is the median over the turns, with the
quartiles of the difference between the two binaries of one turn. Fails when a cost is above 2 us and 2 %.
"""

import statistics
import subprocess
import sys

MOST_US = 2.0
MOST_SHARE = 0.02

Cell = tuple[str, str, str]


def measure(binary: str, block_ms: str) -> dict[Cell, float]:
    out = subprocess.run([binary, block_ms], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in out.splitlines()]
    return {(name, ranks, size): float(time) for name, ranks, size, time in rows}


def main(matched: str, unmatched: str, turns: str = "15", block_ms: str = "20") -> int:
    runs: dict[str, list[dict[Cell, float]]] = {matched: [], unmatched: []}
    for turn in range(int(turns)):
        # The one that goes first has the colder machine.
        for binary in (matched, unmatched) if turn % 2 == 0 else (unmatched, matched):
            runs[binary].append(measure(binary, block_ms))
    titles = ("matched us", "unmatched us", "cost us (quartiles)", "share")
    print("{:<12}{:>6}{:>8}{:>12}{:>14}{:>30}{:>8}".format("", "ranks", "bytes", *titles))
    failed = False
    for cell in runs[matched][0]:
        with_keys, without = ([run[cell] for run in runs[binary]] for binary in (matched, unmatched))
        costs = [a - b for a, b in zip(with_keys, without, strict=True)]
        low, cost, high = statistics.quantiles(costs, n=4)
        base = statistics.median(without)
        too_much = cost > MOST_US and cost > MOST_SHARE * base
        failed |= too_much
        name, ranks, size = cell
        medians = f"{statistics.median(with_keys):>12.2f}{base:>14.2f}"
        spread = f"{cost:.2f} ({low:.2f} to {high:.2f})"
        verdict = "  TOO MUCH" if too_much else ""
        print(f"{name:<12}{ranks:>6}{size:>8}{medians}{spread:>30}{cost / base:>8.1%}{verdict}")
    print(f"at most {MOST_US:g} us or {MOST_SHARE:.0%} per operation: {'no' if failed else 'yes'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
