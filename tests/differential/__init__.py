"""Random programs of collectives on the backend and on numpy: are all bytes of all ranks the same?

``python -m tests.differential --help`` runs them. A *program* comes from one number, its seed: groups, and
steps that use them (`generate.py`, `shapes.py`). From the program alone, `oracle.py` says what every rank's
memory must hold afterwards. `calls.py` posts the steps on torch.distributed, `execute.py` decides what is
posted and waited for when, and `memory.py` compares. `jobs.py` runs many programs in one job and says which
of them failed; `shrink.py` makes those small.
"""
