"""Strangers cost a rank little."""

from performance.strangers import FLOODERS, MOST_KB, run


def test_two_flooders_cost_a_rank_little_memory():
    seen = run(FLOODERS)
    assert seen.connections > 500, f"{seen.connections} strangers are no flood"
    assert seen.grown_kb <= MOST_KB, f"strangers took {seen.grown_kb} kB of rank 0"
