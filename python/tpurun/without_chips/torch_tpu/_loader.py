"""What ``import torch`` calls."""


def load() -> None:
    """There is nothing to load."""
