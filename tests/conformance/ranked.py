"""Runs one test on one rank.

This module does what `MultiProcessTestCase` does in its child processes, but in any process. The test
function runs between two barriers with a process group of its own, and its end is an `Outcome` instead of an
exit code.
"""

from __future__ import annotations

import os
import time
import traceback
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .lifted import named_gloo
from .meeting import Meeting
from .plan import BACKEND, FAILED, PASSED, SKIPPED, Outcome, Plan
from .suites import SUITES, reason_to_skip

# The timeout of the process groups that tests find. Some tests ask for another (`timeouts_s` of the class).
TIMEOUT_S = 60


class Rank:
    """One rank of the job of a plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        os.environ.update(plan.environment())
        self.plan = plan
        self.rank = rank
        self.suite = SUITES[plan.suite]
        self.case = self.suite.load()

    def run(self, test: str, store: dist.Store) -> Outcome:
        """`store` is for the ranks of this test alone."""
        began = time.monotonic()
        if (reason := reason_to_skip(self.case, test)) is not None:
            return Outcome(test, SKIPPED, reason)
        meeting = Meeting(store, self.plan.ranks)
        outcome = self._outcome(test, store, meeting)
        if outcome.kind == FAILED:
            meeting.give_up(f"rank {self.rank} failed")
        if dist.is_initialized():
            dist.destroy_process_group()
        return replace(outcome, seconds=time.monotonic() - began)

    def _outcome(self, test: str, store: dist.Store, meeting: Meeting) -> Outcome:
        try:
            with self._own_environment(test):
                self._run(test, store, meeting)
        except unittest.SkipTest as skipped:
            return Outcome(test, SKIPPED, str(skipped))
        except SystemExit as end:
            return _of_exit(test, end.code)
        except BaseException:
            return Outcome(test, FAILED, traceback.format_exc())
        return Outcome(test, PASSED)

    def _run(self, test: str, store: dist.Store, meeting: Meeting) -> None:
        from torch.testing._internal.common_utils import set_rng_seed

        if self.rank == 0:
            (self.plan.folder / "reinit").unlink(missing_ok=True)
        instance: Any = self.case(test)
        instance.rank, instance.meeting = self.rank, meeting
        instance.file_name = str(self.plan.folder / "files" / test)
        os.makedirs(self.plan.folder / "files", exist_ok=True)
        meeting.sync()
        if self.suite.has_group:
            timeout_s = getattr(self.case, "timeouts_s", {}).get(test, TIMEOUT_S)
            dist.init_process_group(
                BACKEND,
                store=dist.PrefixStore("world", store),
                rank=self.rank,
                world_size=self.plan.ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            # A test that ends at once shall not disturb those that still connect (Gloo, under DETAIL).
            meeting.sync()
        set_rng_seed()
        with named_gloo(getattr(self.case, "module", None), test):
            getattr(instance, test)()
        meeting.sync()

    @contextmanager
    def _own_environment(self, test: str) -> Iterator[None]:
        """Tests set variables and defaults and leave them; the next one shall not find them."""
        before, dtype = dict(os.environ), torch.get_default_dtype()
        folder = self.plan.folder / "temporary" / test
        for name in ("barrier", "test_dir", "init_dir"):
            os.makedirs(folder / name, exist_ok=True)
        os.environ["TEMP_DIR"] = str(folder)
        dist.set_debug_level_from_env()
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            dist.set_debug_level_from_env()
            torch.set_default_dtype(dtype)


def _of_exit(test: str, code: Any) -> Outcome:
    """The suites end a rank with a code that stands for the reason of a skip, or with 0 when it is done."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return Outcome(test, SKIPPED, skip.message)
    if not code:
        return Outcome(test, PASSED, ends=True)
    return Outcome(test, FAILED, f"the test ended its process with {code!r}", ends=True)
