"""How values of variables are read; the launcher reads them so, too: ``tests/variables`` holds both to it."""

from __future__ import annotations

import os
import re

_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:B|([KMGT])(?:iB?|B)?)?")


def switch(name: str) -> bool | None:
    """Whether a variable turns something on; None where it is empty or not set.

    Raises:
        RuntimeError: It has another value than a switch has.
    """
    given = os.environ.get(name, "")
    text = given.lower() if given.isascii() else given
    if text in _ON:
        return True
    if text in _OFF:
        return False
    if text:
        expected = "1, true, on or yes, or 0, false, off or no"
        raise RuntimeError(f"tpurun: {name}: expected {expected}, given {given!r}")
    return None


def size(name: str) -> int | None:
    """The bytes that a variable says, 1 MiB to 16 TiB in powers of two; None where it is empty or not set.

    Raises:
        RuntimeError: It has another value than a size like that.
    """
    given = os.environ.get(name, "")
    if not given:
        return None
    match = _SIZE.fullmatch(given)
    found = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not 2**20 <= found <= 2**44:
        expected = "a size of 1MiB to 16TiB such as 512MiB or 16GiB"
        raise RuntimeError(f"tpurun: {name}: expected {expected}, given {given!r}")
    return int(found)
