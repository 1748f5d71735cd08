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


# Forward and backward, views, writes, random numbers, integers, lists of tensors, modules with buffers.
COMPILED = [
    *("add", "sort", "nn.functional.dropout", "native_layer_norm", "transpose", "expand", "select", "where"),
    *("index_put", "scatter_add", "cumsum", "bernoulli", "cat", "topk", "clone", "masked_fill", "softmax"),
    *("nn.functional.scaled_dot_product_attention", "nn.nn.GRUCell", "nn.nn.BatchNorm1d", "_foreach_add"),
]


def test_compiled_operations_do_as_strict_ones_do() -> None:
    done = compare("--way", "compiled", "--dtypes", "float32,int64", *COMPILED)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: (int(passed), int(excused)) for kind, passed, excused in ROW.findall(done.stdout)}
    assert {"forward", "views", "inplace", "backward", "module", "module_backward"} <= counts.keys()
    for kind, (passed, excused) in counts.items():
        assert passed > 20 * excused, f"{kind}: {excused} excused beside {passed}"


def test_fused_operations_do_as_strict_ones_do() -> None:
    done = compare("--way", "fused", "--dtypes", "float32,int64,bfloat16", *NAMES, *COMPILED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_compiler_is_seen() -> None:
    """A compiler that takes one operation for another, and one that has no result."""
    before = """
            from torch._dynamo import register_backend
            from torch._dynamo.backends.common import aot_autograd
            def swapped(graph, inputs):
                for node in graph.graph.nodes:
                    if node.target is torch.ops.aten.sin.default:
                        node.target = torch.ops.aten.cos.default
                    if node.target is torch.ops.aten.exp.default:
                        raise NotImplementedError("no exp")
                graph.recompile()
                return graph
            register_backend(aot_autograd(fw_compiler=swapped), name="planted")
    """
    words = ("--way", "compiled", "--backend", "planted", "--dtypes", "float32", "--kinds", "forward")
    done = compare(*words, "sin", "exp", "tanh", before=before.strip())
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"(\w+): *\n  FAILED forward float32 x\d+: (.*)", done.stdout)
    assert {name for name, _ in failed} == {"sin", "exp"}, done.stdout
    assert "numbers differ" in dict(failed)["sin"] and "no exp" in dict(failed)["exp"]


ROW = re.compile(r"^(\w+) +passed +(\d+)  failed +\d+  excused +(\d+)", re.MULTILINE)
