"""A part of the comparison of device tpu with the CPU, and that it sees what is wrong."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# One of each family, and those that need a kernel of the device's own.
NAMES = [
    *(
        "add",
        "sort",
        "nn.functional.dropout",
        "nn.functional.conv2d",
        "lu_solve",
        "native_layer_norm",
        "mode",
    ),
    *("transpose", "view_as_complex", "conj", "expand", "unsafe_split", "select", "squeeze.multiple"),
    *("sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse", "tensor_split", "_foreach_lerp"),
    *("nn.functional.scaled_dot_product_attention", "nn.nn.LSTMCell", "nn.nn.GRUCell", "nn.nn.BatchNorm1d"),
    *("nn.nn.Embedding", "optim.SGD", "optim.SparseAdam", "optim.Adagrad"),
]
# Faults that are planted in the device's own kernel of an operation, each with the check that sees it.
PLANTED = {
    "neg": ("lambda x: x.mul(-1.0000002)", "forward", "numbers differ"),
    "abs": ("lambda x: x.mul(x.sgn()).unsqueeze(0)", "forward", "expected shape"),
    "sin": ("lambda x: x.cpu().sin()", "forward", "expected device tpu, got cpu"),
    "cos": ("lambda x: x.nothing", "forward", "raised AttributeError"),
    "exp": ("lambda x: os._exit(3)", "crash", "the process ended with 3"),
    "t": ("lambda x: x.clone().swapaxes(0, -1)", "views", "aliases"),
}
# Names that are compared as well, but run nothing that has a planted fault.
SOUND = ["cosh", "transpose"]


def compare(*words: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Runs the command, after `before` has run in each of its workers."""
    code = f"""
        import os, sys, torch
        from tests.conformance.ops import __main__ as command, cases
        ordinary = cases.prepare
        def prepare():
            ordinary()
            {before}
        cases.prepare = prepare
        from pathlib import Path
        from tests.conformance.ops.report import page
        from tests.conformance.ops.tally import Tally
        written = Tally.read(Path("docs/conformance/ops.json"))
        assert Path("docs/conformance-ops.md").read_text() == page(written), "the page is not of ops.json"
        if torch.__version__.startswith(written.torch):
            assert sorted(written.by_name) == sorted(cases.NAMES), "not all names have run"
        parts = [name for slice in range(1, 8) for name in cases.chosen([], (slice, 7))]
        assert sorted(parts) == sorted(set(cases.NAMES)) and len(parts) == len(cases.NAMES)
        sys.exit(command.main())
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", textwrap.dedent(code), "--exact", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def test_the_device_does_as_the_cpu_does() -> None:
    done = compare("--dtypes", "float32,complex64,int64", *NAMES)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(re.findall(r"^(\w+) +passed +(\d+)", done.stdout, re.MULTILINE))
    kinds = {"forward", "views", "inplace", "out", "backward", "gradgrad", "jvp", "vmap", "errors"}
    assert kinds | {"module", "module_backward", "optimizer"} <= {
        kind for kind in counts if int(counts[kind])
    }


@pytest.fixture(scope="module")
def planted() -> subprocess.CompletedProcess[str]:
    kernels = "; ".join(
        f"library.impl({name!r}, {kernel}, {'AutogradPrivateUse1' if name == 't' else 'PrivateUse1'!r})"
        for name, (kernel, _, _) in PLANTED.items()
    )
    # It lasts as long as the object.
    holder = "from torch import library as of_torch; cases.planted = of_torch.Library('aten', 'IMPL')"
    before = f"{holder}; library = cases.planted; {kernels}"
    kinds = "forward,views,backward"
    return compare("--dtypes", "float32", "--kinds", kinds, *PLANTED, *SOUND, before=before)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_seen(planted: subprocess.CompletedProcess[str], name: str) -> None:
    _, kind, words = PLANTED[name]
    assert planted.returncode == 1, planted.stdout + planted.stderr
    failed = re.search(rf"\d {re.escape(name)}:.*\n((?:  FAILED .*\n)+)", planted.stdout)
    assert failed is not None, planted.stdout
    assert any(kind in line and words in line for line in failed[1].splitlines()), failed[1]


def test_what_is_sound_passes(planted: subprocess.CompletedProcess[str]) -> None:
    for name in SOUND:
        assert re.search(rf"\d {name}: .*forward \d+.*\n(?!  FAILED)", planted.stdout), planted.stdout
