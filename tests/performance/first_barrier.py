"""``tpurun -n N first_barrier.py tpu_dist``: the least program of torch.distributed.

Rank 0 writes when the first barrier was over, by the clock that all processes of a machine share.
"""

import json
import sys
import time

import torch.distributed as dist

dist.init_process_group(sys.argv[1])
dist.barrier()
if dist.get_rank() == 0:
    print(json.dumps({"monotonic_s": time.monotonic()}), flush=True)
dist.destroy_process_group()
