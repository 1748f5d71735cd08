"""Results are stored as rows of plain data, by part."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from .job import Row
from .settings import PARTS


class NotResults(Exception):
    """A file that does not hold results; the text says what was expected and what was given."""


@dataclass
class Part:
    """Rows that one command measured. One with `missing` says why there are no figures."""

    command: str
    rows: list[Row] = field(default_factory=list)


@dataclass
class Results:
    """All parts that were measured on one machine."""

    machine: dict[str, str]
    parts: dict[str, Part] = field(default_factory=dict)

    def store(self, path: Path) -> None:
        """A line for each row, so that differences of two runs can be read."""
        path.parent.mkdir(parents=True, exist_ok=True)
        ordered = [(name, self.parts[name]) for name in PARTS if name in self.parts]
        parts = ",\n".join(f"{json.dumps(name)}: {_part(part)}" for name, part in ordered)
        path.write_text(f'{{"machine": {json.dumps(self.machine)},\n"parts": {{\n{parts}\n}}}}\n')


def load(path: Path) -> Results:
    """Reads what `Results.store` wrote. Raises NotResults."""
    try:
        stored = json.loads(path.read_text())
        parts = {name: Part(**part) for name, part in stored["parts"].items()}
        if unknown := set(parts) - set(PARTS):
            raise NotResults(
                f"expected the parts {', '.join(PARTS)}, given {', '.join(sorted(unknown))}: {path}"
            )
        return Results(stored["machine"], parts)
    except OSError as error:
        raise NotResults(f"expected a file of results, given {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotResults(f"expected a results.json of this command, given {path}") from None


def _part(part: Part) -> str:
    rows = ",\n".join(map(json.dumps, part.rows))
    return f'{{"command": {json.dumps(part.command)}, "rows": [\n{rows}\n]}}'
