"""``torch.compile`` for device ``tpu``: from a traced graph to a program of the runtime."""
