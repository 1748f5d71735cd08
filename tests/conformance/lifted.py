"""Which of the suites' skips do not apply to this backend.

The decorators of PyTorch's suites ask for a backend by name. Some need what the name stands for, CUDA tensors
above all; others only say which backend had a feature when the test was written. Those are lifted here, by
the reason they give, before the suite is imported; nothing of the suite's text is copied or changed.
"""

from __future__ import annotations

import re
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from .plan import BACKEND

# The reason, and why the test applies.
LIFTED = {
    r"Only gloo backend supports timeouts": "so does this one",
    r"GLOO Batch Send Recv CPU": "it sends CPU tensors",
    r"get_future is only supported on mpi, nccl and gloo": "and on this one",
    r"Only MPI supports (CPU )?all_to_all(_single)?": "so does this one",
    r"Only Gloo backend supports sparse all reduce": "so does this one",
    r"Only Nccl & Gloo backend support DistributedDataParallel": "so does this one",
    rf"Test requires backend {BACKEND} to be one of .*'gloo'.*": "what is said of Gloo holds here",
    r"https://github.com/pytorch/pytorch/issues/(164195|162584|162676|85012|77342|137765)": (
        "switched off on Linux for a fault of Gloo's or of PyTorch's own machines"
    ),
}

# Their bodies ask for the name only to choose CPU tensors, and do nothing for a name they do not know.
CPU_BY_NAME = re.compile(r"test_accumulate_gradients_no_sync.*")

GLOOS_WORDS = "asserts Gloo's words, which are others on every rank; here all ranks say one"

# Tests that can not pass on any backend but the one they are about, and why.
NOT_APPLICABLE = {
    "test_monitored_barrier_gloo": GLOOS_WORDS,
    "test_monitored_barrier_failure_order": GLOOS_WORDS,
    "test_ddp_logging_data_cpu": "asserts a name that DDP's log has only for PyTorch's own backends",
    "test_barrier_timeout_arg": "asserts Gloo's words for a timeout of 1 ms; here who left is told at once",
}

# The names that `DistTestCases.backend_feature` has for the things we have. "gpu" and "cuda" mean CUDA
# tensors.
FEATURES = ("ddp", "subgroup", "plugin")


def is_lifted(reason: str) -> bool:
    return any(re.fullmatch(pattern, reason) for pattern in LIFTED)


@contextmanager
def lifted() -> Iterator[None]:
    """While a suite is imported: its decorators know this backend."""
    from torch.testing._internal import common_distributed, common_utils

    for feature in FEATURES:
        common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
    with ExitStack() as stack:
        for name in ("skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"):
            decorator = unless_lifted(getattr(common_utils, name))
            stack.enter_context(patch.object(common_utils, name, decorator))
        stack.enter_context(patch.object(unittest, "skipIf", unless_lifted(unittest.skipIf)))
        yield


def unless_lifted(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator, of which the last argument is the reason, or none at all."""

    def choose(*arguments: Any) -> Any:
        return (lambda test: test) if is_lifted(arguments[-1]) else decorator(*arguments)

    return choose


@contextmanager
def named_gloo(module: ModuleType | None, test: str) -> Iterator[None]:
    """While a test runs: what it asks for as Gloo is this backend."""
    create = dist.init_process_group

    def created_as_ours(backend: str | None = None, *arguments: Any, **named: Any) -> None:
        create(BACKEND if backend == "gloo" else backend, *arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "init_process_group", created_as_ours))
        if module is not None and CPU_BY_NAME.fullmatch(test):
            stack.enter_context(patch.object(module, "BACKEND", "gloo"))
        yield
