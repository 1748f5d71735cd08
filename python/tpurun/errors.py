"""The errors that a collective raises when it can not complete.

All ranks of the communicator raise the same text: the operation, who posted what and where, and for a rank
that is gone how it ended. Each class is a ``torch.distributed.DistBackendError``, and says in ``ranks`` who
is to blame, so that nobody has to read the text for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from torch.distributed import DistBackendError

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistBackendError",
    "RankLostError",
]


class _CollectiveError(DistBackendError):
    ranks: tuple[int, ...]
    """The guilty, by their rank in the world that the job began with: the minority of a mismatch, who is
    lost, who did not come, who aborted. Empty when nobody in particular is to blame."""

    def __init__(self, text: str = "", ranks: Iterable[int] | None = None) -> None:
        super().__init__(text)
        self.ranks = _ranks_of(text) if ranks is None else tuple(ranks)
        self.made_at = time.monotonic()
        # The context is the exception that a signal handler raised while the operation failed.
        if (context := _contexts.pop(text, None)) is not None:
            self.__context__ = context


class CollectiveMismatchError(_CollectiveError):
    """Ranks posted operations that do not fit together; nothing was written. Or, where results are verified,
    they have different results."""


class RankLostError(_CollectiveError):
    """A rank of the communicator died or left while others needed it."""


class DeadlockError(_CollectiveError):
    """The pending operations wait for each other in a circle, or for a rank that takes no part any more."""


class CollectiveTimeoutError(_CollectiveError):
    """The deadline of the operation, or of this wait, passed."""


class AbortedError(_CollectiveError):
    """The process group was aborted or shut down while the operation was pending."""


# Torch makes an exception from a class and a text alone, so the ranks are found again by the text. The last
# texts suffice, because an exception is made right after its failure.
_KEPT = 64
_known: dict[str, tuple[int, ...]] = {}
_contexts: dict[str, BaseException] = {}
_lock = threading.Lock()


def _remember(text: str, ranks: tuple[int, ...], context: BaseException | None = None) -> None:
    with _lock:
        _contexts.clear()
        if context is not None:
            _contexts[text] = context
        _known.pop(text, None)
        _known[text] = ranks
        while len(_known) > _KEPT:
            del _known[next(iter(_known))]


def _ranks_of(text: str) -> tuple[int, ...]:
    with _lock:
        return _known.get(text, ())
