"""Programs in interpreters of their own, without what the environment says of the device."""

import os
import subprocess
import sys
import textwrap


def python(code: str, **env: str) -> str:
    """Runs a program that is given as text, and returns what it prints."""
    return interpreter("-c", textwrap.dedent(code), **env)


def interpreter(*arguments: str, **env: str) -> str:
    """Runs an interpreter that must succeed, and returns what it prints."""
    words = {name: value for name, value in os.environ.items() if not name.startswith("TPURUN")} | env
    done = subprocess.run(
        [sys.executable, *arguments], env=words, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
