"""A Slurm of several nodes on this machine, for as long as a test runs: a controller, a daemon for each."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 30
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=16 \
Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=2000
PartitionName=all Nodes=n[0-{last}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class NotHere(Exception):
    """This machine can run no Slurm; why."""


@contextmanager
def slurm(nodes: int, folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which its commands find it."""
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        if shutil.which(program) is None:
            raise NotHere(f"no {program}: apt-get install slurm-wlm slurmctld slurmd munge (make slurm)")
    if os.geteuid() != 0:
        raise NotHere("its daemons are started as root")
    ports = _free_ports(nodes + 1)
    conf = folder / "slurm.conf"
    daemons = ",".join(map(str, ports[1:]))
    conf.write_text(
        CONF.format(
            host=socket.gethostname(), controller=ports[0], folder=folder, last=nodes - 1, ports=daemons
        )
    )
    (folder / "state").mkdir()
    environment = os.environ | {"SLURM_CONF": str(conf)}
    running: list[subprocess.Popen] = []

    def start(*words: str, **options) -> None:
        with (folder / f"{words[0]}-{len(running)}.out").open("wb") as log:
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log, **options))

    try:
        # The socket of one that has ended is left behind.
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode != 0:
            Path("/run/munge/munge.socket.2").unlink(missing_ok=True)
            subprocess.run(
                ["install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge"], check=True
            )
            start("runuser", "-u", "munge", "--", "munged", "--foreground")
        start("slurmctld", "-D")
        for node in range(nodes):
            start("slurmd", "-D", "-N", f"n{node}")
        _await_idle(nodes, environment)
        yield environment
    finally:
        for daemon in reversed(running):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(running):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _await_idle(nodes: int, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.stdout.split() == ["idle"] * nodes:
            return
        if time.monotonic() >= deadline:
            raise NotHere(f"its nodes are not ready after {LIMIT_S} s: {done.stdout}{done.stderr}")
        time.sleep(0.1)
