"""The collectives on this backend and on Gloo, in turn in one run of `tpurun bench`."""

from __future__ import annotations

from collections.abc import Iterator

from .job import TPURUN, Failed, Job, Late, Row
from .progress import Progress
from .settings import Settings, bearable_bytes, needed_bytes

OURS, GLOO = "tpu_dist", "gloo"
# Three blocks of one iteration, the check and the estimate: about ten seconds an iteration.
LIMIT_S = 60.0


def measured(settings: Settings, progress: Progress) -> Iterator[Row]:
    """The rows of `tpurun bench`, and one with `missing` for each that there is not."""
    ranks = settings.ranks_of("collectives")
    progress.part("collectives", len(ranks) * len(settings.collectives))
    for count in ranks:
        for collective in settings.collectives:
            progress.case(f"{collective} on {count} ranks")
            yield from _of_one(collective, count, settings, progress)


def _of_one(collective: str, ranks: int, settings: Settings, progress: Progress) -> Iterator[Row]:
    """All sizes; from the first one that takes too long on Gloo, this backend alone."""
    sizes, missing = fitting(collective, ranks, settings)
    for size, why in missing.items():
        yield from (_missing(collective, ranks, size, backend, why) for backend in (OURS, GLOO))
    for backends in ([OURS, GLOO], [OURS]):
        if not sizes:
            return
        command = bench(collective, ranks, list(sizes.values()), settings.seconds)
        command += ["--against", GLOO] if GLOO in backends else []
        limit_s = LIMIT_S + 4 * settings.seconds
        seen, why = set(), ""
        with Job(command) as job:
            try:
                for row in job.rows(limit_s):
                    seen.add(row["bytes"])
                    yield row
            except Late:
                why = f"over {limit_s:.0f} s"
            except Failed as failed:
                why = str(failed)
        sizes = {size: asked for size, asked in sizes.items() if size not in seen}
        for size in sizes:
            yield _missing(collective, ranks, size, backends[-1], why)
        if sizes:
            progress.note(f"{collective} on {ranks} ranks of {backends[-1]}: {why}")


def fitting(collective: str, ranks: int, settings: Settings) -> tuple[dict[int, int], dict[int, str]]:
    """The sizes to measure and what to ask for, and those that need too much memory and how much."""
    sizes = settings.sizes_of(collective, ranks)
    too_large = {size for size in sizes if needed_bytes(ranks, size) > bearable_bytes()}
    missing = {
        size: f"not measured: needs {needed_bytes(ranks, size) / 2**30:.0f} GiB" for size in sorted(too_large)
    }
    return {size: asked for size, asked in sizes.items() if size not in too_large}, missing


def bench(collective: str, ranks: int, sizes: list[int], seconds: float) -> list[str]:
    """The command that measures these; a row for each size, as JSON."""
    command = [str(TPURUN), "bench", "--json", "--ranks", str(ranks), "--collectives", collective]
    command += ["--sizes", ",".join(map(str, sizes)), "--seconds", str(seconds)]
    return [*command, "--memory", "staged,mapped"]


def _missing(collective: str, ranks: int, size: int, backend: str, why: str) -> Row:
    return {"collective": collective, "bytes": size, "ranks": ranks, "backend": backend, "missing": why}
