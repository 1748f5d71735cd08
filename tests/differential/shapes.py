"""Shapes of tensors: mostly small, often just around the sizes at which the engine does something else."""

from __future__ import annotations

from random import Random

from .program import Shape

# Cache line, tiles of the reduction, page, the least and the largest window, ring of messages.
EDGES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10)
SMALL = 33
LARGE_BYTES = (1 << 20, 3 << 20)


def count(random: Random, item_bytes: int, shares: int) -> int:
    """How many elements; of something that there is `shares` times."""
    luck = random.random()
    if luck < 0.07:
        return 0
    if luck < 0.72:
        return random.randint(1, SMALL)
    if luck < 0.996:
        few = EDGES[: random.choice([3, 4, 4, 5, 5, 7]) if shares <= 2 else random.choice([3, 4, 5])]
        edge = random.choice(few) * random.choice([1, 1, 2])
        return max(0, edge // item_bytes + random.choice([-1, 0, 0, 1, 7]))
    return random.randint(*LARGE_BYTES) // item_bytes // shares


def shape(random: Random, elements: int) -> Shape:
    """Draws a shape of about this number of elements, with none, one, two or three dimensions."""
    if elements == 0:
        return random.choice([(0,), (0, 3), (2, 0), (0, 2, 2)])
    if elements == 1 and random.random() < 0.6:
        return ()
    luck = random.random()
    if luck < 0.5:
        return (elements,)
    inner = random.choice([1, 2, 3, 5])
    if luck < 0.85:
        return (max(1, elements // inner), inner)
    return (max(1, elements // inner // 2), 2, inner)


def rows(random: Random, shares: int, most: int) -> tuple[int, ...]:
    """Draws the rows of each share, at most `most` of them."""
    if random.random() < 0.1:
        return tuple(random.choice([0, most]) for _ in range(shares))
    return tuple(random.randint(0, most) for _ in range(shares))
