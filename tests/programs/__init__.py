"""Programs as people write them, on CPU tensors: do they compute what one process computes?

``make programs LAUNCHER=nodes`` (or ``python -m programs --help`` in `tests`) runs them. Each family is a
file (`ddp.py`, `fsdp2.py`, ..) of small programs; each program computes its own *oracle*, the same seeds and
the whole batch in one process without any collective, and compares losses, gradients, parameters or tensors.
`case.py` says what a program is given, `rank.py` runs many of them in one job, `start.py` starts jobs under
any launcher and collects what every rank found, `training.py` is the loop they share.
"""
