"""The names that programs for TorchTPU use, and what they say of values that make no sense."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from interpreters import interpreter, python


def messages_of(code: dict[str, type[Exception]]) -> list[str]:
    """The texts of the errors that each piece of code raises, in a process that has the device."""

    def forked(_rank: int) -> list[str]:
        torch.tpu.init()
        texts = []
        for piece, kind in code.items():
            with pytest.raises(kind) as caught:
                exec(piece, {"torch": torch, "os": os})
            texts.append(str(caught.value))
        return texts

    return ranks.fork(1, forked)[0]


def test_bad_names_and_values_are_told_so() -> None:
    wrong = {
        "torch.tpu.eager_mode = 'FAST'": (
            ValueError,
            "DEFER_NEVER_AND_LAUNCH_BLOCKING, DEFER_AND_FUSE), got 'FAST'",
        ),
        "torch.tpu.precision('exact')": (
            ValueError,
            "expected a precision (DEFAULT, HIGH, HIGHEST), got 'exact'",
        ),
        "torch.tpu.compiler.custom_compiler_options({'xla_optimization_level': 'O9'}).__enter__()": (
            ValueError,
            "expected xla_optimization_level as one of O0, O1, O2, O3, got 'O9'",
        ),
        "torch.tpu.distributed.topology_aware_mesh([2, 2])": (ValueError, "expected a mesh of all 1 ranks"),
        "torch.tpu.distributed.set_tpu_launch_env(nnodes=0)": (
            ValueError,
            "expected nnodes of at least 1, got 0",
        ),
        "torch.tpu.ops.splash_sdpa": (
            AttributeError,
            "torch.tpu.ops has no 'splash_sdpa'; it has all_gather_dim",
        ),
        "torch.tpu.pallas": (AttributeError, "torch.tpu has no 'pallas'"),
        "torch.tpu.set_device(7)": (IndexError, "expected a tpu device from 0 to 0"),
    }
    texts = messages_of({piece: kind for piece, (kind, _) in wrong.items()})
    for text, (_, expected) in zip(texts, wrong.values(), strict=True):
        assert expected in text


def test_submodules_are_found_without_the_device() -> None:
    code = """
        import torch
        from importlib import import_module
        import_module("torch.tp" + "u.distributed")
        print(torch._C._get_privateuse1_backend_name())
    """
    assert python(code) == "privateuseone"
    printed = interpreter("-m", "torch.tpu.distributed", MASTER_PORT="1234").splitlines()
    assert "export MASTER_PORT=1234" in printed and "export NNODES=1" in printed


def test_another_backend_has_the_name() -> None:
    code = """
        import torch
        torch.utils.rename_privateuse1_backend("npu")
        try:
            getattr(torch, "tp" + "u").init()
        except RuntimeError as error:
            print(error)
    """
    assert "but it is 'npu' here; uninstall that backend, or set TPURUN_DEVICE=0" in python(code)


def test_a_group_made_before_the_device_does_not_serve_it() -> None:
    code = """
        import torch, warnings
        import torch.distributed as dist
        dist.init_process_group("tpu_dist", store=dist.HashStore(), rank=0, world_size=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(torch, "tp" + "u").init()
        print(*[one.message for one in caught])
        dist.destroy_process_group()
    """
    assert "device tpu was first used after init_process_group()" in python(code)


def test_tensors_live_until_the_process_ends() -> None:
    code = """
        import atexit, torch
        class Last:
            def __init__(self): self.tensor = torch.ones(1 << 20, device="tpu")
            def __del__(self): print(int(self.tensor.sum()))
        torch.tpu.kept = Last()
        atexit.register(lambda: print(float((torch.tpu.kept.tensor * 2).mean())))
    """
    assert python(code).splitlines() in (["2.0", "1048576"], ["2.0"])


def on_device(body: Any) -> Any:
    def forked(_rank: int) -> Any:
        torch.tpu.init()
        return body()

    return ranks.fork(1, forked)[0]


def test_modules_go_to_the_device() -> None:
    def body() -> None:
        layer = nn.Linear(2, 2).tpu()
        assert layer.weight.is_tpu and torch.ones(2).tpu().device == torch.device("tpu", 0)
        assert torch.tpu.allow_excess_precision is True
        with torch.tpu.precision("highest"), torch.tpu.compiler.custom_compiler_options({"a": "b"}):
            assert torch.equal(layer(torch.ones(1, 2).tpu()).cpu(), layer.cpu()(torch.ones(1, 2)))

    on_device(body)


def test_deterministic_algorithms() -> None:
    def body() -> None:
        torch.use_deterministic_algorithms(True)
        assert torch.empty(3, device="tpu").isnan().all(), "as uninitialised memory is on the CPU"
        assert torch.empty_strided((2, 2), (1, 2), device="tpu", dtype=torch.int8).eq(127).all()
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.zeros(4).tpu().put_(torch.tensor([0]).tpu(), torch.ones(1).tpu())

    on_device(body)


def test_the_profiler_counts_memory() -> None:
    def body() -> dict[str, int]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            kept = torch.rand(1 << 18, device="tpu") + 1
            del kept
        return {event.name: event.device_memory_usage for event in found.events()}

    counted = on_device(body)
    assert counted["aten::empty"] == counted["aten::add"] == 1 << 20


def gathered_and_scattered() -> Any:
    rank = dist.get_rank()
    given = torch.full((2, 1, 3), float(rank), device="tpu")
    wide = torch.tpu.ops.all_gather_dim(given, 1)
    part = torch.tpu.ops.reduce_scatter_dim(torch.arange(8.0, device="tpu").view(2, 4), -1)
    pair = [torch.zeros(2, device="tpu"), torch.zeros(3, device="tpu")]
    if rank == 0:
        torch.tpu.ops.send([pair[0] + 1, pair[1] + 2], 1)
    else:
        torch.tpu.ops.recv(pair, 0)
    mesh = (
        torch.tpu.distributed.topology_aware_mesh([1, 2]),
        torch.tpu.distributed.topology_aware_mesh([1], dcn_mesh_shape=[2]),
    )
    return (
        wide[:, :, 0].tolist(),
        part.tolist(),
        [one.tolist() for one in pair],
        [one.tolist() for one in mesh],
    )


def test_collectives_along_dimensions() -> None:
    first, second = ranks.run(2, gathered_and_scattered, prepare=lambda: torch.tpu.init())
    assert first[0] == second[0] == [[0, 1], [0, 1]]
    assert (first[1], second[1]) == ([[0, 2], [8, 10]], [[4, 6], [12, 14]])
    assert second[2] == [[1, 1], [2, 2, 2]]
    assert first[3] == [[[0, 1]], [0, 1]]
