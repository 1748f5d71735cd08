"""The tables of compiled steps, and the works that are measured. No test cares how long something took."""

from __future__ import annotations

import pytest
import torch

from performance.compile import works
from performance.compile.figures import FIGURES, Quartiles
from performance.compile.options import Options, parse
from performance.compile.report import disagreements, report
from performance.compile.ways import WAYS, NotThere, Way, runner, single_program

LOSSES = [2.0, 1.5, 1.25]
ROWS = [
    {"optimizers": {"cpu": "Adam(fused=True)", "tpu": "Adam()"}},
    {
        "work": "mlp",
        "seconds": {"eager": [8e-4, 9e-4, 1e-3], "step": [2e-4, 2e-4, 2e-4], "inductor": [1e-4, 1e-4, 1e-4]},
        "losses": {"eager": LOSSES, "step": LOSSES},
        "missing": {"fused": "NotImplementedError: not yet"},
    },
    {"alone": "mlp", "way": "step", "first_s": 0.5},
    {"alone": "mlp", "way": "inductor", "first_s": 4.0},
    {"alone": "gpt", "way": "strict", "peak_bytes": 1 << 20},
    {"alone": "gpt", "way": "step", "peak_bytes": 1 << 19},
    {"parameters": 150, "seconds": {"backend": [9e-6], "by hand": [3e-6], "nothing": [1e-6]}, "missing": {}},
]


def test_each_ratio_stands_beside_what_is_asked_for() -> None:
    text = report(ROWS, Options(works=("mlp", "gpt")))
    assert "| mlp | 4.50 | 4.25 | 4.75 | 4.00 | yes |" in text
    assert "| mlp | 0.50 | 0.50 | 0.50 | 1.00 | NO |" in text
    assert "0 of 2 as asked; 5 of 6 are asked for." in text
    assert "| gpt | not there |  |  | 1.50 |  |" in text
    assert "| mlp | 500 ms | 4.00 s | 8.0 | 10.0 | NO |" in text
    assert "| gpt | step | 512 KiB | 1 MiB | 0.50 | 0.90 | yes |" in text
    assert "Beyond by hand: 6.0 us (6.0 to 6.0), asked at most 5: NO." in text
    assert "- fused: not there: NotImplementedError: not yet (mlp)" in text
    assert "The first losses of all ways agree" in text


@pytest.mark.parametrize("wrong", [1.251, float("nan")])
def test_losses_that_differ_are_told(wrong: float) -> None:
    row = {**ROWS[1], "losses": {"eager": LOSSES, "step": [*LOSSES[:2], wrong]}}
    (line,) = disagreements([row])
    assert line.startswith("mlp: the losses of step, ") and "are not those of eager" in line
    assert line in report([row], Options(parts=("steps",)))


def test_quartiles() -> None:
    assert Quartiles.of([3.0]) == Quartiles(3.0, 3.0, 3.0)
    assert Quartiles.ratios([2.0, 4.0, 6.0], [2.0, 2.0, 2.0]) == Quartiles(1.5, 2.0, 2.5)


@pytest.mark.parametrize("name", ["mlp", "lstm", "conv", "chain256", "pointwise4k"])
def test_a_work_is_the_same_each_time(name: str) -> None:
    with torch.no_grad():
        first, second = (
            made.model(*made.data) for made in (works.make(name, "cpu"), works.make(name, "cpu"))
        )
    assert first.dim() == 0 and first.isfinite() and torch.equal(first, second)


def test_figures_are_about_works_that_exist() -> None:
    assert {work for figure in FIGURES for work in figure.asked} == set(works.WORKS)


def test_a_way_that_is_not_there_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "step", Way("cpu", single_program))
    with pytest.raises(NotThere) as caught:
        runner("pointwise4k", "step", "aot_eager", steps=1)
    assert str(caught.value) == "NotImplementedError: this work has no optimizer that a program could contain"


def test_options_say_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--works", "gpt,mlp", "--ways", "step,eager", "--rounds", "3", "--backend", "aot_eager"])
    assert options.works == ("mlp", "gpt") and parse(options.arguments()) == options
    with pytest.raises(SystemExit):
        parse(["--rounds", "0"])
    assert "expected 1 to 1000 rounds, given '0'" in capsys.readouterr().err
