"""The results as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .lifted import LIFTED, NOT_APPLICABLE
from .plan import FAILED, PASSED, SKIPPED
from .results import Result

# The first that fits says what a reason to skip comes down to.
GROUPS = {
    "asserts what only another backend says": "|".join(map(re.escape, NOT_APPLICABLE.values())),
    "switched off in PyTorch for every backend": (
        r"https://github.com/pytorch/.*|Test is failing.*|Currently failing .*"
    ),
    "needs CUDA tensors, with a GPU for each rank": (
        r".*(accelerator|CUDA|Cuda).*|Only N(ccl|CCL) .*|NCCL .*|.*\{'nccl'\}.*|.*NCCL only.*|no torchvision"
    ),
}
OTHER = "other"


def page(results: Sequence[Result]) -> str:
    parts = [
        "# Conformance",
        "PyTorch ships test suites of its own inside its wheel. This page says how backend `tpu_dist` does "
        "in them: real processes, CPU tensors, nothing of their text copied or changed. It is written by "
        "`make conformance` from one file of results for each suite (`docs/conformance/`). Operations of "
        "device `tpu` have [a page of their own](conformance-ops.md).",
        table(
            ["suite", "start", "ranks", "debug", "passed", "failed", "skipped", "seconds"],
            (row for result in results for row in rows(result)),
        ),
        "`fork` makes new processes for every test, as PyTorch does for its own; under `spawn` "
        "(`torch.multiprocessing.spawn`), `torchrun` and `tpurun` the same processes run all tests in turn, "
        "each with a process group of its own; `own` are tests whose classes spawn their ranks themselves. "
        "Tests that ask for more ranks than the others run on 8. `DETAIL` is `TORCH_DISTRIBUTED_DEBUG`: "
        "PyTorch then puts a wrapper around the backend, and checks each collective with Gloo beforehand.",
    ]
    for result in results:
        parts += section(result)
    parts += ["## Skips that were lifted", lifted(), NO_SUITES]
    return "\n\n".join(parts) + "\n"


def rows(result: Result) -> Iterable[list[str]]:
    for run in result.runs:
        counts = run.counts()
        numbers = [str(counts[kind]) for kind in (PASSED, FAILED, SKIPPED)]
        yield [f"`{result.suite}`", run.start, str(run.ranks), run.debug, *numbers, f"{run.seconds:.0f}"]


def section(result: Result) -> list[str]:
    reasons: dict[str, set[str]] = {}
    for run in result.runs:
        for reason, tests in run.skipped.items():
            reasons.setdefault(reason, set()).update(tests)
    parts = [
        f"## `{result.suite}`",
        f"`{result.source}`, torch {result.torch}, Python {result.python}. {result.about}",
        "\n".join(f"    {command}" for command in sorted({run.command for run in result.runs})),
    ]
    if reasons:
        parts.append(table(["skipped because it", "tests", "in its own words"], grouped(reasons)))
    failed = sorted({(test, run.start) for run in result.runs for test in run.failed})
    if failed:
        parts.append(table(["failed", "start"], ([f"`{test}`", start] for test, start in failed)))
    return parts


def grouped(reasons: dict[str, set[str]]) -> Iterable[list[str]]:
    for group in [*GROUPS, OTHER]:
        own = {reason: tests for reason, tests in reasons.items() if group_of(reason) == group}
        if own:
            words = "; ".join(f"{reason} ({len(tests)})" for reason, tests in sorted(own.items()))
            yield [group, str(sum(map(len, own.values()))), words]


def group_of(reason: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.fullmatch(pattern, reason)), OTHER)


def lifted() -> str:
    told = "Some tests are skipped for every backend but those they name, though they need nothing of theirs."
    plain = (re.sub(r"\\(.)", r"\1", pattern) for pattern in LIFTED)
    return f"{told} These run here all the same:\n\n" + table(
        ["their reason", "why they apply"],
        (
            [f"`{pattern}`".replace("|", "\\|"), why]
            for pattern, why in zip(plain, LIFTED.values(), strict=True)
        ),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


NO_SUITES = """\
## What is no suite for a backend

- Tests of RPC agents without a process group (`rpc_utils`: `DistOptimizerTest`, `RemoteModuleTest`,
  `ParameterServerTest`, `ReinforcementLearningRpcTest`, `JitDistAutogradTest`, `FaultyAgentRpcTest`,
  `JitFaultyAgentRpcTest`, and the others of the suites above): agents have a transport of their own.
- Classes whose name begins with `Cuda` or `TensorPipe..Cuda`, `DynamoDistributedSingleProcTestCase` and
  `DynamoDistributedMultiProcTestCase`: every test needs GPUs.
- `MultiThreadedTestCase`, `DTensorOpTestBase`, `FSDPTestMultiThread`, `LocalDTensor..`, `fake_pg`: backends
  themselves, with threads or nobody in the place of ranks.
- `FSDPTest` and `FSDPTestContinuous` end without an accelerator, though what their tests call does not need
  one (`fsdp`); `C10dTorchCommsTestBase` is for backends of torchcomms.
- PyTorch's `test/` folder is not in the wheel.

## What c10d leaves to a backend, and this one does not have

Torch asks before it uses these, and does without:

- allocation of tensors by the backend (`supports_tensor_alloc`): there is no memory yet in which a
  collective would be faster than in any other;
- time estimates (`_supports_time_estimate`): they would be of this host's memory, and no model of a pod
  exists yet;
- `reconfigure`: who is left is known to the launcher, so `tpurun.reform` and `torch.distributed.shrink_group`
  go on without lost ranks;
- completion hooks: most operations are done before their post returns, and who asks what was done when has
  `tpurun trace`;
- one-sided windows (`supports_window`) and merging groups of different worlds."""
