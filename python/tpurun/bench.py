"""Times collectives, alone or against another backend.

One process of this module is one rank; `tpurun bench` starts them for each requested number of ranks, and
any other launcher does as well. Terms and bandwidths are those of nccl-tests: `bytes` is the size of the
largest buffer of a rank, algbw is bytes / time, and busbw is algbw times the share of these bytes that a link
must carry, which makes different collectives and numbers of ranks comparable. Bandwidths are in 10^9 bytes/s.

`moved` is what all ranks read and wrote in memory, as a multiple of the least there is: each input read once,
each output written once. `memory` is how fast that was, as a share of what the memory can do, measured in the
same run. Ordinary tensors are staged in shared memory; with `--memory mapped` they are of tpurun.empty(),
which collectives use where they are.

A time is the wall time of one iteration on the slowest rank, taken over blocks of iterations that start
together. Backends are measured in turn, block by block, so that other load hits both; medians are shown.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from tpurun import _memory_speed

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}

MIN_BLOCKS = 3
MAX_BLOCKS = 7
MAX_ITERATIONS = 20_000

EXAMPLES = """\
examples:
  tpurun bench                                          the usual collectives on 2 and 8 ranks
  tpurun bench --ranks 64 --sizes 8,64K --against gloo  how much faster than Gloo
  tpurun bench --collectives all_reduce --json          one JSON object per line
  tpurun bench --memory staged,mapped --sizes 16M       tensors that are copied, and that are not
  torchrun --nproc-per-node 4 -m tpurun.bench           under another launcher
"""


# Ordinary CPU tensors, and those of tpurun.empty().
MEMORIES = ("staged", "mapped")


@dataclass(frozen=True)
class Variant:
    """A variant is measured: a group that spans the world, named after its backend, and where its tensors
    are."""

    backend: str
    group: dist.ProcessGroup
    memory: str = MEMORIES[0]
    label: str = ""
    """Tells apart variants that are alike otherwise."""

    @property
    def is_ours(self) -> bool:
        """Whether the backend counts what it moves."""
        return hasattr(self.group._get_backend(torch.device("cpu")), "traffic")

    @property
    def name(self) -> str:
        memory = "" if self.memory == MEMORIES[0] else self.memory
        return " ".join(filter(None, (self.backend, memory, self.label)))


@dataclass(frozen=True)
class Row:
    """A row says how long one variant took for one collective of one size."""

    collective: str
    bytes: int
    ranks: int
    backend: str
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    min_us: float
    max_us: float
    blocks: int
    iterations: int
    memory: str | None = None
    traffic_bytes: int | None = None
    """Read and written by all ranks for one operation."""
    staged_bytes: int | None = None
    """Of these, to and from memory that is nobody's tensor."""
    floor_bytes: int | None = None
    roofline_percent: float | None = None


def parse_size(text: str) -> int:
    """`8`, `64K`, `1M`, `2G`: powers of 1024."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    digits, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not (digits.isascii() and digits.isdigit() and int(digits) > 0):
        raise ValueError(f"expected a size such as 8, 64K or 1M, given {text!r}")
    return int(digits) * unit


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth per algorithm bandwidth, as nccl-tests define it."""
    match collective:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter":
            return (ranks - 1) / ranks
        case _:
            return 1.0


# --- The collectives ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One collective on buffers of its own."""

    run: Callable[[], object]
    buffers: list[torch.Tensor]
    output: torch.Tensor | None = None
    expected: torch.Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """A setting says which ranks take part, and how many elements the largest buffer of a rank has."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    count: int
    dtype: torch.dtype
    memory: str = MEMORIES[0]

    @property
    def chunk(self) -> int:
        """One rank's share, where the collective gives each rank one."""
        return self.count // self.ranks

    def pattern(self, shift: int, count: int) -> torch.Tensor:
        """Small numbers that tell ranks and places apart: element i is (i + shift) mod 3."""
        return self._periodic([(place + shift) % 3 for place in range(3)], count)

    def sum_of_patterns(self, shift: int, count: int) -> torch.Tensor:
        """The sum over all ranks of `pattern(rank + shift, count)`."""
        return self._periodic(
            [sum((place + shift + rank) % 3 for rank in range(self.ranks)) for place in range(3)], count
        )

    def zeros(self, count: int) -> torch.Tensor:
        return self._placed(torch.zeros(count, dtype=self.dtype))

    def _periodic(self, period: list[int], count: int) -> torch.Tensor:
        return self._placed(torch.tensor(period, dtype=self.dtype).repeat(count // len(period) + 1)[:count])

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy where the tensors of this setting are."""
        if self.memory == MEMORIES[0]:
            return tensor.clone()
        from tpurun import empty

        return empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor)


def all_reduce(s: Setting) -> Call:
    buffer = s.pattern(s.rank, s.count)
    run = lambda: dist.all_reduce(buffer, group=s.group)  # noqa: E731
    return Call(run, [buffer], buffer, s.sum_of_patterns(0, s.count))


def all_gather(s: Setting) -> Call:
    mine, out = s.pattern(s.rank, s.chunk), s.zeros(s.count)
    expected = torch.cat([s.pattern(rank, s.chunk) for rank in range(s.ranks)])
    return Call(lambda: dist.all_gather_into_tensor(out, mine, group=s.group), [mine, out], out, expected)


def reduce_scatter(s: Setting) -> Call:
    buffer, out = s.pattern(s.rank, s.count), s.zeros(s.chunk)
    expected = s.sum_of_patterns(s.rank * s.chunk, s.chunk)
    run = lambda: dist.reduce_scatter_tensor(out, buffer, group=s.group)  # noqa: E731
    return Call(run, [buffer, out], out, expected)


def all_to_all(s: Setting) -> Call:
    buffer, out = s.pattern(s.rank, s.count), s.zeros(s.count)
    expected = torch.cat([s.pattern(rank + s.rank * s.chunk, s.chunk) for rank in range(s.ranks)])
    return Call(lambda: dist.all_to_all_single(out, buffer, group=s.group), [buffer, out], out, expected)


def broadcast(s: Setting) -> Call:
    buffer = s.pattern(s.rank, s.count)
    run = lambda: dist.broadcast(buffer, group=s.group, group_src=0)  # noqa: E731
    return Call(run, [buffer], buffer, s.pattern(0, s.count))


def reduce(s: Setting) -> Call:
    buffer = s.pattern(s.rank, s.count)
    run = lambda: dist.reduce(buffer, group=s.group, group_dst=0)  # noqa: E731
    # What the buffers of the other ranks hold afterwards is not defined.
    return Call(run, [buffer], *([buffer, s.sum_of_patterns(0, s.count)] if s.rank == 0 else []))


def gather(s: Setting) -> Call:
    mine = s.pattern(s.rank, s.chunk)
    if s.rank != 0:
        return Call(lambda: dist.gather(mine, group=s.group, group_dst=0), [mine])
    out = s.zeros(s.count)
    parts = list(out.split(s.chunk))
    expected = torch.cat([s.pattern(rank, s.chunk) for rank in range(s.ranks)])
    return Call(lambda: dist.gather(mine, parts, group=s.group, group_dst=0), [mine, out], out, expected)


def scatter(s: Setting) -> Call:
    out, expected = s.zeros(s.chunk), s.pattern(s.rank * s.chunk, s.chunk)
    if s.rank != 0:
        return Call(lambda: dist.scatter(out, group=s.group, group_src=0), [out], out, expected)
    buffer = s.pattern(0, s.count)
    parts = list(buffer.split(s.chunk))
    return Call(lambda: dist.scatter(out, parts, group=s.group, group_src=0), [buffer, out], out, expected)


def send_recv(s: Setting) -> Call:
    """Every rank sends to the next one and receives from the one before."""
    mine, out = s.pattern(s.rank, s.count), s.zeros(s.count)
    following, preceding = (s.rank + 1) % s.ranks, (s.rank - 1) % s.ranks

    def run() -> None:
        sent = dist.P2POp(dist.isend, mine, group=s.group, group_peer=following)
        received = dist.P2POp(dist.irecv, out, group=s.group, group_peer=preceding)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    return Call(run, [mine, out], out, s.pattern(preceding, s.count))


def barrier(s: Setting) -> Call:
    return Call(lambda: dist.barrier(group=s.group), [])


COLLECTIVES: dict[str, Callable[[Setting], Call]] = {
    builder.__name__: builder
    for builder in (
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast,
        reduce, gather, scatter, send_recv, barrier,
    )
}  # fmt: skip

# Each rank gives or gets a share of the largest buffer.
SHARED_OUT = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}


# --- Measuring ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How often to repeat so that one row takes about the time it was given."""

    blocks: int
    iterations: dict[str, int]

    @staticmethod
    def within(seconds: float, estimates: dict[str, float]) -> "Plan":
        """`estimates` are the seconds of one iteration on each backend; `seconds` is for each of them."""
        slowest = max(estimates.values())
        blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, int(seconds / max(slowest, 1e-9))))
        per_block = seconds / blocks
        iterations = {
            backend: min(MAX_ITERATIONS, max(1, int(per_block / max(estimate, 1e-9))))
            for backend, estimate in estimates.items()
        }
        return Plan(blocks, iterations)


def measure(
    collective: str,
    bytes_asked: int,
    variants: Sequence[Variant],
    seconds: float,
    dtype: torch.dtype = torch.float32,
    on_progress: Callable[[str], None] = lambda text: None,
    speed: _memory_speed.Speed | None = None,
) -> list[Row]:
    """Times one collective of one size on each variant, in turn. All ranks of the world call this together.

    The size is rounded down to whole elements, the same number for each rank where the collective gives each
    rank a share.

    Raises RuntimeError if a result is wrong.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = dtype.itemsize * (ranks if collective in SHARED_OUT else 1)
    count = max(1, bytes_asked // share) * share // dtype.itemsize
    calls, traffic = {}, {}
    for variant in variants:
        on_progress(f"{variant.name}: checking the result")
        setting = Setting(variant.group, rank, ranks, count, dtype, variant.memory)
        calls[variant.name] = _checked(collective, variant.name, setting)
        traffic[variant.name] = _traffic(variant, calls[variant.name])
    # The first calls were the check: now nothing is set up any more.
    plan = Plan.within(seconds, {name: _estimate(call, seconds) for name, call in calls.items()})
    times: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(plan.blocks):
        for name, call in calls.items():
            on_progress(f"{name}: block {block + 1} of {plan.blocks}")
            times[name].append(_time_block(call, plan.iterations[name]))
    moved = 0 if collective == "barrier" else count * dtype.itemsize
    bytes_per_s = speed.of(collective, moved) if speed is not None else None
    floor = _memory_speed.floor_bytes(collective, moved, ranks)
    rows = []
    for variant in variants:
        row = _row(
            collective, moved, ranks, variant.backend, times[variant.name], plan.iterations[variant.name]
        )
        if (found := traffic[variant.name]) is not None:
            row = _with_traffic(row, variant.memory, *found, floor, bytes_per_s)
        rows.append(row)
    return rows


def _traffic(variant: Variant, call: Call) -> tuple[int, int] | None:
    """Bytes that all ranks move for one call, and of them those that are staged."""
    if not variant.is_ours:
        return None
    moved_before, staged_before = _memory_speed.moved(variant.group)
    call.run()
    moved, staged = _memory_speed.moved(variant.group)
    return moved - moved_before, staged - staged_before


def _with_traffic(
    row: Row, memory: str, moved: int, staged: int, floor: int, bytes_per_s: float | None
) -> Row:
    percent = None
    if bytes_per_s:
        percent = round(100 * moved / (row.time_us / 1e6) / bytes_per_s, 1)
    return replace(
        row,
        memory=memory,
        traffic_bytes=moved,
        staged_bytes=staged,
        floor_bytes=floor,
        roofline_percent=percent,
    )


def _checked(collective: str, backend: str, setting: Setting) -> Call:
    call = COLLECTIVES[collective](setting)
    call.run()
    if call.output is not None and call.expected is not None:
        wrong = (call.output != call.expected).nonzero()
        if len(wrong):
            place = int(wrong[0])
            raise RuntimeError(
                f"{collective} of {setting.count} elements on {backend} is wrong on rank {setting.rank}: "
                f"element {place} is {call.output[place].item()}, expected {call.expected[place].item()}"
            )
    # Zeros stay zeros however often they are summed up, and no time is spent on overflow.
    for buffer in call.buffers:
        buffer.zero_()
    return replace(call, expected=None)


def _estimate(call: Call, seconds: float) -> float:
    """The seconds of one iteration, of as many as take a twentieth of what the row is given.

    A single one says little: it can take ten times as long as those behind it.
    """
    iterations = 1
    while (each := _time_block(call, iterations)) * iterations < seconds / 20 and iterations < MAX_ITERATIONS:
        iterations = min(4 * iterations, MAX_ITERATIONS)
    return each


def _time_block(call: Call, iterations: int) -> float:
    """The seconds of one iteration on the slowest rank."""
    gc_was_enabled = gc.isenabled()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call.run()
    seconds = (time.perf_counter() - start) / iterations
    if gc_was_enabled:
        gc.enable()
    slowest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def _row(collective: str, moved: int, ranks: int, backend: str, times: list[float], iterations: int) -> Row:
    median = statistics.median(times)
    algbw = moved / median / 1e9
    return Row(
        collective=collective,
        bytes=moved,
        ranks=ranks,
        backend=backend,
        time_us=round(median * 1e6, 2),
        algbw_gbps=round(algbw, 6),
        busbw_gbps=round(algbw * bus_factor(collective, ranks), 6),
        min_us=round(min(times) * 1e6, 2),
        max_us=round(max(times) * 1e6, 2),
        blocks=len(times),
        iterations=iterations,
    )


# --- Reporting ----------------------------------------------------------------------------------------------


def table_header(backend: str, against: str | None, ranks: int) -> str:
    titles = f"{'collective':<14} {'bytes':>11} {'time':>11} {'min-max':>21} {'algbw':>9} {'busbw':>9}"
    titles += f" {'moved':>6} {'memory':>7}"
    units = f"{'':<14} {'':>11} {'us':>11} {'us':>21} {'GB/s':>9} {'GB/s':>9} {'':>6} {'':>7}"
    name = f"{backend}, {ranks} ranks"
    if against is not None:
        name += f", against {against}"
        titles += f"  {against:>11} {'min-max':>21} {'ratio':>8}"
        units += f"  {'us':>11} {'us':>21} {'':>8}"
    return f"# {name}\n{titles}\n{units}"


def table_line(row: Row, against: Row | None) -> str:
    line = (
        f"{row.collective:<14} {row.bytes:>11} {row.time_us:>11.1f} {_spread(row):>21} "
        f"{row.algbw_gbps:>9.3f} {row.busbw_gbps:>9.3f}"
    )
    moved = f"{row.traffic_bytes / row.floor_bytes:.1f}x" if row.traffic_bytes and row.floor_bytes else "-"
    speed = f"{row.roofline_percent:.0f} %" if row.roofline_percent is not None else "-"
    line += f" {moved:>6} {speed:>7}"
    if against is not None:
        ratio = against.time_us / row.time_us
        line += f"  {against.time_us:>11.1f} {_spread(against):>21} {ratio:>7.1f}x"
    return line


def _spread(row: Row) -> str:
    return f"{row.min_us:.1f}-{row.max_us:.1f}"


class Progress:
    """One line on stderr that is written over, by one rank alone."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown = total, is_shown
        self.done = 0
        self.case = ""
        self.started = time.perf_counter()
        self.shown_chars = 0

    def show(self, text: str) -> None:
        self._write(f"[{self.done + 1}/{self.total}] {self.case}, {text}")

    def clear(self) -> None:
        """Makes room for a line of another kind."""
        self._write("")
        if self.is_shown:
            print("\r", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        self._write(f"[{self.done}/{self.total}] measured in {time.perf_counter() - self.started:.1f} s")
        if self.is_shown:
            print(file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if self.is_shown:
            print(f"\r{text:<{self.shown_chars}}", end="", file=sys.stderr, flush=True)
            self.shown_chars = len(text)


# --- The command --------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Runs as one rank of a job that a launcher started."""
    args = parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit("tpurun.bench: this is one rank of a job; start it with `tpurun bench` or torchrun")
    backends = [args.backend] if args.against is None else [args.backend, args.against]
    for backend in backends:
        if not dist.is_backend_available(backend):
            raise SystemExit(f"tpurun.bench: torch.distributed does not know the backend {backend!r}")
    dist.init_process_group(args.backend, timeout=timedelta(minutes=10))
    try:
        groups = {backend: dist.new_group(backend=backend) for backend in backends}
        variants = [Variant(args.backend, groups[args.backend], memory) for memory in args.memory]
        if args.against is not None:
            variants.append(Variant(args.against, groups[args.against]))
        if any(variant.memory != MEMORIES[0] and not variant.is_ours for variant in variants):
            raise SystemExit(f"tpurun.bench: --memory mapped is for tpu_dist, not for {args.backend}")
        run(args, variants)
        dist.barrier()  # the others may still read what this rank offers
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Measures all that was asked for and prints each row when it is there."""
    is_first = dist.get_rank() == 0
    cases = list(_cases(args.collectives, args.sizes))
    progress = Progress(len(cases), is_first)
    if is_first and not args.json:
        print(table_header(args.backend, args.against, dist.get_world_size()), flush=True)
    speed = _memory_speed.Speed()
    for collective, bytes_asked in cases:
        progress.case = f"{collective} {bytes_asked} bytes"
        dtype = DTYPES[args.dtype]
        rows = measure(collective, bytes_asked, variants, args.seconds, dtype, progress.show, speed)
        progress.done += 1
        if not is_first:
            continue
        if args.json:
            for row in rows:
                known = {name: value for name, value in asdict(row).items() if value is not None}
                print(json.dumps(known), flush=True)
        else:
            against = rows[-1] if args.against is not None else None
            for row in rows[: len(args.memory)]:
                print(table_line(row, against), flush=True)
    progress.finish()


def _cases(collectives: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, int]]:
    for collective in collectives:
        # A barrier has no size.
        yield from ((collective, size) for size in (sizes[:1] if collective == "barrier" else sizes))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tpurun bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--collectives",
        type=_some_of(COLLECTIVES),
        default=",".join(list(COLLECTIVES)[:5]),
        metavar="NAMES",
        help=f"of {', '.join(COLLECTIVES)} (default: the first five)",
    )
    parser.add_argument(
        "--sizes", type=_sizes, default="8,64K,1M,16M", metavar="BYTES", help="default: %(default)s"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--backend", default="tpu_dist", help="what to measure (default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=_some_of(MEMORIES),
        default=MEMORIES[0],
        metavar="KINDS",
        help=f"where tensors are: some of {', '.join(MEMORIES)} (default: %(default)s)",
    )
    parser.add_argument("--against", metavar="BACKEND", help="measure the same on this backend in turn")
    parser.add_argument(
        "--seconds",
        type=seconds,
        default=2.0,
        help="time for each collective, size and backend (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args(argv)
    if args.against == args.backend:
        parser.error(f"--against {args.against} is the backend that is measured: name another one")
    return args


def _list_of(text: str, parse: Callable[[str], object]) -> list:
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sizes(text: str) -> list[int]:
    return _list_of(text, parse_size)


def _some_of(names: Collection[str]) -> Callable[[str], list[str]]:
    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"expected some of {', '.join(names)}, given {name!r}")
        return name

    return lambda text: _list_of(text, known)


def seconds(text: str) -> float:
    """A time that a command line gives."""
    try:
        given = float(text)
    except ValueError:
        given = -1.0
    if not 0 < given < 3600:
        raise argparse.ArgumentTypeError(f"expected a number of seconds up to 3600, given {text!r}")
    return given


if __name__ == "__main__":
    main()
