"""The plots, as SVG that is the same for the same measurements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .job import ROOT, Row
from .quantities import Spread, duration, size
from .results import Results
from .series import Table, collectives_of

COLOURS = {
    "tpu_dist": "#0b5fa5",
    "tpu_dist, mapped": "#3fa7d6",
    "tpu_dist, C": "#12355b",
    "tpu_dist, C, mapped": "#7a5195",
    "Gloo": "#c1272d",
    "Gloo, mapped": "#e58a8d",
    "Open MPI": "#2e7d32",
    "MPICH": "#8e6bbf",
}
START_COLOURS = {"tpurun": "#0b5fa5", "torchrun, Gloo": "#c1272d", "mpirun, Open MPI, C": "#2e7d32"}
OTHER_COLOUR = "#555555"
MARKERS = dict(zip(COLOURS, "osPXd^v*", strict=True))
CACHE = ROOT / ".cache" / "matplotlib"
PANEL_INCHES = (3.0, 3.2)
# Identifiers in the file are hashes of it instead of random numbers.
STYLE = {"svg.hashsalt": "tpurun", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}


class NoPlots(Exception):
    """matplotlib is not there."""


def draw(results: Results, folder: Path) -> list[str]:
    """Draws all plots into the folder, and removes those that were there before. Returns their names."""
    os.environ.setdefault("MPLCONFIGDIR", str(CACHE))  # else it writes to the home directory
    try:
        import matplotlib
    except ImportError:
        raise NoPlots("no plots: expected matplotlib, which `make bench` installs, given none") from None
    matplotlib.use("svg")
    for old in folder.glob("*.svg"):
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    with matplotlib.rc_context(STYLE):
        for part in ("collectives", "mpi"):
            rows = results.parts[part].rows if part in results.parts else []
            names += [_collective(part, name, rows, folder) for name in collectives_of(rows)]
        if "start" in results.parts:
            names.append(_start(results.parts["start"].rows, folder))
    return names


def _collective(part: str, name: str, rows: Sequence[Row], folder: Path) -> str:
    """Time against bytes, a panel for each number of ranks; of what has no bytes, time against ranks."""
    from matplotlib import pyplot

    found = Table.of(name, rows)
    has_bytes = any(count for _, count in found.cases)
    panels = sorted({ranks for ranks, _ in found.cases}) if has_bytes else [0]
    width, height = PANEL_INCHES
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(width * len(panels) + 1.5, height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, ranks in zip(axes[0], panels, strict=True):
        cases = {
            count if has_bytes else ranks_of_case: (ranks_of_case, count)
            for ranks_of_case, count in found.cases
            if not has_bytes or ranks_of_case == ranks
        }
        for series in found.series:
            figures = {x: found.figure(case, series) for x, case in cases.items()}
            _line(axis, series, [(x, one) for x, one in figures.items() if one])
        axis.set(xscale="log", yscale="log", xlabel="bytes" if has_bytes else "ranks")
        labels = [size(x) if has_bytes else str(x) for x in cases]
        axis.set_xticks(list(cases), labels, rotation=60, fontsize=7)
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda y, _: duration(y))
        axis.set_title(f"{name}, {ranks} ranks" if has_bytes else name)
    handles = {
        label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return _saved(figure, folder, f"{part}-{name}.svg")


def _line(axis, series: str, points: Sequence[tuple[int, Spread]]) -> None:
    if not points:
        return
    colour, marker = COLOURS.get(series, OTHER_COLOUR), MARKERS.get(series, ".")
    xs = [x for x, _ in points]
    axis.plot(xs, [one.median for _, one in points], color=colour, marker=marker, markersize=4, label=series)
    low, high = [one.least for _, one in points], [one.most for _, one in points]
    axis.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)


def _start(rows: Sequence[Row], folder: Path) -> str:
    """Bars of the time until the first barrier is over."""
    from matplotlib import pyplot

    measured = [row for row in rows if "first_s" in row]
    launchers = list(dict.fromkeys(row["launcher"] for row in measured))
    numbers = sorted({row["ranks"] for row in measured})
    figure, axis = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    width = 0.8 / max(1, len(launchers))
    for place, launcher in enumerate(launchers):
        mine = [row for row in measured if row["launcher"] == launcher]
        spreads = [Spread.of(row["first_s"]) for row in mine]
        errors = [[one.median - one.least for one in spreads], [one.most - one.median for one in spreads]]
        xs = [numbers.index(row["ranks"]) + (place - (len(launchers) - 1) / 2) * width for row in mine]
        colour = START_COLOURS.get(launcher, OTHER_COLOUR)
        heights = [one.median for one in spreads]
        axis.bar(xs, heights, width, yerr=errors, capsize=2, label=launcher, color=colour)
    axis.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axis.set(xlabel="ranks", ylabel="seconds to the first barrier")
    axis.legend()
    return _saved(figure, folder, "start.svg")


def _saved(figure, folder: Path, name: str) -> str:
    from matplotlib import pyplot

    figure.savefig(folder / name, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return name
