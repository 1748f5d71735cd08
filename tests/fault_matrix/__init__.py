"""Every way for one rank to diverge, in every operation: what do all ranks learn, when, and is it right?

``python -m tests.fault_matrix --help`` runs it. A *cell* is one fault in one operation at one number of
ranks, blocking or asynchronous (`cells.py`). For each cell, `oracle.py` says what must happen and why, and
`programs.py` says what the ranks do. `rank.py` does it and writes down what happened, `judge.py` compares,
`table.py` prints.
"""
