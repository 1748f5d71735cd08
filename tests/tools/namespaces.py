"""Hosts that are network namespaces of this machine, joined by a bridge, for as long as a test runs."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from .slices import some

_numbers = itertools.count()


class NotAllowed(Exception):
    """This machine has no namespaces for us; why."""


@contextmanager
def namespaces(
    count: int, mtu: int = 1500, rate: str | None = None, congestion: str | None = None
) -> Iterator[list[str]]:
    """Their names; number i has the address 10.77.0.(i + 1). `mtu` is of the links, in bytes; `rate` is
    what each host sends at most, in tc's units (`5gbit`); `congestion` is TCP's congestion control, this
    machine's unless given.
    """
    # A namespace that was removed is gone a moment later.
    stem = f"t{os.getpid()}n{next(_numbers)}"
    bridge = f"{stem}b"
    names = [f"{stem}h{host}" for host in range(count)]
    made: list[list[str]] = []
    try:
        _ip("link", "add", bridge, "type", "bridge", "forward_delay", "0")
        made.append(["link", "del", bridge])
        _ip("link", "set", bridge, "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            made.append(["netns", "del", name])
            _ip("link", "add", f"{stem}v{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{stem}v{host}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
            _ip("link", "set", f"{stem}v{host}", "mtu", str(mtu))
            _ip("-n", name, "link", "set", "eth0", "mtu", str(mtu))
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            if congestion is not None:
                setting = f"net.ipv4.tcp_congestion_control={congestion}"
                _ip("netns", "exec", name, "sysctl", "-q", "-w", setting)
            if rate is not None:
                bucket = ["tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *bucket)
        yield names
    finally:
        for words in reversed(made):
            _ip(*words)


@functools.cache
def kinds_of_hosts() -> list[str]:
    """How tests make hosts: both ways by `make full`, else the one nearer to real hosts that is possible."""
    try:
        with namespaces(1):
            return some(["namespaces", "pretended"], 2)
    except NotAllowed:
        return ["pretended"]


def unplug(name: str) -> None:
    """Nothing comes to this host or from it any more."""
    _ip("-n", name, "link", "set", "eth0", "down")


def part(*names: str) -> None:
    """These hosts do not reach each other any more, but all others."""
    for name in names:
        stem, host = name.rsplit("h", 1)
        _run("bridge", "link", "set", "dev", f"{stem}v{host}", "isolated", "on")


def close_tcp(*names: str) -> None:
    """These hosts reach others over UDP only, as behind some firewalls: TCP is refused on its way out."""
    for name in names:
        _ip("-n", name, "rule", "add", "to", "10.77.0.0/24", "ipproto", "tcp", "prohibit")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotAllowed(f"no `{words[0]}` command: apt-get install iproute2") from None
    if done.returncode != 0:
        raise NotAllowed(f"{' '.join(words)}: {done.stderr.strip()}")
