"""tpurun.tune: where a threshold is set, and that its numbers are those of the engine."""

import math
import re
from pathlib import Path

import pytest

from tpurun.tune import NEVER, THRESHOLDS, Finding, K, M, Machine, Measured, as_toml, scaled

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / ".ci").exists())
MACHINES = [Machine(8, 2, 1), Machine(64, 2, 1), Machine(2, 2, 1), Machine(8, 2, 2), Machine(9, 2, 3)]


def engine_defaults() -> dict[str, int]:
    source = (ROOT / "collectives/protocol/src/tuning.rs").read_text()
    found = re.findall(r"^    (\w+): ([0-9_]+)(?: << ([0-9]+))?, [^;]+;$", source, re.MULTILINE)
    return {name: int(value) << int(shift or 0) for name, value, shift in found}


def test_all_numbers_of_the_engine_are_found():
    defaults = engine_defaults()
    assert len(defaults) > 30
    assert (defaults["pipeline_bytes"], defaults["scattered_hosts"]) == (M, 3)


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: threshold.name)
def test_what_is_called_ours_is_what_the_engine_does(threshold):
    defaults = engine_defaults()
    for machine in filter(threshold.applies, MACHINES):
        ours = scaled(threshold, machine, threshold.default(machine))
        for name, value in ours.items():
            # The least of all tensors in place counts where parts are less, and the sum for few ranks.
            if name.startswith("in_place_"):
                least = defaults["in_place_bytes"] / machine.ranks
                assert value == max(defaults[name], math.ceil(least)), (machine, name)
            elif name == "shares_fold_part":
                assert value == min(defaults[name], defaults["shares_fold_bytes"] // machine.ranks)
            elif name == "shares_fold_bytes":
                assert value == min(defaults[name], defaults["shares_fold_part"] * machine.ranks)
            else:
                assert value == defaults[name], (machine, name)


def test_each_threshold_is_for_some_machine():
    for threshold in THRESHOLDS:
        assert any(threshold.applies(machine) for machine in MACHINES), threshold.name
    assert not any(
        threshold.applies(Machine(2, 4, 1)) for threshold in THRESHOLDS if "shares" in threshold.name
    )


SIZES = [K << power for power in range(6)]


def measured(first: list[float], second: list[float]) -> Measured:
    return Measured(SIZES, first, second)


def test_the_threshold_is_where_the_first_way_becomes_faster():
    found = measured([2, 2, 2, 2, 2, 2], [1, 1, 1, 3, 4, 8])
    assert found.best(16 * K) == 8 * K
    assert found.gain(8 * K, 16 * K) == pytest.approx(1 - (2 / 3) ** (1 / 6))
    # One bad measurement on either side moves nothing.
    assert measured([2, 0.9, 2, 2, 2, 2], [1, 1, 1, 3, 4, 8]).best(K) == 8 * K


def test_ours_stays_where_nothing_gains():
    assert measured([1.01] * 6, [1.0] * 6).best(4 * K) == 4 * K
    assert measured([1.2] * 6, [1.0] * 6).best(4 * K) == 64 * K
    # The measured sizes say nothing of what is beyond.
    assert measured([1.2] * 6, [1.0] * 6).best(M) == M
    assert measured([1.0] * 6, [1.2] * 6).best(100) == 100
    assert measured([1.0] * 6, [1.2] * 6).best(32 * K) == K


def test_a_file_has_what_is_other_than_ours():
    machine = Machine(8, 2, 1)
    pipeline, in_place = THRESHOLDS[0], THRESHOLDS[1]
    rows = measured([1.0] * 6, [1.5] * 6)
    text = as_toml(
        [Finding(pipeline, rows, M, 2 * M), Finding(in_place, rows, 32 * K, 16 * K)], machine, "2026-01-02"
    )
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == ["pipeline_bytes = 2097152", "in_place_fold_part = 2048", "in_place_bytes = 0"]
    assert "8 ranks on 2 CPUs of 1 host." in text and "1K:1.50" in text
    # Without in_place_bytes the part of another kind would be less than it is.
    broadcast = Finding(THRESHOLDS[2], rows, 64 * K, 64 * K)
    both = as_toml([Finding(in_place, rows, 32 * K, 16 * K), broadcast], machine, "2026-01-02")
    assert "in_place_broadcast_part = 8192" in both.splitlines()
    same = as_toml([Finding(pipeline, rows, M, M)], machine, "2026-01-02")
    assert not [line for line in same.splitlines() if line and not line.startswith("#")]


def test_numbers_stay_within_bounds():
    machine = Machine(8, 2, 1)
    for threshold in THRESHOLDS:
        for size in (0, 1, NEVER * 100):
            for name, value in scaled(threshold, machine, size).items():
                assert 0 <= value <= NEVER, name
                assert name != "cache_bytes" or value >= K
