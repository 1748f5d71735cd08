"""``python tests/performance/overhead.py``: what device tpu costs beside the same work on CPU tensors.

One process, one thread. Every case runs on the CPU, and on the device in Strict and in Debug, in blocks of
some hundredths of a second, one after the other, again and again; what is shown are medians, and of the
ratios to the CPU's block before also the quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

STRICT, DEBUG = "DEFER_NEVER", "DEFER_NEVER_AND_LAUNCH_BLOCKING"
VARIANTS = {"CPU": ("cpu", STRICT), "Strict": ("tpu", STRICT), "Debug": ("tpu", DEBUG)}
Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Something to time; `make` prepares it for a device and returns what runs once."""

    name: str
    make: Callable[[str], Work]


def operation(name: str, body: Callable[..., object], *shapes: tuple[int, ...]) -> Case:
    def make(device: str) -> Work:
        tensors = [torch.rand(shape, device=device) for shape in shapes]
        return lambda: body(*tensors)

    return Case(name, make)


OPERATIONS = [
    operation("add, 64x64", lambda a, b: a + b, (64, 64), (64, 64)),
    operation("add in place, 64x64", lambda a, b: a.add_(b), (64, 64), (64, 64)),
    operation("add, 8", lambda a, b: a + b, (8,), (8,)),
    operation("matrix product, 64x64", lambda a, b: a @ b, (64, 64), (64, 64)),
    operation("sum, 64x64", lambda a: a.sum(), (64, 64)),
    operation("transposed view", lambda a: a.t(), (64, 64)),
    operation("softmax, 64x64", lambda a: a.softmax(-1), (64, 64)),
    operation("cat of 4, 64x64", lambda a: torch.cat([a, a, a, a]), (64, 64)),
    operation("item", lambda a: a.item(), ()),
]


def training(name: str, model: Callable[[], nn.Module], *shape: int) -> Case:
    """A step of AdamW."""

    def make(device: str) -> Work:
        torch.manual_seed(0)
        net = model().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        x = torch.rand(shape, device=device)

        def step() -> None:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        return step

    return Case(name, make)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 256)
    )


def transformer() -> nn.Module:
    layer = {"dim_feedforward": 512, "dropout": 0.0, "batch_first": True, "norm_first": True}
    return nn.Sequential(*(nn.TransformerEncoderLayer(128, 4, **layer) for _ in range(4)))


def convolutions() -> nn.Module:
    block = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10)
    )


STEPS = [
    training("MLP, 64x256", mlp, 64, 256),
    training("transformer, 4 layers, 8x64x128", transformer, 8, 64, 128),
    training("convolutions, 16x3x32x32", convolutions, 16, 3, 32, 32),
]


@dataclass(frozen=True)
class Timed:
    """Seconds of one run by variant, by turn."""

    case: Case
    seconds: dict[str, list[float]]

    def ratios(self, variant: str) -> list[float]:
        pairs = zip(self.seconds[variant], self.seconds["CPU"], strict=True)
        return [ours / cpu for ours, cpu in pairs]

    def row(self) -> str:
        medians = (statistics.median(self.seconds[variant]) for variant in VARIANTS)
        cells = [self.case.name, *(f"{seconds * 1e6:,.2f}" for seconds in medians)]
        for variant in [*VARIANTS][1:]:
            low, middle, high = statistics.quantiles(self.ratios(variant), n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        return "| " + " | ".join(cells) + " |"


def timed(case: Case, turns: int, block_s: float) -> Timed:
    works = {name: (case.make(device), mode) for name, (device, mode) in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    counts: dict[str, int] = {}
    for turn in range(turns + 1):
        for name, (work, mode) in works.items():
            with torch.tpu.set_eager_mode(mode):
                count = counts.setdefault(name, runs_in(work, block_s))
                began = time.perf_counter()
                for _ in range(count):
                    work()
                took = time.perf_counter() - began
            if turn > 0:  # the first one warms up
                seconds[name].append(took / count)
    return Timed(case, seconds)


def runs_in(work: Work, seconds: float) -> int:
    """How often it runs in that time, roughly."""
    work()
    began = time.perf_counter()
    work()
    return max(1, int(seconds / max(time.perf_counter() - began, 1e-7)))


IN_PLACE = Path(__file__).with_name("overhead_in_place.py")


def in_place() -> str:
    """A table of the collectives of 8 ranks."""
    tpurun = Path(sys.executable).with_name("tpurun")
    command = [tpurun, "-n", "8", "--device", "tpu", IN_PLACE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [
        "| all-reduce, 8 ranks | CPU, ms | tpu, ms | CPU / tpu |",
        "| --- | ---: | ---: | --- |",
    ]
    (line,) = [line for line in done.stdout.splitlines() if "{" in line]
    for size, seconds in json.loads(line[line.index("{") :])["seconds"].items():
        cpu, tpu = (statistics.median(seconds[device]) * 1e3 for device in ("cpu", "tpu"))
        ratios = [a / b for a, b in zip(seconds["cpu"], seconds["tpu"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        name = f"{int(size) >> 10} KiB"
        rows.append(f"| {name} | {cpu:.3f} | {tpu:.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return "\n".join(rows)


def page(found: list[Timed], turns: int) -> str:
    head = (
        "| | CPU, us | Strict, us | Debug, us | Strict / CPU | Debug / CPU |\n"
        "| --- | ---: | ---: | ---: | --- | --- |"
    )
    rows = {one.case.name: one.row() for one in found}

    def table(cases: list[Case]) -> str:
        return "\n".join([head, *(rows[case.name] for case in cases if case.name in rows)])

    return f"""# What device `tpu` costs

Written by `make overhead`: {torch.__version__} on {cpu_name()}, one thread, {turns} turns; each turn runs the
CPU's tensors, Strict and Debug one after the other. Medians; ratios with their quartiles.

## One operation

{table(OPERATIONS)}

## A training step

{table(STEPS)}

## A collective

Of tensors on the device, which are used where they are, and of CPU tensors, in turn in one run
(`tpurun -n 8 --device tpu tests/performance/overhead_in_place.py`).

{in_place()}
"""


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=41, help="[41]")
    parser.add_argument("--block-ms", type=float, default=30, help="[30]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("case", nargs="*", help="parts of names of cases [all]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        case
        for case in OPERATIONS + STEPS
        if not options.case or any(part in case.name for part in options.case)
    ]
    found = []
    for case in chosen:
        found.append(timed(case, options.turns, options.block_ms / 1e3))
        print(found[-1].row(), file=sys.stderr, flush=True)
    text = page(found, options.turns)
    if options.out:
        options.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
