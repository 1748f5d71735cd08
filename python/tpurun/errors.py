"""What a collective raises when it can not complete.

All ranks of the communicator raise the same text: the operation, who posted what and where, and for a rank
that is gone how it ended. Each class is a ``torch.distributed.DistBackendError``.
"""

from torch.distributed import DistBackendError

__all__ = [
    "AbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DistBackendError",
    "RankLostError",
]


class CollectiveMismatchError(DistBackendError):
    """Ranks posted operations that do not fit together; nothing was written."""


class RankLostError(DistBackendError):
    """A rank of the communicator died or left while others needed it."""


class DeadlockError(DistBackendError):
    """The pending operations of the ranks wait for each other in a circle."""


class CollectiveTimeoutError(DistBackendError):
    """The deadline of the operation, or of this wait, passed."""


class AbortedError(DistBackendError):
    """The process group was aborted while the operation was pending."""
