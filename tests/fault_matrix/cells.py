"""The cells of the matrix: which fault, in which operation, among how many ranks, posted how."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv", "barrier")
MODES = ("sync", "async")

# Faults after which the guilty process goes on, and what each means for the guilty rank.
LIVING = {
    "skip": "leaves the operation out and goes on to the next one, which is a different one",
    "skip_equal": "leaves one of equal operations out, then meets the others in a second group",
    "swap": "posts two different operations in the other order",
    "wrong_op": "posts another operation instead",
    "wrong_reduce_op": "reduces with MAX instead of SUM",
    "wrong_dtype": "posts int32 instead of float32",
    "wrong_shape": "posts twice as many elements",
    "wrong_root": "names another root; sends to another rank",
    "extra_op": "posts the operation once more",
    "reversed_groups": "uses two groups in the other order",
    "infinite_loop": "computes for ever instead of posting",
    "gil_hog": "holds the interpreter's lock: before a blocking operation, after posting an asynchronous one",
    "slow_x20": "computes 20 times as long as the others before each operation",
}
# Faults that the guilty process does not survive.
FATAL = {
    "raise": "raises an exception instead of posting",
    "exit0_early": "exits with code 0 instead of posting",
    "sigkill": "is killed instead of posting",
    "sigsegv": "crashes instead of posting",
    "sigstop": "is stopped instead of posting",
}
FAULTS = LIVING | FATAL

# How long groups wait where the fault shows in nothing but absence, and where something better must tell.
SHORT_S = 2.0
PATIENT_S = 10.0
# A guilty rank that is only absent stays away for longer than its group waits.
AWAY_S = SHORT_S + 1.0


@dataclass(frozen=True)
class Cell:
    """One fault in one operation."""

    ranks: int
    fault: str
    op: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.fault}/{self.op}/{self.ranks}/{self.mode}"

    @property
    def guilty(self) -> int:
        """The rank that commits the fault, by its number in the group: neither the first nor the last of
        many."""
        return self.ranks * 5 // 8

    @property
    def is_fatal(self) -> bool:
        return self.fault in FATAL

    @property
    def timeout_s(self) -> float:
        """The timeout of the groups of this cell, in seconds."""
        is_absence = self.fault == "infinite_loop" or (self.fault == "gil_hog" and self.mode == "sync")
        return SHORT_S if is_absence else PATIENT_S

    @staticmethod
    def parse(name: str) -> Cell:
        fault, op, ranks, mode = name.split("/")
        return Cell(int(ranks), fault, op, mode)


def cells(
    ranks: Iterable[int], faults: Iterable[str], ops: Iterable[str], modes: Iterable[str] = MODES
) -> Iterator[Cell]:
    """All combinations, meaningful or not."""
    faults, ops, modes = list(faults), list(ops), list(modes)
    for count in ranks:
        for fault in faults:
            for op in ops:
                for mode in modes:
                    yield Cell(count, fault, op, mode)
