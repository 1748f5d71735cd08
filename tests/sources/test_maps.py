"""The maps of the sources are of these sources: every file and folder that they name is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / ".ci").exists())
NAMED = re.compile(r"`([\w.\-/]+(?:\.(?:rs|py|cpp|h|toml)|/))`")


def missing(text: str, files: list[str]) -> list[str]:
    """The files and folders that a text names and nobody finds, however much of their paths it leaves out."""
    everything = "\n".join(f"/{name}" for name in files) + "\n"
    return [
        name
        for name in dict.fromkeys(NAMED.findall(text))
        if f"/{name}" + ("" if name.endswith("/") else "\n") not in everything
    ]


def test_what_is_not_there_is_found():
    files = ["a/src/room/one.rs", "b/two.py"]
    assert missing("`one.rs`, `room/one.rs`, `src/room/`, `b/two.py`, `x.y`", files) == []
    assert missing("`ne.rs`, `room/two.py`, `other/`, `src/room`", files) == [
        "ne.rs",
        "room/two.py",
        "other/",
    ]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "docs/hacking.md"])
def test_maps_name_what_is_there(page: str):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    lost = missing((ROOT / page).read_text(), listed.stdout.split())
    assert not lost, f"{page} names what is not there: {lost}"
