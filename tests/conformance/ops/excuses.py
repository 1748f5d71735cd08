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


EXCUSES: tuple[Excuse, ...] = ()


def reason(name: str, kind: str, dtype: str, said: str) -> str | None:
    for excuse in EXCUSES:
        whole = ((excuse.names, name), (excuse.kinds, kind), (excuse.dtypes, dtype))
        if all(re.fullmatch(pattern, text) for pattern, text in whole) and re.search(excuse.said, said):
            return excuse.reason
    return None
