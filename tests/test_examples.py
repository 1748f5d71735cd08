"""The examples of diverging ranks: each prints the verdict that its header promises."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import Finished

EXAMPLES = Path(__file__).parents[1] / "examples" / "divergence"
RANKS = 8
LAST = RANKS - 1


@pytest.fixture
def example(run) -> Callable[..., Finished]:
    """Runs one as its header says."""

    def run_example(name: str, *arguments: str, **options) -> Finished:
        return run("-n", str(RANKS), EXAMPLES / f"{name}.py", *arguments, **options)

    return run_example


def line_of(name: str, text: str, which: int = 0) -> str:
    """Where an example says this, as a verdict writes it."""
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    return f"{name}.py:{[number for number, line in enumerate(lines, 1) if text in line][which]}"


def assert_blamed(done: Finished, kind: str, *said: str) -> None:
    """The report says all of it, and blames the last rank, which each example makes the guilty one."""
    assert done.code != 0, done.out
    assert done.report.culprit == LAST, done.report.text
    text = re.sub(r" \(host [^)]*\)", "", done.report.text)
    missing = [part for part in (kind, *said) if part not in text]
    assert not missing, f"{missing} in {text}"


def test_rank_0_may_evaluate(example):
    done = example("evaluate_on_rank_0")
    assert done.code == 0, done.err
    assert "trained 4 steps" in done.log(0)
    waited = re.search(r"rank 1 spent ([0-9.]+) s in its other group, ([0-9.]+) s in all", done.log(1))
    assert float(waited[1]) < 1 < float(waited[2]), "the group without rank 0 did not wait for it"


def test_a_rank_with_fewer_batches_is_named(example):
    assert_blamed(
        example("uneven_batches"),
        "DeadlockError",
        "destroyed 0 before operation",
    )


def test_join_lets_a_rank_have_fewer_batches(example):
    done = example("uneven_batches", "--join")
    assert (done.code, done.log(0)) == (0, "trained 4 batches\n"), done.err


def test_metrics_of_other_shapes_do_not_match(example):
    at = line_of("metric_order", "dist.all_reduce(value")
    assert_blamed(
        example("metric_order"),
        "CollectiveMismatchError",
        f"ranks 0-{LAST - 1} posted all_reduce(f32[], avg) at {at}",
        f"rank {LAST} posted all_reduce(f32[10], avg) at {at}",
    )


def test_metrics_of_the_same_shape_are_mixed_up(example):
    """As the header says: only call sites tell them apart."""
    done = example("metric_order", "--same-shapes")
    assert (done.code, done.log(0)) == (0, "{'loss': 3.562, 'accuracy': 0.938}\n"), done.err


def test_call_sites_tell_metrics_apart(example):
    done = example("metric_order", "--same-shapes", env={"TPURUN_MATCH": "strict"})
    assert_blamed(
        done,
        "CollectiveMismatchError",
        line_of("metric_order", 'dist.all_reduce(metrics["loss"]'),
        line_of("metric_order", 'dist.all_reduce(metrics["accuracy"]'),
    )


def test_groups_in_opposite_order_complete(example):
    done = example("opposite_order")
    assert (done.code, done.log(0)) == (0, "[8.0, 80.0]\n"), done.err


def test_groups_in_opposite_order_that_block_are_a_deadlock(example):
    assert_blamed(
        example("opposite_order", "--blocking"),
        "DeadlockError",
        line_of("opposite_order", "dist.all_reduce("),
    )


def test_sum_does_not_match_max(example):
    done = example("sum_against_max")
    assert_blamed(
        done,
        "CollectiveMismatchError",
        f"ranks 0-{LAST - 1} posted all_reduce(f32[1024], sum) at {line_of('sum_against_max', '.SUM)')}",
        f"rank {LAST} posted all_reduce(f32[1024], max) at {line_of('sum_against_max', '.MAX)')}",
    )
    assert not any("goes on" in done.log(rank) for rank in range(RANKS)), done.out


def test_a_skipped_step_shows(example):
    done = example("skipped_step")
    step, evaluation = (line_of("skipped_step", f".all_reduce({what}") for what in ("gradient", "accuracy"))
    assert_blamed(
        done,
        "CollectiveMismatchError",
        f"ranks 0-{LAST - 1} posted all_reduce(f32[1024], avg) at {step}",
        f"rank {LAST} posted all_reduce(f32[], avg) at {evaluation}",
    )
    assert f"rank {LAST} skips step 2: its loss is nan\n" in done.log(LAST)


def test_a_killed_rank_makes_the_job_smaller(run, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    done = run("--elastic", f"4:{RANKS}", EXAMPLES / "killed_rank_restart.py", checkpoint)
    assert done.code == 0, done.err
    said = [
        f"{RANKS} ranks begin with step 0",
        f"{RANKS - 1} ranks begin with step 3",
        "trained 6 steps, weights -0.6",
    ]
    assert [line for line in done.log(0).splitlines() if line in said] == said, done.log(0)
    assert "SIGKILL" in done.err, done.err


@pytest.mark.parametrize(
    "policy", [("--elastic", f"4:{RANKS}"), ("--on-failure", "continue", "-n", str(RANKS))]
)
def test_the_others_go_on_without_a_killed_rank(run, policy: tuple[str, ...]):
    done = run(*policy, EXAMPLES / "killed_rank_goes_on.py")
    assert done.code == 0, done.err
    lost, trained = done.log(0).splitlines()
    assert re.fullmatch(rf"lost \({LAST},\): {RANKS - 1} ranks repeat step 3 after \d+ ms", lost), lost
    assert trained == "trained 6 steps, weights -0.6"
    assert re.search(rf"lost rank {LAST}: was killed by SIGKILL", done.err), done.err
