"""The bugs that `make planted-bugs` plants fit the sources: planting all of them takes half an hour."""

import tomllib
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / ".ci").exists())
CRATES = ROOT / "collectives"


def test_every_bug_has_its_place():
    bugs = tomllib.loads((CRATES / "planted-bugs.toml").read_text())["bug"]
    assert len(bugs) > 50
    lost = [
        f"{bug['file']}: {bug['what']}"
        for bug in bugs
        if (CRATES / bug["file"]).read_text().count(bug["before"]) <= bug.get("which", 0)
    ]
    assert not lost, "no place in the sources for:\n" + "\n".join(lost)
