"""The page, of what was measured and of which plots there are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import tables
from .results import Results

FOLDER = "performance"

HEAD = """\
# Performance

What collectives of this backend cost beside those of Gloo, Open MPI and MPICH, what a training step does, how
long a job takes to start, what waiting ranks take from one that computes, and how much communication hides
behind computation. `make bench` measures it all again; the measurements are in
[performance/results.json](performance/results.json), and
`python -m tests.performance --from docs/performance/results.json` makes the page of them again."""

HOW = """\
A time is that of one iteration on the slowest rank, taken over blocks of iterations that start together. What
is compared is measured in turn, block by block in the same job where one job can hold both, otherwise job by
job, so that other load hits both. Shown are the median of the blocks and, in parentheses, the fastest and the
slowest one; a ratio has those of the same turn. Tensors are float32 on the CPU, one thread computes for each
rank, and there may be more ranks than cores."""

SECTIONS = {
    "collectives": (
        "The collectives, beside Gloo",
        """\
Bytes are those of the largest buffer of a rank, as in nccl-tests. The ratio is the time of Gloo by that of
tpu_dist. Measured in turn in one run of `tpurun bench --against gloo`.""",
    ),
    "mpi": (
        "The collectives, beside MPI",
        """\
[mpi_collectives.c](../tests/performance/mpi_collectives.c) measures as `tpurun bench` does; a job of each,
in turn. Programs of MPI are C and call it themselves, while tpu_dist is called from Python.
What that takes shows beside "tpu_dist, C": its engine alone, called by
[a program](../tests/performance/engine_collectives.c) that measures the same way. Ratios are the time of that
implementation by that of tpu_dist. MPI polls: it is at its best with a core for each rank, and Open MPI
yields where there are fewer. With 16 ranks or more to a core tpurun loads programs at the same addresses in
all ranks; mpirun does not, which `setarch -R mpirun` changes. The root of a broadcast of MPI need not wait
for anybody, while every operation of tpu_dist is compared on all ranks before it completes.""",
    ),
    "steps": (
        "A training step",
        """\
A transformer on a small batch of short sequences, and the network of examples/ddp.py on its batches: forward,
backward and AdamW, with a copy of the model for each backend. Without communication is a step of DDP in
`no_sync`; what a step takes beyond that is communication that did not hide behind the backward pass.""",
    ),
    "start": (
        "The start of a job",
        """\
From the command until the first barrier is over, and until all have exited; the CPU time of all processes;
and the greatest sum of their memory (PSS: shared pages count once), looked at every 50 ms in a run of its
own. torchrun imports torch in every rank: on many it has one turn, and its memory is not looked at; mpirun
starts a C program.""",
    ),
    "waiting": (
        "Ranks that wait",
        """\
Rank 0 computes the same again and again on one thread, while all other ranks wait for it: blocked in the
kernel (idle), in a barrier of tpu_dist, in one of Gloo. The ratio is the time by that of idle ones: 1 is
for free.""",
    ),
    "overlap": (
        "Communication behind computation",
        """\
An asynchronous all-reduce of 16 MiB, a computation that takes about as long, then the wait. Hidden is the
part of the shorter one that the sum of both does not contain: 100 % is perfect, 0 % is one after the other,
less is worse than that. Where ranks compute on all cores nothing can hide, because both need them.""",
    ),
    "floors": (
        "The least there is",
        """\
What so many processes take for an all-reduce on this machine if nothing joins them, in turn with both
backends ([floors.py](../tests/performance/floors.py)). Of 8 B: all give up their CPU once, since each must
have its turn, and do nothing else. Of 16 MiB in ordinary tensors: all copy theirs into a window that stays in
the caches, add up their share of what would be there, copy the result out, and never wait. Gloo / least is
what could be reached at most; what is less waits less than once in each call.""",
    ),
}


def page(results: Results, plots: Collection[str]) -> str:
    """Markdown; `plots` are the names of the files of images in the folder beside the page."""
    parts = [HEAD, "## The machine", tables.machine(results.machine), "## How it is measured", HOW]
    for name, (title, text) in SECTIONS.items():
        if name not in results.parts:
            continue
        part = results.parts[name]
        images = _images([plot for plot in plots if plot.startswith(name)])
        command = f"`{part.command}`"
        parts += [f"## {title}", text, command, *images, *tables.TABLES[name](part.rows)]
    return "\n\n".join(parts) + "\n"


def _images(names: Sequence[str]) -> list[str]:
    return [f"![{name.removesuffix('.svg').replace('-', ' ')}]({FOLDER}/{name})" for name in sorted(names)]
