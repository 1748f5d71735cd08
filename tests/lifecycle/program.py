"""A program can be written down in several ways."""

from __future__ import annotations

import py_compile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Begins every program, after what has to be the first line: each rank works in a directory of its own.
BEGIN = 'import os; os.chdir(os.environ["LIFECYCLE_IN"] + os.environ.get("RANK", "0"))\n'


@dataclass(frozen=True)
class Program:
    """A text, the way it is started, and what lies beside it."""

    text: str
    form: str = "script"
    """Or "module", "directory", "archive", "bytecode", "link", "text"."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path, start: Path, name: str) -> list[str]:
        """Writes the program into a new folder, or for a module where it is started; returns the words
        that start it."""
        folder.mkdir(parents=True)
        for path, text in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        text = self.whole_text()
        if self.form == "text":
            return ["-c", text]
        if self.form == "module":
            (start / name).mkdir()
            (start / name / "__init__.py").touch()
            (start / name / "__main__.py").write_text(text)
            return ["-m", name]
        if self.form in ("directory", "archive"):
            (folder / "__main__.py").write_text(text)
            return [str(folder if self.form == "directory" else archive_of(folder))]
        path = folder / "program.py"
        path.write_text(text, encoding="latin-1" if "coding: latin-1" in text else "utf-8")
        if self.form == "bytecode":
            compiled = py_compile.compile(str(path), str(folder / "program.pyc"), doraise=True)
            path.unlink()
            return [compiled]
        if self.form == "link":
            (folder / "links").mkdir()
            (folder / "links" / "train.py").symlink_to(path)
            return [str(folder / "links" / "train.py")]
        return [str(path)]

    def whole_text(self) -> str:
        if not self.text.startswith(("#", "from __future__")):
            return BEGIN + self.text
        first, rest = self.text.split("\n", 1)
        return f"{first}\n{BEGIN}{rest}"


def archive_of(folder: Path) -> Path:
    path = folder / "program.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        for one in sorted(folder.rglob("*.py")):
            archive.write(one, one.relative_to(folder))
            one.unlink()
    return path
