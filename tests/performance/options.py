"""The command line of the report, whose errors are one line: what was expected, and what was given."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpurun.bench import parse_size

from .settings import COLLECTIVES, PARTS, QUICK_SIZES, SIZES, Settings

WHAT = "Measures this backend beside Gloo, Open MPI and MPICH (an hour), and writes docs/performance.md."
QUICK_SECONDS = 0.05
MOST_SECONDS = 3600


@dataclass(frozen=True)
class Options:
    """The options say what to measure, or which measurements to show, and where the page goes."""

    settings: Settings
    parts: tuple[str, ...]
    out: Path
    stored: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Ends the process with a line on stderr when they are wrong."""
    parser = Parser(prog="python -m tests.performance", description=WHAT, allow_abbrev=False)
    parser.add_argument("--parts", type=names_of(PARTS), help=f"all, or some of {','.join(PARTS)} [all]")
    parser.add_argument("--ranks", type=listed(ranks), help="numbers of ranks [each part its own]")
    parser.add_argument("--sizes", type=listed(parse_size), help="such as 8,64K,1M [8,1K,64K,1M,16M,64M]")
    parser.add_argument("--collectives", type=names_of(COLLECTIVES), help=f"some of {','.join(COLLECTIVES)}")
    parser.add_argument("--seconds", type=seconds, help="for each row and backend [1]")
    parser.add_argument("--quick", action="store_true", help="a small grid, short blocks: whether it works")
    parser.add_argument("--from", dest="stored", type=Path, metavar="FILE", help="show these results again")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="FOLDER", help="[docs]")
    given = parser.parse_args(arguments)
    measuring = [f"--{name}" for name in ("parts", "ranks", "sizes", "collectives", "seconds", "quick")]
    if given.stored and (both := [name for name in measuring if getattr(given, name[2:])]):
        parser.error(f"expected --from or what to measure, given --from and {', '.join(both)}")
    settings = Settings(
        sizes=given.sizes or (QUICK_SIZES if given.quick else SIZES),
        collectives=given.collectives or COLLECTIVES,
        ranks=given.ranks,
        seconds=given.seconds or (QUICK_SECONDS if given.quick else Settings.seconds),
        is_quick=given.quick,
    )
    return Options(settings, given.parts or PARTS, given.out, given.stored)


class Parser(argparse.ArgumentParser):
    """Errors without the usage, which would hide them."""

    def error(self, message: str) -> None:
        self.exit(2, f"tests.performance: {message}\n")


def names_of(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Some of these, or `all`; in their own order."""

    def name(text: str) -> str:
        if text not in known:
            raise ValueError(f"expected some of {', '.join(known)}, given {text!r}")
        return text

    def parse(text: str) -> tuple[str, ...]:
        given = set(known) if text == "all" else set(listed(name)(text))
        return tuple(one for one in known if one in given)

    return parse


def listed(parse_one: Callable[[str], object]) -> Callable[[str], tuple]:
    """Values with commas between them, each once."""

    def parse(text: str) -> tuple:
        try:
            return tuple(dict.fromkeys(parse_one(part.strip()) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def ranks(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= 1024):
        raise ValueError(f"expected numbers of 2 to 1024 ranks, given {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds up to {MOST_SECONDS}, given {text!r}")
    return value
