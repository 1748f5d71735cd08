"""The counts as Markdown."""

from __future__ import annotations

from ..page import table
from .tally import Tally

_ABOUT = {
    "forward": "what an operation returns: bits, shape, strides, offset, dtype, flags, device",
    "views": "results that share memory with an argument: with the same one, at the same place",
    "inplace": "the variant that changes its first argument, and that argument",
    "out": "`out=` of the right shape, empty, and with gaps",
    "backward": "gradients of all arguments, weighted at random",
    "gradgrad": "gradients of these, in float32, float64 and complex128",
    "jvp": "derivatives in forward mode, in float32",
    "vmap": "`torch.func.vmap` over two copies of the first argument, in float32",
    "sparse": "the operation's own samples in sparse layouts",
    "errors": "what the CPU refuses, the device refuses with a related type of exception",
    "module": "what each `nn.Module` returns and keeps",
    "module_backward": "gradients of its arguments and parameters",
    "optimizer": "parameters and state after four steps: for-loop, foreach, fused, differentiable",
    "crash": "operations that ended the process",
}


def page(tally: Tally) -> str:
    parts = [
        "# Conformance of the operations of device `tpu`",
        "PyTorch describes its operations, modules and optimizers in databases inside its wheel (`op_db`, "
        "those of `_foreach_*`, `module_db`, `optim_db`), with samples of arguments. Each sample of each "
        "dtype that the CPU has runs on the CPU and, with the same bytes, strides and aliases, on device "
        "`tpu`; a check passes when both agree to the last bit (any NaN is a NaN). Random operations "
        "included: for one draw the CPU's engine starts where the device's did; for several, only what is "
        "around the numbers is compared, and that the same seed gives the same numbers. What the CPU refuses "
        "counts in `errors` alone. Both sides run on one thread. Of uninitialised memory the numbers do not "
        "count.",
        "\n".join(f"    {command}" for command in (tally.command, *tally.again)),
        f"torch {tally.torch}, Python {tally.python}, {tally.names} operations, modules and optimizers, "
        f"{tally.seconds:.0f} seconds.",
        table(
            ["kind", "what is compared", "passed", "failed", "excused"],
            ([f"`{kind}`", _ABOUT[kind], *map(str, counts)] for kind, *counts in tally.rows()),
        ),
    ]
    if absent := [name for name, counts in tally.by_name.items() if not {*counts} - {"errors"}]:
        parts.append(f"The CPU itself runs no sample of {', '.join(f'`{name}`' for name in absent)}.")
    if tally.failed:
        parts += ["## Failed", _failures(tally)]
    if tally.excused:
        parts += ["## Excused", _excuses(tally)]
    return "\n\n".join(parts) + "\n"


def _failures(tally: Tally) -> str:
    rows = (
        [f"`{name}`", one.kind, one.dtype, str(one.count), one.text.replace("|", "\\|")]
        for name, some in tally.failed.items()
        for one in some
    )
    return table(["name", "kind", "dtype", "checks", "the first said"], rows)


def _excuses(tally: Tally) -> str:
    reasons: dict[str, dict[str, int]] = {}
    for name, some in tally.excused.items():
        for one in some:
            names = reasons.setdefault(one.text, {})
            names[name] = names.get(name, 0) + one.count
    rows = (
        [reason, str(sum(names.values())), ", ".join(f"`{name}`" for name in names)]
        for reason, names in reasons.items()
    )
    return table(["reason", "checks", "names"], rows)
