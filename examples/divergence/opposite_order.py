"""Two groups of the same ranks, which the last rank uses in the opposite order.

    tpurun -n 8 examples/divergence/opposite_order.py
    tpurun -n 8 examples/divergence/opposite_order.py --blocking

Shows: asynchronous operations complete, whatever the order, because groups never wait for each other.
Blocking ones can not: each side waits in one group for the other, which waits in the other group. That
circle is a DeadlockError as soon as it has formed, not when a timeout passes.
"""

import sys

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("tpu_dist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.ones(4), torch.full((4,), 10.0)]
    order = [1, 0] if rank == ranks - 1 else [0, 1]
    is_async = "--blocking" not in sys.argv
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=is_async) for index in order]
    for work in filter(None, works):
        work.wait()
    if rank == 0:
        print([tensor[0].item() for tensor in tensors])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
