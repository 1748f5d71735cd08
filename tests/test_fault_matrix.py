"""The whole matrix on 2 and 8 ranks, and some of it on 64; `make fault-matrix` runs the rest, too."""

import pytest

from fault_matrix import start
from fault_matrix.cells import FAULTS, OPS, Cell, cells
from fault_matrix.oracle import MEANINGLESS, expected

# On 64 ranks one operation of each kind: one that all ranks do alike, one with a root, one between pairs.
SAMPLE = [("all_reduce", "sync"), ("broadcast", "async"), ("send_recv", "sync")]


def assert_right(chosen: list[Cell]) -> None:
    judged = start.run(chosen, lambda _: None)
    assert len(judged) == sum(expected(cell).kind != MEANINGLESS for cell in chosen)
    wrong = [f"{one.cell.name}: {'; '.join(one.problems)}" for one in judged if not one.is_right]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(judged)} cells are wrong:", *wrong])


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_fault_in_every_operation(ranks: int):
    assert_right(list(cells([ranks], FAULTS, OPS)))


def test_some_of_it_on_64_ranks():
    assert_right([cell for op, mode in SAMPLE for cell in cells([64], FAULTS, [op], [mode])])


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
