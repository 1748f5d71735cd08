"""A long run in which nothing is wrong: 64 ranks of random speed in overlapping groups.

``tpurun -n 64 tests/faults/soak.py --seconds 300`` (or ``make soak SECONDS=300``). Each step, every rank
computes or sleeps for a random time, up to ``--skew`` seconds, then takes part in random operations of random
groups it is in, blocking and asynchronous, and checks every result. No rank is ever stuck, only slow. So
anything that the launcher or the engine says of a rank is a false alarm, and fails the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from fault_matrix.acts import compute
from fault_matrix.operations import Operation, Team, operation
from fault_matrix.programs import Call

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
STEP_OPERATIONS = 8
GROUPS = 12
# The mean number of ranks that are slow in a step. It is small because all others wait for them.
MEAN_SLOW_RANKS = 2


@dataclass(frozen=True)
class Skew:
    """How a rank spends its time before a step."""

    seconds: float
    is_computing: bool

    def spend(self) -> None:
        if self.is_computing:
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                compute(min(0.01, self.seconds))
        else:
            time.sleep(self.seconds)


@dataclass(frozen=True)
class Posted:
    """An operation of a step: all ranks of its group draw the same."""

    group: int
    call: Call
    is_async: bool


def skews(dice: random.Random, ranks: int, longest_s: float) -> list[Skew]:
    """Most ranks are quick, a few take up to the longest time; about half of either really compute."""
    chance = MEAN_SLOW_RANKS / ranks
    return [
        Skew(
            dice.uniform(0, longest_s) if dice.random() < chance else dice.uniform(0, 0.05),
            dice.random() < 0.5,
        )
        for _ in range(ranks)
    ]


def members(dice: random.Random, ranks: int) -> list[list[int]]:
    """The ranks of each group: the world, halves that overlap, and random ones."""
    some = [sorted(dice.sample(range(ranks), dice.randint(2, ranks))) for _ in range(GROUPS - 3)]
    return [list(range(ranks)), list(range(ranks * 2 // 3)), list(range(ranks // 3, ranks)), *some]


def step(dice: random.Random) -> Iterator[Posted]:
    """Draws the operations of a step, in an order that is the same on all ranks. In different orders,
    blocking groups could wait in a circle."""
    for _ in range(STEP_OPERATIONS):
        call = Call(dice.choice(COLLECTIVES), scale=dice.choice((1, 1, 10, 400)))
        yield Posted(dice.randrange(GROUPS), call, dice.random() < 0.5)


def exchange(dice: random.Random, team: Team) -> Operation:
    return operation(Call("send_recv", scale=dice.choice((1, 100))), team)


def run_step(dice: random.Random, teams: list[Team | None]) -> int:
    """Posts the operations of a step, waits for them, checks them; returns how many there were."""
    pending: list[Operation] = []
    done: list[Operation] = []
    for posted in step(dice):
        team = teams[posted.group]
        if team is None:
            continue
        one = operation(posted.call, team)
        if posted.is_async:
            one.post()
            pending.append(one)
        else:
            one.run()
        done.append(one)
    one = exchange(dice, teams[0])
    one.run()
    for waited in pending:
        waited.wait()
    for checked in (*done, one):
        assert not (problem := checked.problem()), problem
    return len(done) + 1


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("tpu_dist", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dice = random.Random(options.seed)
    teams = [
        Team(group, some, some.index(rank)) if rank in some else None
        for some in members(dice, ranks)
        for group in [dist.new_group(some)]
    ]
    began, steps, operations = time.monotonic(), 0, 0
    goes_on = torch.ones(1)
    while goes_on.item():
        skew = skews(dice, ranks, options.skew)[rank]
        skew.spend()
        operations += run_step(dice, teams)
        steps += 1
        # Rank 0's clock decides for all.
        goes_on.fill_(time.monotonic() - began < options.seconds)
        dist.broadcast(goes_on, 0)
    total = torch.tensor([operations])
    dist.all_reduce(total)
    if rank == 0:
        print(
            f"soak: {steps} steps, {total.item()} operations of {ranks} ranks, seed {options.seed}: all right"
        )
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300, help="how long to go on [300]")
    parser.add_argument(
        "--skew", type=float, default=30, help="longest time that a rank is behind, in s [30]"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything that is random [1]")
    return parser.parse_args()


if __name__ == "__main__":
    main()
