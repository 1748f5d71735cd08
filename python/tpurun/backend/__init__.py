"""The process groups of torch on this engine: how they are made, and what their ranks share."""

# TorchTPU's names, so that the same script runs on both.
NAMES = ("tpu_dist", "tpu")
