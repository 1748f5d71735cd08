"""A tpurun on each of several hosts: where they are, and how it is started there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .jobs import TPURUN, free_rendezvous
from .namespaces import namespaces

TOKEN = "a token for this test, long enough"


@dataclass(frozen=True)
class Node:
    """Where a tpurun is started, and how others reach it."""

    command: list[str]
    name: str
    address: str


def of_namespaces(names: Sequence[str]) -> list[Node]:
    """Each of these network namespaces."""
    return [
        Node(["ip", "netns", "exec", name], f"n{node}", f"10.77.0.{node + 1}")
        for node, name in enumerate(names)
    ]


@contextmanager
def plugged(count: int) -> Iterator[list[Node]]:
    """Makes this number of network namespaces. Raises NotAllowed where there can be none."""
    with namespaces(count) as names:
        yield of_namespaces(names)


def commands(nodes: Sequence[Node], each: int, *words: str | Path) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the command to start on each node and its environment, for `each` ranks there. `words` are the
    other options and the program."""
    rendezvous = free_rendezvous(nodes[0].address)
    started = []
    for number, node in enumerate(nodes):
        where = ["--nnodes", len(nodes), "--node-rank", number, "--rdzv", rendezvous, "-n", each]
        command = [str(word) for word in [*node.command, TPURUN, *where, *words]]
        started.append((command, {"TPURUN_TOKEN": TOKEN, "TPURUN_HOST": node.name}))
    return started
