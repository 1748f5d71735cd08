"""Variables that both the launcher and a rank read mean the same to both: each table is tested there, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tpurun import stacks

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
