"""``python -m tests.performance.strangers``: what strangers cost a rank whose ports they flood.

Three pretended hosts have a rank each. Ranks 0 and 1 have a group, so that rank 0 has its ports. Strangers
begin connections to these over QUIC and TCP, and say nothing that proves an invitation. Then rank 2 joins:
it makes a group with the others, and sums a tensor that goes over TCP.

Strangers are on other machines: here they have a CPU of their own, and the ranks have the others. Runs with
and without a flood take turns, as the machine is not always as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLOODERS = 2
# Time between two turns of a flooder, in each of which it begins a connection to each port.
TURN_S = 0.002
# TCP connections that a flooder keeps open, and then closes, the oldest first.
KEPT = 600
QUIC_PACKET_BYTES = 1200
# The same as for node 0, in launcher/tests/flood.rs.
MOST_KB = 1024

PROGRAM = """
import json, os, subprocess, sys, time
from pathlib import Path
import torch
import torch.distributed as dist


def anonymous_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def ports():
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/self/net/udp").read_text().splitlines()[1:]]
    return sorted({int(row[1].split(":")[1], 16) for row in rows if row[9] in own})


dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1], backend="tpu_dist")
if rank < 2:
    dist.barrier(group=pair)
dist.barrier()
strangers, before, after = [], 0, 0
if rank == 0:
    command, count = json.loads(sys.argv[1]), int(sys.argv[2])
    before = anonymous_kb()
    command += map(str, ports())
    strangers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    time.sleep(1.5)
    after = anonymous_kb()
dist.barrier()
began = time.perf_counter()
group = dist.new_group([0, 1, 2], backend="tpu_dist")
dist.barrier(group=group)
dist.all_reduce(torch.ones(1 << 18), group=group)
took = time.perf_counter() - began
dist.barrier()
if rank == 0:
    for stranger in strangers:
        stranger.terminate()
    came = sum(int(stranger.communicate()[0]) for stranger in strangers)
    print("run", json.dumps([took, after - before, came]), flush=True)
"""


@dataclass(frozen=True)
class Run:
    joined_s: float
    grown_kb: int
    connections: int
    """That strangers have begun."""


def flood(ports: Sequence[int]) -> int:
    """Begins connections to these ports until SIGTERM; returns their number."""
    # The rank that has started this has the other CPUs.
    os.sched_setaffinity(0, range(os.cpu_count()))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    is_over = []
    signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
    count, kept = 0, []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        turn = time.monotonic()
        while not is_over:
            for port in ports:
                udp.sendto(first_packet(), ("127.0.0.1", port))
                kept.append(tcp := socket.socket())
                tcp.setblocking(False)
                tcp.connect_ex(("127.0.0.1", port))
                count += 2
            while len(kept) > KEPT:
                leave(kept.pop(0))
            turn = max(turn + TURN_S, time.monotonic())
            time.sleep(max(0, turn - time.monotonic()))
    return count


def leave(tcp: socket.socket) -> None:
    """Says something that is no proof, where it is heard still."""
    with contextlib.suppress(OSError):
        tcp.send(os.urandom(20))
    tcp.close()


def first_packet() -> bytes:
    """The first packet of a QUIC connection (RFC 9000, section 17.2.2) that no invitation has made."""
    header = b"\xc0\0\0\0\1" + b"\x14" + os.urandom(20) + b"\x08" + os.urandom(8) + b"\0" + b"\x44\x80"
    return header + os.urandom(QUIC_PACKET_BYTES - len(header))


def run(flooders: int) -> Run:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        flooder = json.dumps([sys.executable, str(Path(__file__).resolve()), "--flood"])
        tpurun = Path(sys.executable).with_name("tpurun")
        command = [tpurun, "-n", "3", "--hosts", "3", program, flooder, str(flooders)]
        cpus = sorted(os.sched_getaffinity(0))
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            preexec_fn=lambda: os.sched_setaffinity(0, cpus[:-1] or cpus),
        )
    line = next(line for line in done.stdout.splitlines() if "run [" in line)
    return Run(*json.loads(line.partition("run ")[2]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.performance.strangers", description=__doc__)
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of each kind (default 10)")
    parser.add_argument("--flood", type=int, nargs="+", metavar="PORT", help="be a stranger to these ports")
    options = parser.parse_args(arguments)
    if options.flood:
        print(flood(options.flood))
        return 0
    quiet, flooded = [], []
    for _ in range(options.runs):
        quiet.append(run(0))
        flooded.append(run(FLOODERS))
    before, under = (statistics.median(one.joined_s for one in runs) for runs in (quiet, flooded))
    grown, came = max(one.grown_kb for one in flooded), sum(one.connections for one in flooded)
    print(
        f"{options.runs} runs each: a rank joins in {before:.3f} s, under a flood in {under:.3f} s "
        f"({under / before:.2f} times); {came} connections of strangers; rank 0 grows by {grown} kB at most"
    )
    return 0 if grown <= MOST_KB else 1


if __name__ == "__main__":
    sys.exit(main())
