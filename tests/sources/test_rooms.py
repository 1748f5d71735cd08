"""The rooms of the shim form floors: each includes only those below it, so none of them is in a circle."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "python/csrc"
FLOORS = [
    "abi",
    "interpreter",
    "device/order",
    "device/memory",
    "device/special",
    "device/dispatch",
    "device",
    "program/tiles",
    "program",
    "program/fused",
    "operation",
    "process_group",
    ".",
]
# This module is built alone.
APART = "stacks"


def room(path: str) -> str:
    return str(Path(path).parent)


def test_each_room_includes_only_those_below_it():
    for path in sorted([*SHIM.rglob("*.h"), *SHIM.rglob("*.cpp")]):
        name = str(path.relative_to(SHIM))
        included = re.findall(r'^#include "(.+)"$', path.read_text(), re.MULTILINE)
        if room(name) == APART:
            assert not included, f"{name} includes {included}"
            continue
        # The headers of the ABI are C, which programs read without the folder's name.
        rooms = [room(name) if (path.parent / one).exists() else room(one) for one in included]
        wrong = [one for one in rooms if FLOORS.index(one) > FLOORS.index(room(name))]
        assert not wrong, f"{name} is below {wrong}"
