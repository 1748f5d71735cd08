#!/usr/bin/env bash
# A loss with a reduction has a result of no dimensions. The out= forms of some losses are given such a tensor, of
# exactly that shape, and nevertheless resize it to the shape of the input, compute in it, and resize it back,
# with a warning that the given tensor had the wrong shape. Whoever plans the memory of results cannot hand out
# the four bytes that the result needs. sum leaves what it is given as it is.
set -euo pipefail
TORCH=2.15.0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==$TORCH" numpy
"$folder/venv/bin/python" - << 'PYTHON'
import sys
import warnings

import torch

aten = torch.ops.aten
x, wanted = torch.full((9,), 0.25), torch.ones(9)
MEAN = 1
calls = {
    "binary_cross_entropy": lambda out: aten.binary_cross_entropy.out(x, wanted, None, MEAN, out=out),
    "mse_loss": lambda out: aten.mse_loss.out(x, wanted, MEAN, out=out),
    "smooth_l1_loss": lambda out: aten.smooth_l1_loss.out(x, wanted, MEAN, out=out),
    "huber_loss": lambda out: aten.huber_loss.out(x, wanted, MEAN, out=out),
    "soft_margin_loss": lambda out: aten.soft_margin_loss.out(x, wanted, MEAN, out=out),
    "sum": lambda out: aten.sum.IntList_out(x, [0], out=out),
}
resized = set()
for name, call in calls.items():
    out = torch.empty(())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = call(out)
    warned = any("was resized" in str(one.message) for one in told)
    grown = out.untyped_storage().nbytes()
    resized |= {name} if grown > 4 else set()
    print(f"torch {torch.__version__}: {name} into a tensor of shape (): result of shape {tuple(result.shape)}, "
          f"storage of {grown} bytes, warned: {warned}")
sys.exit(0 if "binary_cross_entropy" in resized and "sum" not in resized else 1)
PYTHON
