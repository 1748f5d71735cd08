"""Ranks of random speed, for some seconds or half a minute: nobody is accused, every result is right."""

import json
from pathlib import Path

from tools.slices import FULL

SOAK = Path(__file__).with_name("soak.py")
# Said of a rank: none of it is true of one that is slow. A suspect is no alarm: who sleeps or computes alone
# for seconds while all others wait is named, and nothing follows from it.
ALARMS = (
    "stuck",
    "Deadlock",
    "Timed out",
    "CollectiveTimeoutError",
    "mismatch",
    "RankLost",
    "FAILED",
)


def test_slow_ranks_raise_no_alarm(start):
    job = start("-n", "64", SOAK, "--seconds", "30" if FULL else "8", "--skew", "12")
    done = job.wait(limit_s=180)
    assert done.code == 0, done.err
    assert done.shown[-1][1].endswith("all right"), done.out
    said = done.err + "\n".join(map(json.dumps, done.events))
    assert not [alarm for alarm in ALARMS if alarm in said], done.err
