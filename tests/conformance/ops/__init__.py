"""Every operation, module and optimizer that PyTorch has samples of, on the CPU and on device ``tpu``.

``python -m tests.conformance.ops --help`` runs them. The samples are PyTorch's own (`op_db`, `module_db`,
`optim_db` of the installed torch). `cases.py` lists what there is; `placing.py` puts the same sample on both
devices, `running.py` runs it there, `comparing.py` says in which bits, strides or aliases the results differ.
`operators.py`, `modules.py` and `optimizers.py` are the kinds of checks; `workers.py` runs cases in processes
that may crash; `neutral.py` takes away what depends on the name of the device alone; `excuses.py` says which
samples need not pass, and why; `tally.py` counts and `report.py` writes the page.
"""
