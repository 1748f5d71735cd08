"""Ranks are forked from one process that has imported torch, so a test takes tenths of a second."""

import os

# A process that has used several OpenMP threads can not be forked.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
