"""Variables that a program assigns before it imports torch count in a forked rank, or one line names them."""

from textwrap import dedent

import pytest

STARTS = pytest.mark.parametrize("how", [[], ["--spawn"]], ids=["forked", "spawned"])
MISSED = "the program assigns"

APPLIED = """
    import os, sys, tempfile
    os.environ |= {
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTORCH_JIT": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_LOGS": "recompiles", "TPURUN_DEVICE": "1", "TPURUN_HBM": "16MiB", "TMPDIR": os.getcwd(),
    }
    assert "torch" not in sys.modules
    import importlib.util
    spec = importlib.util.find_spec("torch")
    assert spec.origin.endswith("__init__.py") and "torch" not in sys.modules
    import torch
    from torch import distributed
    assert torch.__spec__.loader.path == spec.origin and sys.modules["torch"] is torch
    print(torch.get_num_threads(), distributed.get_debug_level(), torch.jit._state._enabled.enabled)
    print(*torch._logging._internal.log_state.artifact_names)
    print(torch.ones(1, device="t" + "pu").device, torch.accelerator.get_memory_info()[1])
    print(tempfile.gettempdir() == os.getcwd())
"""


@STARTS
def test_what_can_be_applied_is(run, script, how):
    done = run("-n", "1", *how, script(dedent(APPLIED)))
    assert done.code == 0, done.err
    assert MISSED not in done.err
    assert done.log(0).splitlines() == ["1 DebugLevel.INFO False", "recompiles", f"tpu:0 {16 << 20}", "True"]


def test_modules_of_torch_count_as_torch(run, script):
    program = """
        import os
        os.environ["TPURUN_DEVICE"] = "1"
        from torch.nn import Linear
        print(next(Linear(1, 1).to("t" + "pu").parameters()).device)
    """
    done = run("-n", "1", script(dedent(program)))
    assert done.log(0) == "tpu:0\n", done.err


@STARTS
def test_what_torch_has_read_is_named_once(run, script, how):
    program = """
        import os
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.environ["TORCH_FAKE_TENSOR_DEBUG"] = "1"
        os.environ["HF_HOME"] = os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        import torch
        os.environ["TORCH_COMPILE_DEBUG"] = "1"
    """
    done = run("-n", "3", *how, script(dedent(program)))
    assert done.code == 0, done.err
    said = [line for rank in range(3) for line in done.log(rank).splitlines()]
    if how:
        assert said == []
    else:
        assert len(said) == 1 and "use --spawn" in said[0], said
        assert said[0].startswith("tpurun: TORCH_CPP_LOG_LEVEL, TORCH_FAKE_TENSOR_DEBUG: the program assigns")


def test_a_value_that_torch_was_given_before_is_no_news(run, script):
    program = 'import os\nos.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"\nimport torch\nprint("done")\n'
    done = run("-n", "1", script(program), env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    assert done.log(0) == "done\n", done.err
