"""``python -m tests.performance.compile.alone``: one work in one way in a fresh process, as one JSON row.

The row has the seconds of the first step, with caches that are empty, and the most bytes on the device that
later steps needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from ..job import Failed, Job, Late, Row
from .figures import FIRST_MODEL_STEP, FIRST_STEP, MEMORY_WAYS, MEMORY_WORKS
from .options import Options
from .ways import WAYS, NotThere, runner
from .works import make

LIMIT_S = 600.0
LATER_STEPS = 3


def cases(options: Options) -> list[tuple[str, str]]:
    """The works and ways that need a process of their own."""
    first = {
        (work, way)
        for figure in (FIRST_STEP, FIRST_MODEL_STEP)
        for work in figure.asked
        for way in (figure.faster, figure.slower)
    }
    memory = {(work, way) for work in MEMORY_WORKS for way in ("strict", *MEMORY_WAYS)}
    wanted = first if "first" in options.parts else set()
    wanted = wanted | memory if "memory" in options.parts else wanted
    return [(work, way) for work in options.works for way in options.ways if (work, way) in wanted]


def measured(options: Options) -> Iterator[Row]:
    """A row for each case, one process after the other."""
    for work, way in cases(options):
        command = [sys.executable, "-m", __name__, "--work", work, "--way", way, "--backend", options.backend]
        try:
            with Job(command) as job:
                yield from job.rows(LIMIT_S)
        except Late:
            yield {"alone": work, "way": way, "missing": f"over {LIMIT_S:.0f} s"}
        except Failed as failed:
            yield {"alone": work, "way": way, "missing": str(failed)}


def run(work: str, way: str, backend: str) -> Row:
    """Does the first steps of this process."""
    make(work, WAYS[way].device)  # imports what the work needs in any way
    began = time.perf_counter()
    try:
        one = runner(work, way, backend, steps=1)
    except NotThere as reason:
        return {"missing": str(reason)}
    first_s = time.perf_counter() - began
    if WAYS[way].device != "tpu":
        return {"first_s": first_s}
    one.block(1)
    torch.tpu.reset_peak_memory_stats()
    one.block(LATER_STEPS)
    return {"first_s": first_s, "peak_bytes": torch.tpu.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--work", "--way", "--backend"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        row = run(given.work, given.way, given.backend)
    sys.stdout.write(json.dumps({"alone": given.work, "way": given.way, **row}) + "\n")


if __name__ == "__main__":
    main()
