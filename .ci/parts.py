"""Runs parts of the Makefile one after the other, whatever fails, and says at the end how each ended.

``python .ci/parts.py TARGET ..``: exits with 1 when one of them failed.
"""

import os
import subprocess
import sys
import time


def lasted(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def main() -> int:
    failed, lines, began = 0, [], time.monotonic()
    for part in sys.argv[1:]:
        start = time.monotonic()
        done = subprocess.run([os.environ.get("MAKE", "make"), "--no-print-directory", part])
        failed += done.returncode != 0
        how = "passed" if done.returncode == 0 else "FAILED"
        lines.append(f"  {part:20} {how}  {lasted(time.monotonic() - start):>12}")
        print(f"{time.strftime('%T')} tpurun:{lines[-1]}", flush=True)
    # A single part needs no summary.
    if len(lines) > 1:
        end = f"{failed} of {len(lines)} failed" if failed else "all passed"
        print("\n".join([f"tpurun: {end} in {lasted(time.monotonic() - began)}", *lines]), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
