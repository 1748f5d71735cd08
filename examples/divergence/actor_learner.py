"""This module holds what actor.py and learner.py agree on: the shape of a batch, the policy to find, the
group of a pair."""

import torch
import torch.distributed as dist

import tpurun

STATES, ACTIONS = 4, 2
NOISE = 0.3
# Sent instead of a number of plays.
DONE = 0


def goal() -> torch.Tensor:
    """The policy that gets the highest reward: linear, as the one that is learned."""
    return torch.linspace(-1, 1, STATES * ACTIONS).view(STATES, ACTIONS)


def empty_batch(count: int) -> torch.Tensor:
    """Room for this many plays, one per row: state, action, reward."""
    return torch.empty(count, STATES + ACTIONS + 1)


def split(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, actions and rewards of a batch."""
    return batch[:, :STATES], batch[:, STATES:-1], batch[:, -1]


def make_pairs() -> dict[int, dist.ProcessGroup]:
    """For each actor the group of the learner and it; every rank calls it, as torch wants it of new_group."""
    programs = tpurun.programs()
    learner = programs["learner"].ranks[0]
    return {actor: dist.new_group([learner, actor]) for actor in programs["actor"].ranks}
