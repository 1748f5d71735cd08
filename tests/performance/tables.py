"""The tables of each part, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .job import Row
from .quantities import Spread, duration, size, table, times
from .series import NAMES, OURS, Table, collectives_of

NOTHING = "–"
MAPPED = """\
Mapped are tensors of `tpurun.empty()`, which other ranks read where they are; all others are ordinary ones.
The traffic of memory is counted by `tpurun bench`."""


def machine(facts: Mapping[str, str]) -> str:
    return table(["", ""], [[name, fact] for name, fact in facts.items()])


def collectives(rows: Sequence[Row]) -> list[str]:
    """A table for each, with the ratios of all others to this backend."""
    abouts = [row for row in rows if "collective" not in row]
    parts = [f"{row['backend']}: {row.get('version') or row['missing']}." for row in abouts]
    parts += [MAPPED] * any(row.get("memory") == "mapped" for row in rows)
    for name in collectives_of(rows):
        found = Table.of(name, rows)
        ours = [one for one in found.series if one.startswith(OURS)]
        others = [one for one in found.series if one not in ours]
        ratios = [(other, mine) for other in others for mine in ours]
        titles = [f"{other} / {mine}" for other, mine in ratios]
        lines = []
        for case in found.cases:
            cells = [_figure(found, case, one) for one in found.series]
            lines.append([*_names(case), *cells, *(_ratio(found, case, *pair) for pair in ratios)])
        parts += [f"### {name}", table(["bytes", "ranks", *found.series, *titles], lines)]
        parts += _traffic(found)
    return parts


def _names(case: tuple[int, int]) -> list[str]:
    ranks, count = case
    return [size(count) if count else NOTHING, str(ranks)]


def _figure(found: Table, case: tuple[int, int], series: str) -> str:
    spread = found.figure(case, series)
    return spread.seconds() if spread else found.missing(case, series) or NOTHING


def _ratio(found: Table, case: tuple[int, int], other: str, mine: str) -> str:
    theirs, ours = found.figure(case, other), found.figure(case, mine)
    return times(theirs.median / ours.median) if theirs and ours else NOTHING


def _traffic(found: Table) -> list[str]:
    """Says what moved through memory, where the benchmark knows it."""
    lines = []
    for case, by_series in found.cases.items():
        for series, rows in by_series.items():
            known = [row for row in rows if row.get("roofline_percent") is not None]
            if known:
                percents = Spread.of([row["roofline_percent"] for row in known])
                moved = [size(known[0][name]) for name in ("traffic_bytes", "floor_bytes")]
                lines.append([*_names(case), series, *moved, f"{percents.median:.0f} %"])
    head = ["bytes", "ranks", "", "memory traffic", "least possible", "of the memory's speed"]
    return [table(head, lines)] if lines else []


def steps(rows: Sequence[Row]) -> list[str]:
    parts = []
    for kind in dict.fromkeys(row["kind"] for row in rows if "kind" in row):
        mine = [row for row in rows if row.get("kind") == kind]
        names = list(dict.fromkeys(name for row in mine for name in row["seconds"]))
        is_apart = "no communication" in names
        lines = []
        for row in mine:
            seconds = row["seconds"]
            cells = [Spread.of(seconds[name]).seconds() for name in names]
            cells.append(Spread.ratios(seconds["gloo"], seconds[OURS]).ratio())
            if is_apart:
                cells += [_beyond(seconds, name) for name in (OURS, "gloo")]
            lines.append([str(row["ranks"]), *cells])
        head = ["ranks", *map(_name, names), f"Gloo / {OURS}"]
        head += [f"communication, {_name(name)}" for name in (OURS, "gloo")] if is_apart else []
        parts += [f"### {kind}, {mine[0]['parameters']:,} parameters", table(head, lines)]
    return parts + _missing(rows)


def _beyond(seconds: Mapping[str, Sequence[float]], name: str) -> str:
    """Returns the time that a step takes beyond one without communication, as a share of the step."""
    shares = [
        1 - alone / whole for alone, whole in zip(seconds["no communication"], seconds[name], strict=True)
    ]
    spread = Spread.of([100 * share for share in shares])
    return f"{spread.median:.0f} % ({spread.least:.0f} to {spread.most:.0f})"


def start(rows: Sequence[Row]) -> list[str]:
    lines = []
    done = [row for row in rows if "missing" not in row]
    firsts = {row["ranks"]: row["first_s"] for row in done if row["launcher"] == "tpurun"}
    for row in rows:
        names = [row["launcher"], str(row["ranks"])]
        if "missing" in row:
            lines.append([*names, row["missing"], *[NOTHING] * 4])
            continue
        cells = [Spread.of(row[name]).seconds() for name in ("first_s", "exit_s", "cpu_s")]
        ours = firsts.get(row["ranks"])
        # A series that has fewer turns than the others has the first ones.
        ratio = Spread.ratios(row["first_s"], ours[: len(row["first_s"])]).ratio() if ours else NOTHING
        memory = size(max(row["peak_bytes"])) if "peak_bytes" in row else NOTHING
        lines.append([*names, *cells, memory, ratio])
    return [table(["", "ranks", "first barrier", "exit", "CPU", "memory", "first barrier / tpurun"], lines)]


def waiting(rows: Sequence[Row]) -> list[str]:
    measured = [row for row in rows if "seconds" in row]
    lines = []
    for row in measured:
        seconds = row["seconds"]
        others = [name for name in seconds if name != "idle"]
        cells = [Spread.of(values).seconds() for values in seconds.values()]
        cells += [Spread.ratios(seconds[name], seconds["idle"]).ratio() for name in others]
        lines.append([str(row["ranks"] - 1), *cells])
    names = list(measured[0]["seconds"]) if measured else []
    head = [
        "waiting ranks",
        *map(_name, names),
        *(f"{_name(name)} / idle" for name in names if name != "idle"),
    ]
    return [table(head, lines)] * bool(lines) + _missing(rows)


def overlap(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "missing" in row:
            continue
        seconds = row["seconds"]
        alone = list(zip(seconds["communication"], seconds["computation"], strict=True))
        sums = [sum(both) for both in alone]
        hidden = Spread.of(
            [
                100 * (sum(both) - whole) / min(both)
                for both, whole in zip(alone, seconds["together"], strict=True)
            ]
        )
        cells = [Spread.of(seconds[name]).seconds() for name in ("communication", "computation")]
        cells += [duration(Spread.of(sums).median), Spread.of(seconds["together"]).seconds()]
        cells.append(f"{hidden.median:.0f} % ({hidden.least:.0f} to {hidden.most:.0f})")
        lines.append([_name(row["backend"]), str(row["ranks"]), *cells])
    head = ["", "ranks", "communication", "computation", "sum", "together", "hidden"]
    return [table(head, lines)] * bool(lines) + _missing(rows)


def floors(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        if "missing" in row:
            continue
        seconds = row["seconds"]
        cells = [Spread.of(seconds[name]).seconds() for name in ("least", OURS, "gloo")]
        cells += [Spread.ratios(seconds["gloo"], seconds[name]).ratio() for name in ("least", OURS)]
        lines.append([size(row["bytes"]), str(row["ranks"]), *cells])
    head = ["bytes", "ranks", "least", OURS, "Gloo", "Gloo / least", f"Gloo / {OURS}"]
    return [table(head, lines)] * bool(lines) + _missing(rows)


def _name(backend: str) -> str:
    return NAMES.get(backend, backend)


def _missing(rows: Sequence[Row]) -> list[str]:
    return [f"Not measured on {row['ranks']} ranks: {row['missing']}." for row in rows if "missing" in row]


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "collectives": collectives,
    "mpi": collectives,
    "steps": steps,
    "start": start,
    "waiting": waiting,
    "overlap": overlap,
    "floors": floors,
}
