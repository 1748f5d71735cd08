"""The commands of several suites share these options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Parses some of these names with commas between them, or `all`."""

    def parse(text: str) -> list[str]:
        given = list(known) if text == "all" else text.split(",")
        if unknown := set(given) - set(known):
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, given {', '.join(unknown)}"
            )
        return given

    return parse
