"""All-reduce between hosts that are network namespaces of this machine, on this backend and on Gloo in turn.

`python -m tests.performance.hosts` measures 2 hosts x 2 ranks and 4 x 2, as root. Ours is encrypted, that of
Gloo plain TCP; both have the same link, and all hosts share the cores of this machine. Without `--rate` the
link is as fast as the cores, and they are what is measured, where TCP's congestion control does not pace
(BBR does; `--congestion reno` does not).
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.namespaces import NotAllowed, namespaces

TPURUN = Path(sys.executable).with_name("tpurun")
PORT = 29_400
LIMIT_S = 600


def measure(hosts: int, ranks: int, link: dict[str, int | str | None], options: list[str]) -> int:
    """Runs `tpurun bench` on so many hosts with so many ranks each; node 0 prints. Returns its exit code."""
    with namespaces(hosts, **link) as names:
        environment = os.environ | {
            "TPURUN_TOKEN": secrets.token_hex(24),
            # Which it would find by the name of the machine.
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        nodes = []
        for node, name in enumerate(names):
            words = ["ip", "netns", "exec", name, TPURUN, "--nnodes", hosts, "--node-rank", node]
            words += ["--rdzv", f"10.77.0.1:{PORT}", "-n", ranks, "bench", *options]
            quiet = None if node == 0 else subprocess.DEVNULL
            nodes.append(
                subprocess.Popen(
                    [str(word) for word in words],
                    env=environment | {"TPURUN_HOST": f"n{node}"},
                    stdout=quiet,
                    stderr=quiet,
                )
            )
        try:
            return max(node.wait(LIMIT_S) for node in nodes)
        finally:
            for node in nodes:
                node.terminate()
                node.wait()


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--shape", default="2x2,4x2", help="hosts x ranks of each [default: 2x2,4x2]")
    parser.add_argument("--sizes", default="8,64K,1M,16M,64M")
    parser.add_argument("--collectives", default="all_reduce")
    parser.add_argument("--seconds", default="4")
    parser.add_argument("--mtu", type=int, default=1500, help="of the link, in bytes [default: 1500]")
    parser.add_argument(
        "--rate", help="what a host sends at most, as in `5gbit` [default: what the cores give]"
    )
    parser.add_argument(
        "--congestion", help="TCP's congestion control, as in `reno` [default: this machine's]"
    )
    parser.add_argument("--memory", default="staged", help="staged, or staged,mapped as tpurun bench has it")
    parser.add_argument("--alone", action="store_true", help="without Gloo")
    given = parser.parse_args()
    options = ["--collectives", given.collectives, "--sizes", given.sizes, "--seconds", given.seconds]
    options += ["--memory", given.memory]
    options += [] if given.alone else ["--against", "gloo"]
    for shape in given.shape.split(","):
        hosts, ranks = (int(number) for number in shape.split("x"))
        link = {"mtu": given.mtu, "rate": given.rate, "congestion": given.congestion}
        words = [f"MTU {given.mtu}", *filter(None, (given.rate, given.congestion))]
        print(f"{hosts} hosts of {ranks} ranks, {', '.join(words)}", flush=True)
        try:
            code = measure(hosts, ranks, link, options)
        except NotAllowed as why:
            print(f"network namespaces: {why}", file=sys.stderr)
            return 2
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
