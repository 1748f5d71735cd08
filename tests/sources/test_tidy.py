"""How the code reads: whole sentences in comments, and no file or function that nobody can take in."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Clauses that begin so have no subject, unless they ask.
HEADLESS = re.compile(r"(?:Who|Whose|What|Whatever|Of|So much|So many)\b")
C_COMMENT = re.compile(r"^\s*//[/!]?\s?(.*)$")


def files(*endings: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if name.endswith(endings)]


def blocks_of_c(text: str) -> Iterator[tuple[int, str]]:
    """The comments of a file in Rust or C++ that have lines of their own: line and text of each."""
    first, lines = 0, []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        match = C_COMMENT.match(line)
        if match and match[1]:
            first = first or number
            lines.append(match[1])
            continue
        if lines:
            yield first, " ".join(lines)
        first, lines = 0, []


def blocks_of_python(text: str) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a Python file: line and text of each paragraph."""
    first, last, lines = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != last + 1:
                yield first, " ".join(lines)
                lines = []
            first = token.start[0] if not lines else first
            last = token.start[0]
            lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, " ".join(lines)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            for paragraph in (docstring or "").split("\n\n"):
                yield getattr(node, "lineno", 1), " ".join(paragraph.split())


def headless(text: str) -> list[str]:
    """The sentences of a comment that have no subject."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(])", text)
    return [one for one in sentences if HEADLESS.match(one) and not one.endswith("?")]


def test_headless_sentences_are_found():
    text = (
        "/// Who comes late waits. A rank sleeps. What is it?\n/// Of all ranks, one\n\nlet x = 1; // What\n"
    )
    assert [headless(block) for _, block in blocks_of_c(text)] == [
        ["Who comes late waits.", "Of all ranks, one"]
    ]
    python = '"""A module.\n\nWhat it does."""\nx = 1  # So much\n# of it. Offices count.\n'
    assert [headless(block) for _, block in blocks_of_python(python)] == [
        ["So much of it."],
        [],
        ["What it does."],
    ]


def test_sentences_of_comments_have_a_subject():
    found = []
    for path in files(".rs", ".cpp", ".h", ".py"):
        blocks = blocks_of_python if path.suffix == ".py" else blocks_of_c
        for line, block in blocks(path.read_text()):
            found += [f"{path.relative_to(ROOT)}:{line}: {one}" for one in headless(block)]
    assert not found, f"{len(found)} sentences without a subject:\n" + "\n".join(found)
