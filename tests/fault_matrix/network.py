"""What befalls the network between hosts: what do all of them learn, when, and is it right?

`python -m tests.fault_matrix.network --out docs/fault-matrix.md`, as root, makes hosts of network namespaces,
runs every fault once and writes its part of the page. `tests/hosts/test_nodes.py` runs them, too.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_matrix.table import table
from tools.jobs import Finished, Job
from tools.namespaces import NotAllowed, close_tcp, namespaces, part, unplug
from tools.nodes import commands, of_namespaces

HOSTS, EACH = 4, 2
TITLE = "## The network between hosts"

# Sums whose result every rank knows, large and small, until it has been long enough.
PROGRAM = """
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("tpu_dist")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
print("ready", flush=True)
began, steps, over = time.monotonic(), 0, torch.zeros(1)
while over.item() == 0:
    for count in (1, 70_000, 300_000):
        tensor = torch.full((count,), float(rank + steps % 7))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((count,), size * (size - 1) / 2 + size * (steps % 7)))
    steps += 1
    over[0] = time.monotonic() - began > float(sys.argv[1])
    dist.broadcast(over, 0)
print("done", steps)
"""


@dataclass(frozen=True)
class NetworkFault:
    """One that all hosts must survive, or learn of."""

    name: str
    what: str
    options: Sequence[str] = ()
    """Of tpurun, on all hosts."""
    before: Callable[[list[str]], None] | None = None
    """What is done to the namespaces before anything starts."""
    strike: Callable[[list[str]], None] | None = None
    """What is done to the namespaces once all ranks are ready."""
    verdicts: Sequence[str] = ()
    """What the report of each host says of who is to blame, by host; none where the job goes on."""
    limit_s: float = 60
    """From the fault until the last tpurun has ended."""


GONE = r"host n{0} \(node {0}\) is gone: nothing came from it for 5 s"
LOST = r"rank \d \(host n[12](, pid \d+)?\)  is to blame for RankLostError"
UNREACHED = r"rank \d \(host n\d, pid \d+\)  raised DistBackendError: large rounds do not reach host n\d"
FAULTS = [
    NetworkFault(
        "unplugged",
        "a host is unplugged",
        strike=lambda names: unplug(names[3]),
        verdicts=[GONE.format(3)] * 3 + [GONE.format(0)],
        limit_s=10,
    ),
    NetworkFault(
        "cut",
        "two hosts do not reach each other, but all others",
        strike=lambda names: part(names[1], names[2]),
        verdicts=[LOST] * 4,
        limit_s=20,
    ),
    NetworkFault(
        "closed",
        "hosts reach each other over UDP, not over TCP",
        before=lambda names: close_tcp(*names),
        verdicts=[UNREACHED] * 4,
        limit_s=25,
    ),
    NetworkFault(
        "avoided",
        "the same with `--bulk quic`",
        before=lambda names: close_tcp(*names),
        options=["--bulk", "quic"],
    ),
    NetworkFault(
        "bad", "1 % loss, 20 ms delay, 10 ms jitter", options=["--link", "delay=20ms,jitter=10ms,loss=1%"]
    ),
    NetworkFault("slow", "a link of 20 Mbit/s", options=["--link", "rate=20Mbit"]),
    NetworkFault(
        "replayed",
        "half of all datagrams come twice, and out of order",
        options=["--link", "duplicate=50%,jitter=2ms"],
    ),
]


@dataclass(frozen=True)
class Seen:
    """The result of a fault."""

    fault: NetworkFault
    problems: list[str]
    said: str
    seconds: float
    """From the fault until the last tpurun has ended, on a machine of one's own."""
    steps: int


def run(fault: NetworkFault, folder: Path, seconds: float) -> Seen:
    """Runs the program on hosts of network namespaces, for so long where nothing ends it before."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with namespaces(HOSTS) as names:
        jobs = []
        try:
            if fault.before:
                fault.before(names)
            words = [*fault.options, program, str(600 if fault.verdicts else seconds)]
            for node, (command, env) in enumerate(commands(of_namespaces(names), EACH, *words)):
                (folder / str(node)).mkdir()
                jobs.append(Job(folder / str(node), command, env=env))
            for job in jobs:
                job.read_until("ready")
            began = time.time()
            if fault.strike:
                fault.strike(names)
            return judge(fault, [job.wait() for job in jobs], began)
        finally:
            for job in jobs:
                job.end()


def judge(fault: NetworkFault, done: list[Finished], began: float) -> Seen:
    """Compares what every host has said with what it must."""
    took = max((one.ended_at - began) / one.patience for one in done)
    problems = [f"took {took:.1f} s"] if took > fault.limit_s else []
    said: list[str] = []
    if not fault.verdicts:
        problems += [f"host {host}: {blamed(one)}" for host, one in enumerate(done) if one.code != 0]
        steps = {int(steps) for one in done for steps in re.findall(r"done (\d+)", one.out)}
        problems += [] if len(steps) == 1 else [f"steps {steps}"]
        return Seen(fault, problems, "completes", took, max(steps, default=0))
    for host, (one, expected) in enumerate(zip(done, fault.verdicts, strict=True)):
        said.append(blamed(one))
        if one.code != 1 or not re.match(expected, said[-1]):
            problems.append(f"host {host} ends with {one.code} and says {said[-1]}")
    return Seen(fault, problems, "; ".join(dict.fromkeys(said)), took, 0)


def blamed(done: Finished) -> str:
    """Returns the culprit, in the words of a report."""
    match = re.search(r"^  culprit +(.*)$", done.err, re.MULTILINE)
    return match[1] if match else "nothing"


def page(seen: Sequence[Seen], command: str) -> str:
    """The part of the page."""
    rows = [[one.fault.what, one.said, f"{one.seconds:.1f} s" if one.fault.verdicts else ""] for one in seen]
    wrong = [f"- `{one.fault.name}`: {problem}" for one in seen for problem in one.problems]
    right = sum(not one.problems for one in seen)
    text = f"""{TITLE}

Made by `{command}`.

{HOSTS} hosts of {EACH} ranks, which are network namespaces, sum tensors of 1, 70,000 and 300,000 elements,
which every rank checks. The time is from the fault until the last tpurun has ended, everywhere with that
verdict; a host that is unplugged says the same of those it does not reach.

{table(["fault", "what all hosts say", "time"], rows)}

{right} of {len(seen)} are right. Strangers (without a certificate, with another job's, with the right one and
another rank), interruptions and hosts that were never reached are tests of the transport on a simulated
network and over loopback, in `collectives/engine/src/hosts/network/tests`; strangers with another token are
one of `tests/hosts/test_nodes.py`.
"""
    return text + "\n".join(["", *wrong, ""] if wrong else [])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fault_matrix.network", description=__doc__)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result into this page of Markdown"
    )
    parser.add_argument("--seconds", type=float, default=10, help="of faults that end nothing [10]")
    options = parser.parse_args()
    seen = []
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                one = run(fault, Path(folder), options.seconds)
            except NotAllowed as why:
                print(f"network namespaces: {why}", file=sys.stderr)
                return 2
        seen.append(one)
        verdict = "; ".join(one.problems) or "right"
        print(f"{fault.name:<10} {one.seconds:5.1f} s  {one.said}  {one.steps or ''} {verdict}", flush=True)
    if options.out is not None:
        before, _, _ = options.out.read_text().partition(TITLE)
        command = "python -m tests.fault_matrix.network " + " ".join(sys.argv[1:])
        options.out.write_text(before.rstrip() + "\n\n" + page(seen, command))
    return 1 if any(one.problems for one in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
