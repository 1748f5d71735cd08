"""``import torch`` calls :func:`load`."""


def load() -> None:
    """There is nothing to load."""
