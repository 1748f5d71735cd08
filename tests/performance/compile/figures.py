"""The figures that are asked for: which ways are compared, on which works, and what must come out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """How many times sooner a step is over in one way than in another, with the least that is asked for."""

    title: str
    faster: str
    slower: str
    asked: Mapping[str, float]
    """By work."""


STEP_OVER_INDUCTOR = "whole step in one program against inductor"
FIGURES = (
    Figure(
        "whole step in one program against eager",
        "step",
        "eager",
        {"mlp": 4.0, "gpt": 1.5, "lstm": 2.0, "chain256": 2.0, "chain256t": 2.0},
    ),
    Figure(
        "compiled network against Strict",
        "model",
        "strict",
        {"mlp": 2.0, "gpt": 1.3, "block256": 1.05, "block512": 1.0, "block768": 1.0, "conv": 1.0},
    ),
    Figure(
        STEP_OVER_INDUCTOR,
        "step",
        "inductor",
        dict.fromkeys(("mlp", "gpt", "lstm", "chain256", "block256", "conv"), 1.0),
    ),
    Figure(
        "Fused Eager against Strict",
        "fused",
        "strict",
        {
            "pointwise64k": 1.4,
            "pointwise64kt": 1.4,
            "pointwise1m": 1.8,
            "pointwise1mt": 1.8,
            "pointwise4k": 1.1,
            "mlp": 1.1,
            "gpt": 1.0,
        },
    ),
)
"""Step times in one process, in turn."""

SHORTFALLS = 1
"""Works of `STEP_OVER_INDUCTOR` that may miss what is asked for."""
FIRST_STEP = Figure(
    "first step of a process against inductor's", "step", "inductor", {"mlp": 10.0, "gpt": 10.0}
)
FIRST_MODEL_STEP = Figure("the same with an eager optimizer", "model", "inductor", {"mlp": 10.0, "gpt": 10.0})
"""With empty caches."""
MEMORY_WORKS = ("gpt", "block256")
MEMORY_WAYS = ("model", "step")
MOST_MEMORY = 0.9
"""Peak bytes on the device, as a share of Strict's."""
MOST_CALL_S = 5e-6
"""Seconds that the executor adds to a call, beyond guards, wrappers and the operation itself."""


@dataclass(frozen=True)
class Quartiles:
    """A median with the quartiles around it."""

    lower: float
    median: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> Quartiles:
        if len(values) == 1:
            return Quartiles(values[0], values[0], values[0])
        return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))

    @staticmethod
    def ratios(over: Sequence[float], under: Sequence[float]) -> Quartiles:
        """Returns the quartiles of ratios of values that were measured in the same round."""
        return Quartiles.of([a / b for a, b in zip(over, under, strict=True)])
