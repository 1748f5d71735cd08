"""A rank that is asked for its stacks answers, in any state that its frames may be in."""

import re
import subprocess
import sys

# A code object without a name of its file, as a frame that is just being made may have it.
UNREADABLE = """
import ctypes

def spoil(code):
    words = (ctypes.c_size_t * (type(code).__basicsize__ // 8)).from_address(id(code))
    at = list(words).index(id(code.co_filename))
    intact, words[at] = words[at], 16
    def repair():
        words[at] = intact
    return repair
"""

ASKED = """
import faulthandler, os, signal, sys
from tpurun import _stacks

answers = os.memfd_create("answers")
faulthandler.enable()
faulthandler.register(54, answers, all_threads=True)
_stacks.answer(54, answers)

def ask():
    begins = os.lseek(answers, 0, os.SEEK_END)
    signal.raise_signal(54)
    return os.pread(answers, 1 << 16, begins).decode()
"""


def python(program: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def test_a_walk_that_faults_is_broken_off_and_the_next_one_is_not():
    done = python(
        UNREADABLE
        + ASKED
        + """
def caught():
    with open("/proc/self/status") as file:
        return [line for line in file if line.startswith("SigCgt")]

def spoiled():
    repair = spoil(spoiled.__code__)
    answer = ask()
    repair()
    return answer

before = caught()
cut, whole = spoiled(), ask()
assert cut.startswith("tpurun: GIL free\\nCurrent thread "), cut
assert cut.endswith("tpurun: cut\\ntpurun: end\\n"), cut
assert "cut" not in whole and "in <module>" in whole and whole.endswith("tpurun: end\\n"), whole
assert caught() == before
print("answered twice", flush=True)
signal.raise_signal(signal.SIGSEGV)
"""
    )
    assert done.stdout == "answered twice\n", done.stderr
    # Every other fault is still faulthandler's.
    assert done.returncode == -11 and "Fatal Python error: Segmentation fault" in done.stderr, done.stderr


def test_a_busy_program_lives_however_often_it_is_asked():
    """A frame lies where others have been; until its code is known, what they left is taken for it."""
    done = python(
        ASKED
        + """
import subprocess

shots = f"import os, time\\nfor _ in range(4000): os.kill({os.getpid()}, 54); time.sleep(2e-4)"
asking = subprocess.Popen([sys.executable, "-c", shots])

def leaf(a):
    return a

def wide(a, b="b", c="c"):
    d = e = f = g = h = i = j = "text"
    return leaf(leaf(a))

def narrow(*a, **k):
    return leaf(wide(*a))

while asking.poll() is None:
    for _ in range(100):
        narrow(1), wide(2), leaf(3)
answer = ask()
assert asking.returncode == 0 and answer.endswith("tpurun: end\\n"), answer
"""
    )
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_an_answer_that_was_cut_short_is_asked_for_again(run, script):
    """Until the first answer is there, nobody can read where the rank is."""
    program = script(
        UNREADABLE
        + """
import os, time
import torch.distributed as dist

dist.init_process_group("tpu_dist")

def spoiled():
    repair = spoil(spoiled.__code__)
    with open(os.environ["TPURUN_RUN_DIR"] + "/stacks/rank-0001.txt") as answers:
        while "tpurun: cut" not in answers.read():
            time.sleep(0.001)
    repair()
    time.sleep(1)

if dist.get_rank() == 1:
    spoiled()
dist.barrier()
"""
    )
    done = run("-n", "2", program)
    assert done.code == 0, done.err
    assert re.search(r"^tpurun: suspect: rank 1 .*: sleeping at program\.py:\d+ in spoiled", done.err, re.M)
