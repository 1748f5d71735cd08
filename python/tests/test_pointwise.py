"""The kernels of tiles have the bits of eager torch, on every CPU capability that this machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pointwise_cases import CASES, TILES, check
from tpurun import _C

HERE = Path(__file__).parent


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_bits_are_those_of_eager(capability: str) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "pointwise_cases.py")],
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    if report["capability"].lower() != capability:
        pytest.skip(f"this machine runs {report['capability']} at most")
    assert report["failures"] == []


def test_operations_without_a_kernel_are_left_alone() -> None:
    x = torch.randn(8)
    assert _C.run_pointwise("sum", "", [x], 64) is None
    assert _C.run_pointwise("add", "Tensor", [x, x.double()], 64) is None
    assert _C.run_pointwise("sqrt", "", [torch.arange(8)], 64) is None


def test_two_numbers_beside_a_tensor_are_left_to_the_scalar_loop_of_eager() -> None:
    x, number = torch.randn(100), torch.tensor(0.3)
    assert _C.run_pointwise("lerp", "Tensor", [x, number, number], 64) is None
    assert _C.run_pointwise("lerp", "Tensor", [x, x, number], 64) is not None


def test_a_result_in_place_has_the_type_of_what_it_is_written_to() -> None:
    x = torch.randn(100)
    assert _C.run_pointwise("eq_", "Tensor", [x, x], 64) is None
    assert _C.run_pointwise("add_", "Tensor", [torch.arange(100), 0.5], 64) is None
    assert torch.equal(_C.run_pointwise("mul_", "Tensor", [x, 2], 64), x * 2)


def test_a_case_that_is_wrong_is_noticed() -> None:
    """The comparison sees the last bit of a number."""
    generator = torch.Generator().manual_seed(2)
    case = next(case for case in CASES if case.name == "exp")
    assert check(case, torch.float32, 100, TILES[0], generator) is None
    original = _C.run_pointwise
    try:
        _C.run_pointwise = lambda *a: original(*a) * torch.tensor(1.0000001)
        assert check(case, torch.float32, 100, TILES[0], generator) is not None
    finally:
        _C.run_pointwise = original
