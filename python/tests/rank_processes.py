"""Starts ranks without any launcher, as plain processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).parents[1]


def run_ranks(ranks: int, *program: str) -> list[subprocess.CompletedProcess]:
    """Runs a program as each rank of a world of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *program],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            results.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results
