"""An actor of an actor-learner job: plays with the newest policy, sends what it saw, gets a better policy.

    tpurun -n 1 --role learner examples/divergence/learner.py : -n 4 --role actor examples/divergence/actor.py
    tpurun --job examples/divergence/actor_learner.toml

Actor i plays `--rounds` plus i times `--more` rounds and then leaves; those that go on do not notice. The
actors talk to each other through the group of their program, without the learner.
"""

import argparse

import actor_learner
import torch
import torch.distributed as dist

import tpurun


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--more", type=int, default=10, help="rounds that each actor plays more than the last"
    )
    parser.add_argument("--batch", type=int, default=64, help="plays per round")
    return parser.parse_args()


def play(weights: torch.Tensor, count: int, random: torch.Generator) -> torch.Tensor:
    """Acts near what the policy says; the reward is the higher the nearer the action is to the goal's."""
    states = torch.randn(count, actor_learner.STATES, generator=random)
    noise = torch.randn(count, actor_learner.ACTIONS, generator=random)
    actions = states @ weights + actor_learner.NOISE * noise
    rewards = -((actions - states @ actor_learner.goal()) ** 2).sum(1, keepdim=True)
    return torch.cat([states, actions, rewards], dim=1)


def main() -> None:
    args = parse_args()
    dist.init_process_group("tpu_dist")
    own, rank = tpurun.program(), dist.get_rank()
    learner = tpurun.programs()["learner"].ranks[0]
    pair = actor_learner.make_pairs()[rank]
    rounds = args.rounds + own.ranks.index(rank) * args.more
    total = torch.tensor([rounds])
    dist.all_reduce(total, group=own.group)
    print(f"{rounds} of {total.item()} rounds", flush=True)
    random = torch.Generator().manual_seed(rank)
    weights = torch.zeros(actor_learner.STATES, actor_learner.ACTIONS)
    for _ in range(rounds):
        batch = play(weights, args.batch, random)
        dist.send(torch.tensor([len(batch)]), learner)
        dist.send(batch, learner)
        dist.broadcast(weights, learner, group=pair)
    dist.send(torch.tensor([actor_learner.DONE]), learner)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
