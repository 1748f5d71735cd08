"""Ranks with hash seeds of their own, and who shares one."""

import pytest

# Two interpreters agree about it less than once in 10^18 runs.
PROGRAM = "print(hash('some name'))\n"


@pytest.mark.parametrize(
    ("options", "fixed", "seeds"),
    [
        ([], {}, 1),
        (["--hash-seed", "per-rank"], {}, 3),
        (["--hash-seed", "per-rank"], {"PYTHONHASHSEED": "0"}, 3),
        (["--spawn"], {}, 3),
        (["--spawn"], {"PYTHONHASHSEED": "0"}, 1),
    ],
)
def test_which_ranks_share_a_hash_seed(run, script, options, fixed, seeds):
    done = run("-n", "3", *options, script(PROGRAM), env=fixed)
    assert done.code == 0, done.err
    assert len({done.log(rank) for rank in range(3)}) == seeds


def test_other_seeds_are_refused(run):
    done = run("--hash-seed", "7", "true")
    assert done.code == 2
    assert "--hash-seed: expected per-rank, given 7 (PYTHONHASHSEED fixes one for all)" in done.err
