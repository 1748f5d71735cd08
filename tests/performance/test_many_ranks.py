"""The page of many ranks is made of what was measured."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_size_has_its_row(tmp_path):
    page = tmp_path / "page.md"
    command = [
        sys.executable,
        "-m",
        "tests.performance.many_ranks",
        "--sizes",
        "2",
        "3",
        "--jobs",
        "1",
        "--out",
        page,
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) s .* \| ([\d.]+) s \([^|]*\) \|$", page.read_text(), re.MULTILINE
    )
    assert [int(ranks) for ranks, _, _ in rows] == [2, 3]
    assert all(0 < float(first) < 60 and 0 < float(ended) < 60 for _, first, ended in rows), rows
