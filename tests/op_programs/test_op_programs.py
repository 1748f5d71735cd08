"""Some random programs of operations on device tpu; `make op-programs` runs more of them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TPURUN_DEVICE": "1", "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=600
    )


def test_they_compute_what_the_cpu_does():
    done = run("""
        import sys
        from op_programs.__main__ import main
        sys.argv[1:] = ["--programs", "300"]
        sys.exit(main())
    """)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 programs, 0 wrong" in done.stdout


def test_a_wrong_kernel_is_found():
    planted = """
        import sys
        import torch
        from torch import library
        from op_programs.__main__ import main
        torch.tpu.init()
        planted = library.Library("aten", "IMPL")
        planted.impl("neg", lambda x: torch.abs(x), "PrivateUse1", allow_override=True)
        sys.argv[1:] = ["--programs", "60"]
        sys.exit(main())
    """
    done = run(planted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "replay: python -m op_programs --way cpu --replay" in done.stdout


def test_whole_programs_compiled_compute_what_strict_does():
    done = run_whole("--way", "compiled", "--programs", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 programs, 0 wrong" in done.stdout
    of_torch = [line for line in done.stdout.splitlines() if "torch's own tracing" in line]
    assert not of_torch or int(of_torch[0].split()[0]) <= 6, "most programs must say something of the backend"


def test_whole_programs_in_small_parts_compute_what_strict_does():
    """A graph becomes as many programs as it has operations."""
    small = """
        from op_programs import __main__ as command
        from tpurun.compile import _counters, _lowering
        _lowering.MOST_OPERATIONS = 1
        whole = command.main

        def counted():
            code = whole()
            print(_counters.counters()["graphs_split"], "graphs split")
            return code

        command.main = counted
    """
    done = run_whole("--way", "compiled", "--programs", "30", before=small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 programs, 0 wrong" in done.stdout
    split = [line for line in done.stdout.splitlines() if "graphs split" in line]
    assert int(split[0].split()[0]) > 30


def test_whole_programs_fused_compute_what_strict_does():
    done = run_whole("--way", "fused", "--programs", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 programs, 0 wrong" in done.stdout


# Faults of a compiler, as what it makes of a traced program; each is planted in one that is right.
PLANTED = {
    "another function": "swap(graph, aten.sigmoid.default, aten.tanh.default)",
    "another last bit": "swap(graph, aten.add.Tensor, lambda x, y, alpha=1: (x + y * alpha) * 1.0000001)",
    "numbers drawn twice": "swap(graph, aten.rand_like.default, second)",
    "no write": "swap(graph, aten.copy_.default, lambda x, y, *rest: x)",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_compiler_is_found(fault: str):
    planted = f"""
        import torch
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo import register_backend

        aten = torch.ops.aten

        def second(*args, **options):
            torch.rand_like(*args, **options)
            return torch.rand_like(*args, **options)

        def swap(graph, wanted, other):
            for node in graph.graph.nodes:
                if node.op == "call_function" and node.target is wanted:
                    node.target = other

        @register_backend(name="planted")
        def planted(graph, inputs):
            def compiled(graph, inputs):
                {PLANTED[fault]}
                graph.recompile()
                return graph
            return aot_autograd(fw_compiler=compiled, keep_inference_input_mutations=True)(graph, inputs)
    """
    done = run_whole("--way", "compiled", "--programs", "40", "--backend", "planted", before=planted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "replay: python -m op_programs --way compiled --replay" in done.stdout


def test_a_mode_that_computes_something_else_is_found():
    planted = """
        from contextlib import contextmanager
        import torch
        torch.tpu.init()

        @contextmanager
        def planted(mode):
            library = torch.library.Library("aten", "IMPL")
            library.impl("sigmoid", lambda x: torch.tanh(x), "PrivateUse1", allow_override=True)
            yield
            library._destroy()

        torch.tpu.set_eager_mode = planted
    """
    done = run_whole("--way", "fused", "--programs", "60", before=planted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "replay: python -m op_programs --way fused --replay" in done.stdout


def run_whole(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command after some code."""
    command = (
        f"import sys\nfrom op_programs.__main__ import main\nsys.argv[1:] = {[*words]}\nsys.exit(main())"
    )
    return run(textwrap.dedent(before) + "\n" + command)
