"""Variables that both the launcher and a rank read mean the same to both: each table is tested there, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from interpreters import python
from tpurun import _chip_rules, _variables, stacks
from tpurun.backend import _world
from tpurun.device import _device

TABLES = Path(__file__).resolve().parents[2] / "tests" / "variables"


def table(name: str) -> Any:
    return json.loads((TABLES / f"{name}.json").read_text())


def test_the_signal_of_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = table("stack_signals")
    for text, number in signals["accepted"].items():
        monkeypatch.setenv("TPURUN_STACK_SIGNAL", text)
        assert stacks.signal_number() == number, text
    for text in signals["refused"]:
        monkeypatch.setenv("TPURUN_STACK_SIGNAL", text)
        assert stacks.signal_number() == stacks.DEFAULT_SIGNAL, text


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers() -> tuple[bool, bool]:
        return _device._is_off(), _chip_rules.are_on()

    switches = table("switches")
    for variable in (_device.SWITCH, _chip_rules.VARIABLE):
        monkeypatch.setenv(variable, "")
        assert _variables.switch(variable) is None
    assert answers() == (False, False)
    for text in switches["on"]:
        monkeypatch.setenv(_device.SWITCH, text)
        monkeypatch.setenv(_chip_rules.VARIABLE, text)
        assert answers() == (False, True), text
    for text in filter(None, switches["off"]):
        monkeypatch.setenv(_device.SWITCH, text)
        monkeypatch.setenv(_chip_rules.VARIABLE, text)
        assert answers() == (True, False), text
        assert f"switched off by {_device.SWITCH}={text}; " in _device._why_refused()
    for text in switches["refused"]:
        for variable, read in ((_device.SWITCH, _device._is_off), (_chip_rules.VARIABLE, _chip_rules.are_on)):
            monkeypatch.setenv(variable, text)
            with pytest.raises(RuntimeError) as refused:
                read()
            expected = "1, true, on or yes, or 0, false, off or no"
            assert str(refused.value) == f"tpurun: {variable}: expected {expected}, given {text!r}"


def test_an_import_of_torch_tells_a_bad_switch_in_one_line() -> None:
    code = "import sys; sys.stderr = sys.stdout; import torch; print('goes on')"
    line, last = python(code, TPURUN_DEVICE="maybe").splitlines()
    assert line.startswith("tpurun: TPURUN_DEVICE: expected 1, true, on or yes, or 0, ") and last == "goes on"
    assert python("import torch; print(torch.tpu.is_available())", TPURUN_DEVICE="false") == "False"
    assert python("import torch; print(torch.accelerator.current_accelerator())", TPURUN_DEVICE="on") == "tpu"


def test_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = table("sizes")
    for text, size in sizes["accepted"].items():
        monkeypatch.setenv("TPURUN_HBM", text)
        assert _device._memory_bytes() == size, text
    for text in sizes["refused"]:
        monkeypatch.setenv("TPURUN_HBM", text)
        with pytest.raises(RuntimeError, match=r"^tpurun: TPURUN_HBM: expected a size of 1MiB to 16TiB "):
            _device._memory_bytes()
    monkeypatch.delenv("TPURUN_HBM")
    of_host = _device._memory_bytes()
    monkeypatch.setenv("TPURUN_HBM", "")
    assert _device._memory_bytes() == of_host >= 2**20


def test_the_place_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPURUN_RANK_PID", str(os.getpid()))
    monkeypatch.setenv("TPURUN_JOB", "3/8 h0:/my runs/20261129-030352-474b")
    assert _world._place_in_job() == (3, 8, "h0:/my runs/20261129-030352-474b")
    for text in ("3/8", "3 of 8", "x/8 id", ""):
        monkeypatch.setenv("TPURUN_JOB", text)
        with pytest.raises(ValueError, match=r"^TPURUN_JOB: expected RANK/RANKS ID as tpurun sets it "):
            _world._place_in_job()
    monkeypatch.delenv("TPURUN_JOB")
    with pytest.raises(ValueError, match="given ''; keep it in the environment"):
        _world._place_in_job()
    monkeypatch.setenv("TPURUN_RANK_PID", str(os.getppid()))
    assert _world._place_in_job() is None
