"""Measures the thresholds by which collectives are planned, and writes them for `TPURUN_TUNING`.

A threshold says from which size on one way to run a collective is taken instead of another. For each of them
two groups are made, of which one always takes the first way and the other one always the second; both are
timed in turn, size by size (`bench.measure`). The threshold is the size for which the sum of the logarithms
of the times is least: so each size counts alike, and one bad measurement moves it by one size at most. One
that gains less than `LEAST_GAIN` against ours stays as it is.

The meaning of each threshold is in docs/tuning/README.md.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch.distributed as dist

from tpurun import bench

K, M = 1 << 10, 1 << 20
# The largest threshold there is: with it, a way is never taken.
NEVER = 1 << 40
# A part of the time that all sizes take together.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Machine:
    """The place of a job: `cpus` are those that this process may use."""

    ranks: int
    cpus: int
    hosts: int

    @property
    def is_shared(self) -> bool:
        return self.hosts == 1 and self.ranks > self.cpus


@dataclass(frozen=True)
class Threshold:
    """A number of the tuning that is a size in bytes.

    `numbers` are set together, each to the size times what it says. `others` are numbers of both groups.
    """

    name: str
    collective: str
    memory: str
    sizes: tuple[int, int]
    default: Callable[[Machine], float]
    """The size that ours mean on a machine."""
    numbers: Callable[[Machine], dict[str, float]]
    applies: Callable[[Machine], bool]
    others: dict[str, int] = field(default_factory=dict)


def _one(name: str) -> Callable[[Machine], dict[str, float]]:
    return lambda _: {name: 1}


def _part(name: str) -> Callable[[Machine], dict[str, float]]:
    return lambda machine: {name: 1 / machine.ranks}


# Tensors in arenas are used there from the part of their kind on.
PARTS_ALONE = {"in_place_bytes": 0}
# Tensors in arenas are used there, however small.
IN_PLACE = {
    "in_place_bytes": 0,
    "in_place_fold_part": 0,
    "in_place_broadcast_part": 0,
    "in_place_chunk_part": 0,
}

THRESHOLDS = (
    Threshold(
        "pipeline_bytes",
        "all_reduce",
        "staged",
        (64 * K, 8 * M),
        default=lambda machine: 512 * K if _are_many(machine) else M,
        numbers=lambda machine: {"pipeline_bytes_many" if _are_many(machine) else "pipeline_bytes": 1},
        applies=lambda machine: machine.is_shared,
    ),
    Threshold(
        "in_place_fold_part",
        "all_reduce",
        "mapped",
        (16 * K, M),
        default=lambda machine: max(16 * K, 4 * K * machine.ranks),
        numbers=_part("in_place_fold_part"),
        applies=lambda machine: machine.hosts == 1,
        others=PARTS_ALONE,
    ),
    Threshold(
        "in_place_broadcast_part",
        "broadcast",
        "mapped",
        (16 * K, M),
        default=lambda machine: max(16 * K, 8 * K * machine.ranks),
        numbers=_part("in_place_broadcast_part"),
        applies=lambda machine: machine.hosts == 1,
        others=PARTS_ALONE,
    ),
    Threshold(
        "in_place_chunk_part",
        "all_gather",
        "mapped",
        (64 * K, 8 * M),
        # The size is that of all chunks.
        default=lambda machine: machine.ranks * max(16 * K, 512 * machine.ranks),
        numbers=lambda machine: {"in_place_chunk_part": 1 / machine.ranks**2},
        applies=lambda machine: machine.hosts == 1,
        others=PARTS_ALONE,
    ),
    Threshold(
        "shares_fold_bytes",
        "all_reduce",
        "mapped",
        (64 * K, 8 * M),
        default=lambda machine: min(M, 64 * K * machine.ranks),
        numbers=lambda machine: {"shares_fold_bytes": 1, "shares_fold_part": 1 / machine.ranks},
        applies=lambda machine: machine.is_shared,
        others=IN_PLACE,
    ),
    Threshold(
        "shares_broadcast_bytes",
        "broadcast",
        "mapped",
        (64 * K, 8 * M),
        default=lambda _: 512 * K,
        numbers=_one("shares_broadcast_bytes"),
        applies=lambda machine: machine.is_shared,
        others=IN_PLACE,
    ),
    Threshold(
        "shares_bytes",
        "all_to_all",
        "mapped",
        (16 * K, 2 * M),
        default=lambda _: 64 * K,
        numbers=_one("shares_bytes"),
        applies=lambda machine: machine.is_shared,
        others=IN_PLACE,
    ),
    Threshold(
        "read_by_many_bytes",
        "broadcast",
        "staged",
        (32 * K, 4 * M),
        default=lambda _: 128 * K,
        numbers=_one("read_by_many_bytes"),
        applies=lambda machine: machine.hosts == 1 and machine.ranks > 2,
    ),
    Threshold(
        "cache_bytes",
        "all_reduce",
        "staged",
        (M, 32 * M),
        default=lambda machine: 64 * M / machine.ranks,
        numbers=lambda machine: {"cache_bytes": machine.ranks},
        applies=lambda machine: machine.hosts == 1,
    ),
    Threshold(
        "hierarchical_bytes",
        "all_reduce",
        "staged",
        (16 * K, M),
        default=lambda _: 16 * K,
        numbers=_one("hierarchical_bytes"),
        applies=lambda machine: 1 < machine.hosts < machine.ranks,
        others={"scattered_bytes": NEVER},
    ),
    Threshold(
        "scattered_bytes",
        "all_reduce",
        "staged",
        (32 * K, 4 * M),
        default=lambda _: 128 * K,
        numbers=_one("scattered_bytes"),
        applies=lambda machine: machine.hosts > 2,
    ),
)

# The least that the engine takes, where it is not 0.
LEAST = {"cache_bytes": K}


def _are_many(machine: Machine) -> bool:
    return machine.ranks // machine.cpus >= 32


def scaled(threshold: Threshold, machine: Machine, size: float) -> dict[str, int]:
    """The numbers that make `size` the threshold."""
    numbers = threshold.numbers(machine).items()
    return {name: max(LEAST.get(name, 0), min(NEVER, round(size * each))) for name, each in numbers}


def as_variable(numbers: dict[str, int]) -> str:
    """As `TPURUN_TUNING` has them."""
    return "{ " + ", ".join(f"{name} = {value}" for name, value in numbers.items()) + " }"


@dataclass(frozen=True)
class Measured:
    """The seconds that each size takes by the two ways."""

    sizes: Sequence[int]
    first: Sequence[float]
    second: Sequence[float]

    def gain(self, threshold: float, against: float) -> float:
        """The part of the time that one threshold saves against another, each size counted alike."""
        return 1 - math.exp((self._cost(threshold) - self._cost(against)) / len(self.sizes))

    def best(self, default: float) -> float:
        """The threshold with the least time; the default if nothing gains enough against it."""
        candidates = [*self.sizes, 2 * self.sizes[-1]]
        best = min(candidates, key=self._cost)
        # Ours may be beyond what was measured, where nothing contradicts it.
        is_beyond = (best == candidates[-1] and default > best) or (best == candidates[0] and default < best)
        return default if is_beyond or self.gain(best, default) < LEAST_GAIN else best

    def _cost(self, threshold: float) -> float:
        rows = zip(self.sizes, self.first, self.second, strict=True)
        return sum(math.log(first if size >= threshold else second) for size, first, second in rows)


@contextmanager
def _groups(first: dict[str, int], second: dict[str, int]) -> Iterator[list[dist.ProcessGroup]]:
    """Two groups of all ranks, with these numbers."""
    before = os.environ.get("TPURUN_TUNING")
    groups = []
    try:
        for numbers in (first, second):
            os.environ["TPURUN_TUNING"] = as_variable(numbers)
            groups.append(dist.new_group(backend="tpu_dist"))
            # A group is made with its first operation.
            dist.barrier(group=groups[-1])
        yield groups
    finally:
        if before is None:
            del os.environ["TPURUN_TUNING"]
        else:
            os.environ["TPURUN_TUNING"] = before
        for group in groups:
            dist.destroy_process_group(group)


def measure(threshold: Threshold, machine: Machine, seconds: float, show: Callable[[str], None]) -> Measured:
    """Times both ways. All ranks call this together; `seconds` is for each size and way."""
    always = threshold.others | scaled(threshold, machine, 0)
    never = threshold.others | dict.fromkeys(threshold.numbers(machine), NEVER)
    sizes = [threshold.sizes[0]]
    while sizes[-1] < threshold.sizes[1]:
        sizes.append(2 * sizes[-1])
    times: list[tuple[float, float]] = []
    with _groups(always, never) as groups:
        variants = [
            bench.Variant("tpu_dist", group, threshold.memory, label)
            for group, label in zip(groups, ("first", "second"), strict=True)
        ]
        for size in sizes:
            show(f"{threshold.collective} of {size} bytes")
            rows = bench.measure(threshold.collective, size, variants, seconds)
            times.append((rows[0].time_us / 1e6, rows[1].time_us / 1e6))
    first, second = zip(*times, strict=True)
    return Measured(sizes, first, second)


@dataclass(frozen=True)
class Finding:
    """The result for one threshold."""

    threshold: Threshold
    measured: Measured
    default: float
    best: float

    def line(self) -> str:
        """For people: what it is now, and what the first way gains at each size."""
        ratios = " ".join(
            f"{_size(size)}:{second / first:.2f}"
            for size, first, second in zip(
                self.measured.sizes, self.measured.first, self.measured.second, strict=True
            )
        )
        kept = "as ours" if self.best == self.default else f"ours {_size(self.default)}"
        return (
            f"{self.threshold.name:<24} from {_size(self.best):>6} ({kept}) of {self.threshold.collective}; "
            f"speed by size: {ratios}"
        )


def _size(size: float) -> str:
    for unit, name in ((M, "M"), (K, "K")):
        if size >= unit:
            return f"{size / unit:.4g}{name}"
    return f"{size:.4g}"


def as_toml(findings: Sequence[Finding], machine: Machine, when: str) -> str:
    """The file: what was found, with what it was found from."""
    lines = [
        f"# Thresholds of collectives, in bytes, measured by `tpurun bench --tune` on {when} with",
        f"# {machine.ranks} ranks on {machine.cpus} CPUs of {machine.hosts} host{'s'[: machine.hosts - 1]}.",
        "# Use them with `tpurun --tuning FILE` or TPURUN_TUNING=FILE. The speeds are those of the way that",
        "# is taken from the threshold on, against the other one.",
    ]
    # A part that is less than in_place_bytes counts only without that, and then all parts have to be said.
    parts = [finding for finding in findings if finding.threshold.others == PARTS_ALONE]
    parts_alone = any(part.best < part.default for part in parts)
    for finding in findings:
        lines += ["", f"# {finding.line()}"]
        if finding.best != finding.default or (parts_alone and finding in parts):
            numbers = scaled(finding.threshold, machine, finding.best)
            lines += [f"{name} = {value}" for name, value in numbers.items()]
        else:
            lines += ["# as it is without this file"]
    if parts_alone:
        lines += ["", *(f"{name} = {value}" for name, value in PARTS_ALONE.items())]
    return "\n".join(lines) + "\n"


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.exists():
        raise argparse.ArgumentTypeError(f"expected a file that does not exist yet, given {path}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, given {path}")
    return path


def run(path: Path, seconds: float) -> None:
    """Measures every threshold that counts here; rank 0 writes the file. All ranks call this together."""
    rank = dist.get_rank()
    # A group's rank 0 decides how many CPUs count, and so does that of the job.
    machine = Machine(
        ranks=dist.get_world_size(),
        cpus=len(os.sched_getaffinity(0)),
        hosts=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )
    known = [machine]
    dist.broadcast_object_list(known, src=0)
    machine = known[0]
    thresholds = [threshold for threshold in THRESHOLDS if threshold.applies(machine)]
    progress = bench.Progress(len(thresholds), rank == 0)
    findings = []
    for threshold in thresholds:
        progress.case = threshold.name
        measured = measure(threshold, machine, seconds, progress.show)
        default = threshold.default(machine)
        findings.append(Finding(threshold, measured, default, measured.best(default)))
        progress.done += 1
        if rank == 0:
            progress.clear()
            print(findings[-1].line(), flush=True)
    progress.finish()
    if rank == 0:
        when = datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d")
        with path.open("x") as file:
            file.write(as_toml(findings, machine, when))
        print(f"written to {path}: use it with `tpurun --tuning {path}`", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs as one rank of a job that a launcher started."""
    parser = argparse.ArgumentParser(
        prog="tpurun bench --tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=_new_file, help="for `tpurun --tuning`")
    parser.add_argument(
        "--seconds",
        type=bench.seconds,
        default=0.25,
        help="time for each size and each of two ways (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit("tpurun.tune: this is one rank of a job; start it with `tpurun bench --tune FILE`")
    dist.init_process_group("tpu_dist", timeout=timedelta(minutes=10))
    try:
        run(args.file, args.seconds)
        dist.barrier()  # the others may still read what this rank offers
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
