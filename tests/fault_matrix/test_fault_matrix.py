"""A slice of the matrix; `make full` runs all on 2 and 8 ranks, `make fault-matrix` on 64, too."""

from pathlib import Path

import pytest

from fault_matrix import endings, start
from fault_matrix.cells import FAULTS, OPS, Cell, cells
from fault_matrix.oracle import MEANINGLESS, expected
from tools.slices import FULL, some

AXES = ("fault", "op", "mode")
# With every change one cell of so many, on one of the two sizes.
EVERY = 5
# On 64 ranks one operation of each kind: one that all ranks do alike, one with a root, one between pairs.
SAMPLE = [("all_reduce", "sync"), ("broadcast", "async"), ("send_recv", "sync")]


def slice_of(chosen: list[Cell], every: int) -> list[Cell]:
    """One of so many: each fault, and each operation, is in one of them."""
    faults, ops, modes = (list(dict.fromkeys(getattr(cell, name) for cell in chosen)) for name in AXES)

    def place(cell: Cell) -> int:
        return faults.index(cell.fault) + ops.index(cell.op) + modes.index(cell.mode)

    return [cell for cell in chosen if FULL or place(cell) % every == 0]


def assert_right(chosen: list[Cell]) -> None:
    judged = start.run(chosen, lambda _: None)
    assert len(judged) == sum(expected(cell).kind != MEANINGLESS for cell in chosen)
    wrong = [f"{one.cell.name}: {'; '.join(one.problems)}" for one in judged if not one.is_right]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(judged)} cells are wrong:", *wrong])


@pytest.mark.slice(2)
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_fault_in_every_operation(ranks: int):
    assert_right(slice_of(list(cells([ranks], FAULTS, OPS)), EVERY))


def test_some_of_it_on_64_ranks():
    chosen = [cell for op, mode in SAMPLE for cell in cells([64], FAULTS, [op], [mode])]
    assert_right(slice_of(chosen, 5))


@pytest.mark.parametrize("ranks", some(endings.RANKS, 2))
@pytest.mark.parametrize("case", some(endings.CASES, 8), ids=lambda case: case.name)
def test_the_ends_of_programs(tmp_path: Path, case: endings.Case, ranks: int):
    assert not endings.run(case, ranks, tmp_path).problems


def test_a_slice_has_every_fault_and_every_operation():
    for ranks in (2, 8):
        cut = slice_of(list(cells([ranks], FAULTS, OPS)), EVERY)
        meant = [cell for cell in cut if expected(cell).kind != MEANINGLESS]
        assert {cell.fault for cell in meant} == {*FAULTS} and {cell.op for cell in meant} == {*OPS}


def test_every_cell_has_a_verdict_and_a_reason():
    for cell in cells([2, 8, 64], FAULTS, OPS):
        wanted = expected(cell)
        assert wanted.why, cell.name
        assert (wanted.kind == MEANINGLESS) == (cell.fault in ONLY and cell.op not in ONLY[cell.fault](cell))


# The faults that some operations do not have, and those that have them.
ONLY = {
    "wrong_reduce_op": lambda _: {"all_reduce", "reduce_scatter"},
    "wrong_root": lambda cell: {"broadcast", "send_recv"} if cell.ranks > 2 else {"broadcast"},
    "wrong_dtype": lambda _: {*OPS} - {"barrier"},
    "wrong_shape": lambda _: {*OPS} - {"barrier"},
}
