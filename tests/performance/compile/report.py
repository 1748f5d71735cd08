"""The tables of all figures, in Markdown: what was measured, with what is asked for beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..job import Row
from ..quantities import duration, size, table
from .figures import (
    FIGURES,
    FIRST_MODEL_STEP,
    FIRST_STEP,
    MEMORY_WAYS,
    MEMORY_WORKS,
    MOST_CALL_S,
    MOST_MEMORY,
    SHORTFALLS,
    STEP_OVER_INDUCTOR,
    Figure,
    Quartiles,
)
from .options import Options

TOLERANCE = 1e-4
"""Relative: kernels of another order of summation, and three steps of Adam."""
NOT_THERE = "not there"


def report(rows: Sequence[Row], options: Options) -> str:
    """All tables of what was asked for."""
    parts: list[str] = []
    if "steps" in options.parts:
        parts += [*_steps(rows), *_ratios(rows, options), *_losses(rows)]
    if "first" in options.parts:
        parts += _first(rows, options)
    if "memory" in options.parts:
        parts += _memory(rows, options)
    if "call" in options.parts:
        parts += _call(rows)
    return "\n\n".join([*parts, *_reasons(rows)])


def disagreements(rows: Sequence[Row]) -> list[str]:
    """One line for each way whose first losses are not those of the first way of the work."""
    return [line for row in rows if "work" in row for line in _disagreements(row)]


def _disagreements(row: Row) -> Iterator[str]:
    if not row["losses"]:
        return
    (first, wanted), *others = row["losses"].items()
    for way, losses in others:
        pairs = zip(losses, wanted, strict=True)
        # Each one is asked whether it is near, as a NaN is near nothing.
        if not all(abs(ours - theirs) <= TOLERANCE * abs(theirs) for ours, theirs in pairs):
            yield f"{row['work']}: the losses of {way}, {losses}, are not those of {first}, {wanted}"


def _steps(rows: Sequence[Row]) -> list[str]:
    """The time of a step, by work and way."""
    works = [row for row in rows if "work" in row]
    optimizers = [row["optimizers"] for row in rows if "optimizers" in row]
    lines = [
        [row["work"], way, *_durations(Quartiles.of(seconds))]
        for row in works
        for way, seconds in row["seconds"].items()
    ]
    said = [
        f"Eager optimizers: {', '.join(f'{name} on {at}' for at, name in one.items())}." for one in optimizers
    ]
    return ["### Steps", *said, table(["work", "way", "median", "lower quartile", "upper quartile"], lines)]


def _durations(spread: Quartiles) -> list[str]:
    return [duration(spread.median), duration(spread.lower), duration(spread.upper)]


def _ratios(rows: Sequence[Row], options: Options) -> Iterator[str]:
    """A table for each figure: how many times sooner, round by round."""
    by_work = {row["work"]: row for row in rows if "work" in row}
    for figure in FIGURES:
        lines, kept = [], 0
        for work, asked in figure.asked.items():
            if work not in options.works:
                continue
            spread = _ratio(by_work.get(work), figure)
            kept += spread is not None and spread.median >= asked
            lines.append([work, *_cells(spread, asked)])
        yield from _titled(figure.title, lines)
        if figure.title == STEP_OVER_INDUCTOR and lines:
            works = len(figure.asked)
            yield f"{kept} of {len(lines)} as asked; {works - SHORTFALLS} of {works} are asked for."


def _ratio(row: Row | None, figure: Figure) -> Quartiles | None:
    seconds = row["seconds"] if row else {}
    if figure.faster not in seconds or figure.slower not in seconds:
        return None
    return Quartiles.ratios(seconds[figure.slower], seconds[figure.faster])


def _titled(title: str, lines: list[list[str]]) -> list[str]:
    head = ["work", "median", "lower quartile", "upper quartile", "asked", ""]
    return [f"### {title[0].upper()}{title[1:]}", table(head, lines)] if lines else []


def _cells(spread: Quartiles | None, asked: float) -> list[str]:
    if spread is None:
        return [NOT_THERE, "", "", f"{asked:.2f}", ""]
    numbers = [f"{value:.2f}" for value in (spread.median, spread.lower, spread.upper, asked)]
    return [*numbers, "yes" if spread.median >= asked else "NO"]


def _losses(rows: Sequence[Row]) -> list[str]:
    lines = disagreements(rows)
    return ["### Losses", *(lines or [f"The first losses of all ways agree to {TOLERANCE:g}."])]


def _first(rows: Sequence[Row], options: Options) -> Iterator[str]:
    """How many times sooner the first step of a fresh process is over."""
    found = {(row["alone"], row["way"]): row["first_s"] for row in rows if "first_s" in row}
    for figure in (FIRST_STEP, FIRST_MODEL_STEP):
        lines = []
        for work, asked in figure.asked.items():
            ours, theirs = (found.get((work, way)) for way in (figure.faster, figure.slower))
            if work not in options.works:
                continue
            is_there = ours and theirs
            cells = [duration(one) if one else NOT_THERE for one in (ours, theirs)]
            ratio = theirs / ours if is_there else None
            verdict = "" if ratio is None else "yes" if ratio >= asked else "NO"
            lines.append([work, *cells, f"{ratio:.1f}" if ratio else NOT_THERE, f"{asked:.1f}", verdict])
        head = ["work", figure.faster, figure.slower, "times sooner", "asked", ""]
        if lines:
            yield from (f"### {figure.title[0].upper()}{figure.title[1:]}", table(head, lines))


def _memory(rows: Sequence[Row], options: Options) -> list[str]:
    """The most bytes on the device, as a share of Strict's."""
    found = {(row["alone"], row["way"]): row["peak_bytes"] for row in rows if "peak_bytes" in row}
    lines = []
    for work in (one for one in MEMORY_WORKS if one in options.works):
        strict = found.get((work, "strict"))
        for way in MEMORY_WAYS:
            peak = found.get((work, way))
            cells = [size(one) if one else NOT_THERE for one in (peak, strict)]
            share = peak / strict if peak and strict else None
            verdict = "" if share is None else "yes" if share <= MOST_MEMORY else "NO"
            lines.append(
                [work, way, *cells, f"{share:.2f}" if share else NOT_THERE, f"{MOST_MEMORY:.2f}", verdict]
            )
    head = ["work", "way", "peak", "Strict's peak", "share", "asked at most", ""]
    return ["### Peak memory on the device", table(head, lines)] if lines else []


def _call(rows: Sequence[Row]) -> list[str]:
    (row,) = (row for row in rows if "parameters" in row)
    seconds = row["seconds"]
    lines = [[name, *_durations(Quartiles.of(taken))] for name, taken in seconds.items()]
    parts = [
        f"### A call with {row['parameters']} parameters",
        table(["what runs in the end", "median", "lower quartile", "upper quartile"], lines),
    ]
    for base, asked in (("by hand", MOST_CALL_S), ("nothing", None)):
        if "backend" in seconds and base in seconds:
            added = [ours - theirs for ours, theirs in zip(seconds["backend"], seconds[base], strict=True)]
            parts.append(_added(base, Quartiles.of([1e6 * one for one in added]), asked))
    return parts


def _added(base: str, us: Quartiles, asked: float | None) -> str:
    said = f"Beyond {base}: {us.median:.1f} us ({us.lower:.1f} to {us.upper:.1f})"
    if asked is None:
        return f"{said}."
    return f"{said}, asked at most {asked * 1e6:.0f}: {'yes' if us.median <= asked * 1e6 else 'NO'}."


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Why ways are not there, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        missing = row.get("missing", {})
        if isinstance(missing, str):
            missing = {row.get("way", "rank"): missing}
        for way, reason in missing.items():
            reasons.setdefault(f"{way}: {NOT_THERE}: {reason}", []).append(
                row.get("work", row.get("alone", "call"))
            )
    return [
        "\n".join(f"- {reason} ({', '.join(dict.fromkeys(works))})" for reason, works in reasons.items())
    ] * bool(reasons)
