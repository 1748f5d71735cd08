"""The files by which a rank tells the launcher of itself, beside the one of its error.

TORCHELASTIC_ERROR_FILE names the latter; the others have its name and an ending each.
"""

from __future__ import annotations

import os


def is_rank() -> bool:
    """Whether this process is the rank, and not one that the program has forked."""
    return os.environ.get("TPURUN_RANK_PID") == str(os.getpid())


def tell(ending: str, content: bytes) -> None:
    """Writes the rank's file with this ending, as ``groups``; nothing where this process is no rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and is_rank():
        write_whole(f"{path}.{ending}", content)


def write_whole(path: str, content: bytes) -> None:
    """Writes a file that readers see whole or not at all."""
    try:
        with open(f"{path}.part", "wb") as file:
            file.write(content)
        os.replace(f"{path}.part", path)
    except OSError:
        # The traceback on stderr says the same; a full disk must not hide it.
        pass
