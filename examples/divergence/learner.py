"""The learner of an actor-learner job: improves a policy on whatever batch comes first, and sends it back.

    tpurun -n 1 --role learner examples/divergence/learner.py : -n 4 --role actor examples/divergence/actor.py
    tpurun --job examples/divergence/actor_learner.toml

Two programs in one world. The actors play different numbers of rounds, each at its own pace, and wait for
nobody but the learner: each of them shares a group of two with it, and groups do not disturb each other.
"""

import argparse

import actor_learner
import torch
import torch.distributed as dist


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--log-every", type=int, default=40, metavar="BATCHES")
    return parser.parse_args()


def improve(weights: torch.Tensor, played_with: torch.Tensor, batch: torch.Tensor, lr: float) -> float:
    """One step of REINFORCE (Williams, 1992) with normalised rewards; returns their mean.

    The gradient is that of the weights the actor has played with, which are a few steps old.
    """
    states, actions, rewards = actor_learner.split(batch)
    advantage = (rewards - rewards.mean()) / rewards.std()
    noise = actions - states @ played_with
    weights += lr * states.T @ (advantage[:, None] * noise) / (len(batch) * actor_learner.NOISE**2)
    return rewards.mean().item()


def main() -> None:
    args = parse_args()
    dist.init_process_group("tpu_dist")
    pairs = actor_learner.make_pairs()
    weights = torch.zeros(actor_learner.STATES, actor_learner.ACTIONS)
    sent = {actor: weights.clone() for actor in pairs}
    batches, reward, playing = 0, float("nan"), set(pairs)
    while playing:
        header = torch.empty(1, dtype=torch.int64)
        actor = dist.recv(header)  # from whichever actor is first
        if header.item() == actor_learner.DONE:
            playing.remove(actor)
            print(f"actor {actor} is done, {len(playing)} go on", flush=True)
            continue
        batch = actor_learner.empty_batch(int(header))
        dist.recv(batch, actor)
        reward = improve(weights, sent[actor], batch, args.lr)
        sent[actor] = weights.clone()
        dist.broadcast(sent[actor], dist.get_rank(), group=pairs[actor])
        batches += 1
        if batches % args.log_every == 0:
            print(f"batch {batches} from actor {actor}: mean reward {reward:.3f}", flush=True)
    error = (weights - actor_learner.goal()).abs().max().item()
    print(f"learned from {batches} batches: last mean reward {reward:.3f}, largest error {error:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
