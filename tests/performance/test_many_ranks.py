"""The page of many ranks is made of what was measured."""

import re
import subprocess
import sys
from pathlib import Path

from performance.memory import kept_for_cpus

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


def test_pages_kept_for_cpus_are_counted():
    zoneinfo = """\
Node 0, zone   Normal
  pages free     3771
        managed  5394266
  pagesets
    cpu: 0
              count:    46589
              high:     55168
    cpu: 1
              count:    36985
              high:     59237
  node_unreclaimable:  0
"""
    assert kept_for_cpus(zoneinfo) == 46589 + 36985
    assert kept_for_cpus(Path("/proc/zoneinfo").read_text()) > 0
