"""The checks that need not pass, each with its reason. All others count."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Excuse:
    """Patterns that match the whole name, kind and dtype, and a part of what was said."""

    names: str
    reason: str
    kinds: str = ".*"
    dtypes: str = ".*"
    said: str = ""
    way: str = "cpu"


EXCUSES: tuple[Excuse, ...] = (
    Excuse(
        ".*",
        "torch traces other operations than it runs in eager; one by one, they do the same",
        said="^torch's own tracing: ",
        way="compiled",
    ),
    Excuse(
        "nonzero_static",
        "a traced result lies as the trace says, in order; eager's kernel lays it out transposed",
        said="expected stride",
        way="compiled",
    ),
)


def reason(name: str, kind: str, dtype: str, said: str, way: str = "cpu") -> str | None:
    for excuse in EXCUSES:
        whole = ((excuse.names, name), (excuse.kinds, kind), (excuse.dtypes, dtype), (excuse.way, way))
        if all(re.fullmatch(pattern, text) for pattern, text in whole) and re.search(excuse.said, said):
            return excuse.reason
    return None
