"""``python -m tests.performance.compile``: training steps compiled for the device beside those that are not.

Every work (`works`) is run in several ways (`ways`), which are measured in turn in one rank. `figures` says
which ratios the page asks for; `alone` measures in fresh processes what only the first step of a process
shows. A way that does not exist is shown as missing, and does not end the run.
"""
