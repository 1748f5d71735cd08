"""The command line, of the report and of the programs that it starts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..options import Parser, names_of, seconds
from .ways import WAYS
from .works import DEVICE, WORKS

WHAT = "Measures training steps compiled for the device beside eager ones and inductor's."
PARTS = ("steps", "first", "memory", "call")


@dataclass(frozen=True)
class Options:
    """The options say what to measure, and how long."""

    parts: tuple[str, ...] = PARTS
    works: tuple[str, ...] = WORKS
    ways: tuple[str, ...] = tuple(WAYS)
    rounds: int = 9
    seconds: float = 0.5
    """For each round and way."""
    backend: str = DEVICE

    def arguments(self) -> list[str]:
        """The command line that says the same."""
        return [
            *(
                "--parts",
                ",".join(self.parts),
                "--works",
                ",".join(self.works),
                "--ways",
                ",".join(self.ways),
            ),
            *("--rounds", str(self.rounds), "--seconds", str(self.seconds), "--backend", self.backend),
        ]

    def of_part(self, *parts: str) -> Options:
        """The same for those of these parts that were asked for."""
        return replace(self, parts=tuple(part for part in parts if part in self.parts))


def parse(arguments: Sequence[str]) -> Options:
    """Ends the process with a line on stderr when the options are wrong."""
    usual = Options()
    parser = Parser(prog="python -m tests.performance.compile", description=WHAT, allow_abbrev=False)
    parser.add_argument(
        "--parts", type=names_of(PARTS), default=PARTS, help=f"some of {','.join(PARTS)} [all]"
    )
    parser.add_argument(
        "--works", type=names_of(WORKS), default=WORKS, help=f"some of {','.join(WORKS)} [all]"
    )
    parser.add_argument(
        "--ways", type=names_of(WAYS), default=usual.ways, help=f"some of {','.join(WAYS)} [all]"
    )
    parser.add_argument("--rounds", type=rounds, default=usual.rounds, help=f"[{usual.rounds}]")
    parser.add_argument(
        "--seconds", type=seconds, default=usual.seconds, help=f"of each round and way [{usual.seconds}]"
    )
    parser.add_argument(
        "--backend", default=usual.backend, help="of torch.compile, for the ways of the device"
    )
    return Options(**vars(parser.parse_args(arguments)))


def rounds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"expected 1 to 1000 rounds, given {text!r}")
    return int(text)
