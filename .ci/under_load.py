"""Runs the tests beside busy processes, several times: none of them may fail because it has to wait.

``python .ci/under_load.py TIMES [BUSY]``: each time another slice; exits with 1 when something failed.
"""

import subprocess
import sys


def main() -> int:
    times = int(sys.argv[1])
    busy = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    failed = []
    try:
        for turn in range(1, times + 1):
            done = subprocess.run(["make", "--no-print-directory", "test", f"SLICE=under-load-{turn}"])
            failed += [turn] if done.returncode else []
            print(
                f"tpurun: turn {turn} of {times} beside {busy} busy processes: {len(failed)} failed",
                flush=True,
            )
    finally:
        for neighbour in neighbours:
            neighbour.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
