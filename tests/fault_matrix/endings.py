"""How programs end around a fault, and what holds a job together: who is named then, and how soon?

`python -m tests.fault_matrix.endings --out docs/fault-matrix.md` runs every case on 2 and 8 ranks and writes
its part of the page. `tests/fault_matrix/test_fault_matrix.py` runs some of them, too.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_matrix.table import table
from tools.jobs import TPURUN, Finished, Job
from tpurun.fork_server import parent_of

RANKS = (2, 8)
TITLE = "## The ends of programs"

# One rank commits a fault; what the others do with the error that they get is the second word.
PROGRAM = """
import logging, os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist

what, how, guilty, acted = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("tpu_dist", timeout=timedelta(seconds=4))
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(2))
lasting = threading.Thread(target=threading.Event().wait)


def act():
    with open(acted, "w") as file:
        file.write(str(time.time()))


def in_a_child():
    if os.fork() == 0:
        try:
            dist.all_reduce(torch.full((3,), 100.0))
        except Exception as error:
            print("child:", error, flush=True)
        os._exit(0)
    os.wait()


def step():
    if rank == guilty:
        act()
        if what == "is killed":
            os.kill(os.getpid(), 9)
        if what == "exits with code 0":
            sys.exit(0)
        if what == "raises":
            raise ValueError("bad batch")
        if what.startswith("lingers"):
            lasting.start()
            if what == "lingers, failed":
                raise ValueError("bad batch")
            sys.exit(3 if what == "lingers, exited" else 0)
        if what == "forks":
            in_a_child()
    sums = torch.ones(4 if rank == guilty and what == "differs" else 3)
    dist.all_reduce(sums)
    assert sums.tolist() == [size] * 3


if what in ("store", "fork server"):
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value")
    print("ready", flush=True)
    while not os.path.exists(acted):
        store.get("key") if what == "store" else time.sleep(0.01)
    sys.exit(0)
try:
    step()
except Exception as error:
    if how == "raise .. from" and rank != guilty:
        raise RuntimeError("step failed") from error
    if how == "log, sys.exit(1)" and rank != guilty:
        logging.exception("step failed")
        sys.exit(1)
    if how == "os._exit(1)" and rank != guilty:
        os._exit(1)
    if how == "os.abort()" and rank != guilty:
        os.abort()
    raise
"""


@dataclass(frozen=True)
class Case:
    """One fault, and what the other ranks make of it."""

    what: str
    """What the guilty rank does, or what is killed or stopped."""
    how: str
    """What the others do with the error that they get."""
    said: str
    """A pattern: the culprit's line in the report, or where the job goes on, a line of the job."""
    limit_s: float
    """From the fault until the job has ended, or until the line has come, on a machine of one's own."""
    code: int | None = None
    """The exit code of the job, where it matters."""
    strike: signal.Signals | None = None
    """What the process that `what` names gets, when the ranks are ready."""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.what, self.how, self.strike and self.strike.name)))


GUILTY = r"rank {guilty} \(.*?\)  "
WAYS = ("raise .. from", "log, sys.exit(1)", "os._exit(1)", "os.abort()")
SAID = {
    "is killed": r"was killed by SIGKILL",
    "exits with code 0": r"exited with code 0 while others were waiting for it",
    "raises": r"raised ValueError: bad batch",
    "differs": r"(is to blame for|raised) CollectiveMismatchError: collective mismatch",
}
# A rank that keeps its process is over half a second after its program.
CASES = [
    *[Case(what, how, GUILTY + said, 2.0) for what, said in SAID.items() for how in WAYS],
    Case("lingers, failed", "", GUILTY + "raised ValueError: bad batch", 2.5, 1),
    Case("lingers, exited", "", GUILTY + "exited with code 3", 2.5, 3),
    Case("lingers, ended well", "", GUILTY + "is to blame for CollectiveTimeoutError", 6.5),
    Case("forks", "", "child: all_reduce of group 0: expected the process that is rank {guilty}", 1.5, 0),
    Case("store", "", "the store of the job, .*, +was killed by SIGKILL", 2.0, 1, signal.SIGKILL),
    Case("store", "", r"the store of the job \(pid \d+\), .* is stopped", 1.5, 0, signal.SIGSTOP),
    Case("fork server", "", "the fork server, which .*, is gone", 2.0, 1, signal.SIGKILL),
    Case("fork server", "", r"the fork server \(pid \d+\), .* is stopped", 1.5, 0, signal.SIGSTOP),
]
# In the words of the page.
SHOWN = {
    "is killed": "a rank is killed",
    "exits with code 0": "a rank exits with code 0",
    "raises": "a rank raises `ValueError`",
    "differs": "a rank posts another shape",
    "lingers, failed": "a rank raises `ValueError`, and a thread that is no daemon keeps its process",
    "lingers, exited": "the same with `sys.exit(3)`",
    "lingers, ended well": "the same with `sys.exit(0)`, in a group that waits for 4 s",
    "forks": "a child that a rank has forked posts in the rank's group",
    "store": "the process that holds the store gets {}",
    "fork server": "the fork server gets {}",
}


@dataclass(frozen=True)
class Seen:
    """The result of a case."""

    case: Case
    ranks: int
    said: str
    seconds: float
    """From the fault."""
    problems: list[str]


def run(case: Case, ranks: int, folder: Path) -> Seen:
    """Runs the program under tpurun to its end, or until what is expected was said."""
    program, acted = folder / "program.py", folder / "acted"
    program.write_text(PROGRAM)
    # A process that a thread keeps alive is killed after a second, to shorten the run.
    limit = ["--shutdown-timeout", "1"] if case.what.startswith("lingers") else []
    words = ["-n", ranks, *limit, program, case.what, case.how, guilty_of(ranks), acted]
    (folder / "job").mkdir()
    # The launcher's errors are read while the job runs, so they go the same way as what the ranks write.
    job = Job(folder / "job", ["sh", "-c", 'exec "$0" "$@" 2>&1', TPURUN, *words])
    try:
        if case.strike is None:
            done = job.wait()
            return judge(case, ranks, done, done.ended_at - float(acted.read_text()))
        began = strike(case, ranks, job)
        job.read_until(re.split(r"\\| \.\*|,", case.said)[0])
        took = time.time() - began[1]
        if case.strike == signal.SIGSTOP:
            os.kill(began[0], signal.SIGCONT)
        acted.touch()
        return judge(case, ranks, job.wait(), took)
    finally:
        job.end()


def strike(case: Case, ranks: int, job: Job) -> tuple[int, float]:
    """Sends the signal when all ranks are ready; to whom, and when."""
    job.read_of_all("ready", ranks)
    events = Finished(0, "", "", job.run_dir, 0, 1).events
    (server,) = [event["pid"] for event in events if event["event"] == "fork server started"]
    if case.what == "store":
        started = {event["pid"] for event in events if event["event"] == "rank started"}
        (server,) = {pid for pid in job.processes() if parent_of(str(pid)) == server} - started
    began = time.time()
    os.kill(server, case.strike)
    return server, began


def guilty_of(ranks: int) -> int:
    """As in the other cells: neither the first nor the last of many."""
    return ranks * 5 // 8


def judge(case: Case, ranks: int, done: Finished, took: float) -> Seen:
    """Compares what was said, and when, with what must be."""
    limit_s = case.limit_s * done.patience
    problems = [f"took {took:.2f} s, expected at most {limit_s:.2f} s"] if took > limit_s else []
    # If two ranks differ, nobody can say which one is right.
    guilty = "[01]" if case.what == "differs" and ranks == 2 else guilty_of(ranks)
    wanted = case.said.replace("{guilty}", str(guilty))
    said = blamed(done.out) if case.said.startswith(GUILTY) else line_with(wanted, done.out)
    if not re.match(wanted, said):
        problems.append(f"expected {wanted!r}, got {said!r}")
    if done.code == 0 if case.code is None else done.code != case.code:
        problems.append(f"the job ended with {done.code}")
    return Seen(case, ranks, said, took, problems)


def blamed(text: str) -> str:
    """Returns the culprit, in the words of the report."""
    match = re.search(r"^  culprit +(.*)$", text, re.MULTILINE)
    return match[1] if match else "nobody"


def line_with(pattern: str, text: str) -> str:
    """Returns what a line says from the pattern on."""
    match = re.search(f"{pattern}.*", text)
    return match[0] if match else "nothing"


def page(seen: Sequence[Seen], command: str) -> str:
    """The part of the page."""
    rows, sizes = [], sorted({one.ranks for one in seen})
    for case in dict.fromkeys(one.case for one in seen):
        own = [one for one in seen if one.case == case]
        times = [next((f"{one.seconds:.2f} s" for one in own if one.ranks == size), "") for size in sizes]
        name = SHOWN[case.what].format(case.strike and case.strike.name)
        how = f"`{case.how}`" if case.how else ""
        rows.append([name, how, plain(own[-1].said), *times])
    wrong = [f"- {one.case.name}, n={one.ranks}: {problem}" for one in seen for problem in one.problems]
    right = sum(not one.problems for one in seen)
    text = f"""{TITLE}

Made by `{command}`.

A rank commits a fault in an all-reduce, and the others do this with the error that they get. The report
names the guilty rank (of 8 the rank 5, of 2 the rank 1), whoever ends first. The time is from the fault until
the job has ended; of a process that is no rank, and of a job that goes on, until the line was there.

{table(["fault", "what the others do", "what is said", *(f"n={size}" for size in sizes)], rows)}

{right} of {len(seen)} are right.
"""
    return text + "\n".join(["", *wrong, ""] if wrong else [])


def plain(said: str) -> str:
    """Without what differs from run to run, and without the end of a long line."""
    said = re.sub(r" +\((host \S+, )?pid \d+\) *", " ", said)
    said = re.sub(r"\b\d{3,}\b", "PID", said).replace("|", "\\|").replace(" ,", ",")
    return said if len(said) < 120 else f"{said[:110].rstrip()} .."


def put(text: str, part: str) -> str:
    """The page with this part in the place of the old one, or before the part of the network."""
    before, title, rest = text.partition(TITLE)
    if not title:
        before, title, rest = text.partition("## The network between hosts")
        return f"{before.rstrip()}\n\n{part}\n{title}{rest}" if title else f"{before.rstrip()}\n\n{part}"
    after = re.search(r"^## .*", rest, re.MULTILINE | re.DOTALL)
    return before + part + (f"\n{after[0]}" if after else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_matrix.endings", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result into this page")
    options = parser.parse_args()
    seen = []
    for case in CASES:
        for ranks in RANKS:
            with tempfile.TemporaryDirectory() as folder:
                one = run(case, ranks, Path(folder))
            seen.append(one)
            verdict = "; ".join(one.problems) or "right"
            print(f"{case.name:<36} n={ranks} {one.seconds:5.2f} s  {one.said[:90]}  {verdict}", flush=True)
    if options.out is not None:
        command = "python -m tests.fault_matrix.endings " + " ".join(sys.argv[1:])
        options.out.write_text(put(options.out.read_text(), page(seen, command.rstrip())))
    return 1 if any(one.problems for one in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
