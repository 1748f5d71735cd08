"""PyTorch's own suites, as they lie in the installed torch, on the backend ``tpu_dist``.

``python -m tests.conformance --help`` runs them. `suites.py` says which suites there are; `lifted.py` which
of their decorators name another backend without needing it; `plan.py` what one job runs; `ranked.py` runs one
test on one rank. How ranks come about is the start method: `forked.py` makes new ones for every test;
`lockstep.py` keeps the same processes for all tests, whoever started them (`start.py`). `results.py` keeps
what came out, `page.py` prints it.
"""
