"""Hosts that ssh leads to: network namespaces with an OpenSSH server each, for as long as a test runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .namespaces import NotAllowed, namespaces

LIMIT_S = 20
SERVER = """\
ListenAddress {address}:22
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""
CLIENT = """\
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
GlobalKnownHostsFile /dev/null
Host n*
    User root
"""


@dataclass(frozen=True)
class SshHosts:
    here: list[str]
    """The command that runs another one where n0, n1, .. are known."""
    ssh: list[str]
    """The words that stand before their names."""
    namespaces: list[str]


@contextmanager
def ssh_hosts(count: int, folder: Path) -> Iterator[SshHosts]:
    server = shutil.which("sshd", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        raise NotAllowed("no sshd and ssh: apt-get install openssh-server openssh-client")
    with ExitStack() as stack:
        *hosts, here = stack.enter_context(namespaces(count + 1))
        for key in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / key)]
            subprocess.run(words, check=True)
        config, known = CLIENT.format(folder=folder), ""
        for number, name in enumerate(hosts):
            address = f"10.77.0.{number + 1}"
            own = folder / f"sshd-{number}"
            own.write_text(SERVER.format(address=address, folder=folder))
            stack.enter_context(_daemon([server, "-D", "-e", "-f", str(own)], name, address, folder))
            config += f"Host n{number}\n    HostName {address}\n"
            known += f"{address} {(folder / 'host.pub').read_text()}"
        (folder / "config").write_text(config)
        (folder / "known").write_text(known)
        ssh = ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes"]
        yield SshHosts(["ip", "netns", "exec", here], ssh, hosts)


@contextmanager
def _daemon(command: list[str], namespace: str, address: str, folder: Path) -> Iterator[None]:
    # Where sshd keeps those that it does not know yet.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / f"{namespace}.log").open("wb") as log:
        words = ["ip", "netns", "exec", namespace, *command]
        daemon = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        _await_banner(namespace, address, folder / f"{namespace}.log")
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()
        # A session whose host was unplugged would wait for its client.
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
        for pid in pids.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _await_banner(namespace: str, address: str, log: Path) -> None:
    """Until something listens there; the namespace of this process leads nowhere."""
    look = f"import socket; socket.create_connection(({address!r}, 22), 1).recv(1)"
    words = ["ip", "netns", "exec", namespace, "python3", "-c", look]
    deadline = time.monotonic() + LIMIT_S
    while subprocess.run(words, capture_output=True, check=False).returncode != 0:
        if time.monotonic() >= deadline:
            raise NotAllowed(f"sshd does not listen on {socket.gethostname()}: {log.read_text()}")
        time.sleep(0.05)
