"""Every rank averages the same metrics, but the last one in another order.

    tpurun -n 8 examples/divergence/metric_order.py
    tpurun -n 8 examples/divergence/metric_order.py --same-shapes
    TPURUN_MATCH=strict tpurun -n 8 examples/divergence/metric_order.py --same-shapes

Dictionaries keep the order in which they were filled, and that may depend on the data. Shows: metrics of
different shapes do not match, and the verdict says who posted which. Two of the same shape do match, and
each becomes an average of both, unless call sites are compared, too.
"""

import sys

import torch
import torch.distributed as dist


def averaged_in_turn(metrics: dict[str, torch.Tensor]) -> None:
    for value in metrics.values():
        dist.all_reduce(value, dist.ReduceOp.AVG)


def average_loss(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["loss"], dist.ReduceOp.AVG)


def average_accuracy(metrics: dict[str, torch.Tensor]) -> None:
    dist.all_reduce(metrics["accuracy"], dist.ReduceOp.AVG)


def main() -> None:
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_last = rank == ranks - 1
    if "--same-shapes" in sys.argv:
        metrics = {"loss": torch.tensor(4.0), "accuracy": torch.tensor(0.5)}
        in_order = [average_loss, average_accuracy]
        for average in reversed(in_order) if is_last else in_order:
            average(metrics)
    else:
        metrics = {"loss": torch.tensor(4.0), "loss by class": torch.full((10,), 4.0)}
        if is_last:
            metrics = dict(reversed(metrics.items()))
        averaged_in_turn(metrics)
    if rank == 0:
        print({name: round(value.mean().item(), 3) for name, value in metrics.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
