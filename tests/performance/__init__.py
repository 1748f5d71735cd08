"""``python -m tests.performance``: what collectives cost beside Gloo and MPI, and programs with them.

Measuring ends in rows of plain data, which are stored; the page and its plots are made of what is stored.
"""
