"""Random programs of tensor operations, run on CPU tensors and on device tpu side by side.

``python -m op_programs`` in `tests` runs them. A program comes from one number, its seed; after every step
all tensors, views of each other among them, must have the same bits on both sides.
"""
