"""The suites: where each lies in torch, on how many ranks it runs, and who makes its process group."""

from __future__ import annotations

import inspect
import re
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .lifted import NOT_APPLICABLE, lifted
from .plan import BACKEND

# How the text of a test begins a process group.
MAKES_GROUP = re.compile(r"\b(initialize_pg|init_process_group)\(")
OWN_METHOD = re.compile(r"\bself\.(\w+)")


@dataclass(frozen=True)
class Suite:
    name: str
    source: str
    """Where its tests come from."""
    ranks: int
    load: Callable[[], type[unittest.TestCase]] | None
    """Imports it; the class is one that a rank can make, with `rank` and `file_name` to be set. None for
    `bases`, whose tests start their ranks themselves."""
    about: str
    has_group: bool = True
    """Its tests expect a process group; otherwise they make their own."""
    is_fresh: bool = False
    """Each of its tests needs processes that have run no other one."""
    concerns: Callable[[type[unittest.TestCase], str], bool] = lambda case, test: True
    """Which of its tests have a process group at all."""


def tests_of(suite: Suite) -> list[str]:
    if suite.load is None:
        from . import bases

        return bases.names()
    case = suite.load()
    return [test for test in unittest.TestLoader().getTestCaseNames(case) if suite.concerns(case, test)]


def reason_to_skip(case: type[unittest.TestCase], test: str) -> str | None:
    """Known before any rank runs: what its decorators said when the suite was imported, or what we say."""
    if test in NOT_APPLICABLE:
        return NOT_APPLICABLE[test]
    function = getattr(case, test)
    return function.__unittest_skip_why__ if getattr(function, "__unittest_skip__", False) else None


def c10d_and_ddp() -> type[unittest.TestCase]:
    with lifted():
        from torch.testing._internal.distributed import distributed_test
    for known in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        known.append(BACKEND)

    class Case(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        module = distributed_test
        timeouts_s = distributed_test.CUSTOM_PG_TIMEOUT

        # The suite's own polls files, and gives up after ten seconds.
        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            self.meeting.sync(wait_for)

    return Case


def beside_rpc(name: str) -> type[unittest.TestCase]:
    """A suite of PyTorch's for RPC agents, with the agent that PyTorch runs it with."""
    with lifted():
        from torch.testing._internal import common_distributed
        from torch.testing._internal.distributed import rpc_utils
        from torch.testing._internal.distributed.rpc import (
            faulty_rpc_agent_test_fixture,
            tensorpipe_rpc_agent_test_fixture,
        )

    suite = getattr(rpc_utils, name)
    if suite in rpc_utils.FAULTY_AGENT_TESTS:
        fixture = faulty_rpc_agent_test_fixture.FaultyRpcAgentTestFixture
    else:
        fixture = tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture
    return type("Case", (suite, fixture, common_distributed.MultiProcessTestCase), {})


def begins_a_group(case: type[unittest.TestCase], test: str) -> bool:
    """Whether a test, or a method of its class that it uses, makes a process group by itself."""
    seen: set[str] = set()
    names = [test]
    while names:
        name = names.pop()
        function = getattr(case, name, None)
        if name in seen or not inspect.isfunction(function):
            continue
        seen.add(name)
        text = inspect.getsource(inspect.unwrap(function))
        if MAKES_GROUP.search(text):
            return True
        names += OWN_METHOD.findall(text)
    return False


def helpers() -> type[unittest.TestCase]:
    from .helped import Case

    return Case


def fsdp() -> type[unittest.TestCase]:
    from .helped_fsdp import Case

    return Case


_INTERNAL = "torch.testing._internal"

# The classes of `rpc_utils` that have tests with a process group, by the name that this suite gets.
_BESIDE_RPC = {
    "rpc": "RpcTest",
    "rpc_tensorpipe": "TensorPipeAgentRpcTest",
    "rpc_script": "JitRpcTest",
    "autograd": "DistAutogradTest",
    "autograd_tensorpipe": "TensorPipeAgentDistAutogradTest",
    "autograd_faults": "FaultyAgentDistAutogradTest",
    "ddp_under_rpc": "DdpUnderDistAutogradTest",
    "ddp_beside_rpc": "DdpComparisonTest",
}
_RANKS_BESIDE_RPC = {"ddp_under_rpc": 6}

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "c10d",
            f"{_INTERNAL}.distributed.distributed_test",
            4,
            c10d_and_ddp,
            "The base suite of every backend: collectives, messages, groups, DistributedDataParallel.",
        ),
        Suite(
            "helpers",
            f"{_INTERNAL}.common_fsdp, .common_dist_composable, .distributed",
            4,
            helpers,
            "Programs of ours on the models and checks that PyTorch's own FSDP2, DTensor, checkpoint and "
            "sharding tests are made of; the wheel has these helpers, but not the tests.",
        ),
        Suite(
            "fsdp",
            f"{_INTERNAL}.common_fsdp",
            4,
            fsdp,
            "FullyShardedDataParallel against DDP on its models, with its parity check.",
        ),
        Suite(
            "bases",
            f"{_INTERNAL}.common_distributed, .common_fsdp, .distributed",
            4,
            None,
            "A program or two of ours on each base class that PyTorch's tests derive from, which starts the "
            "ranks itself.",
        ),
        *(
            Suite(
                name,
                f"{_INTERNAL}.distributed.rpc_utils.{source}",
                _RANKS_BESIDE_RPC.get(name, 4),
                partial(beside_rpc, source),
                "Those of its tests that have a process group beside their RPC agents. What agents leave "
                "in a process disturbs the next test, so each has processes of its own under every launcher.",
                has_group=False,
                is_fresh=True,
                concerns=begins_a_group,
            )
            for name, source in _BESIDE_RPC.items()
        ),
    )
}
