from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torch import Tensor, dtype
from torch.distributed import Store
from torch.distributed.distributed_c10d import Backend

class ProcessGroupOptions(Backend.Options):
    def __init__(self, timeout: timedelta = ...) -> None: ...

class ProcessGroup(Backend):
    """One rank's end of a communicator of the engine."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        global_ranks: Sequence[int],
        name: str,
        timeout: timedelta,
        epoch: int = 0,
        beyond_job: bool = False,
    ) -> None: ...
    def survivors(self, lost: Sequence[int], timeout: timedelta) -> ProcessGroup:
        """The group of those that are left, of a later epoch; see ``tpurun.shrink``."""
    @property
    def traffic(self) -> tuple[int, int, int]:
        """Bytes that this rank has moved for collectives: read, written, and of both those staged."""
    @property
    def epoch(self) -> int: ...
    @property
    def group_id(self) -> str:
        """The name that messages show."""
    @property
    def global_ranks(self) -> list[int]:
        """The members by their rank in the world that the job began with."""
    @property
    def options(self) -> ProcessGroupOptions: ...

class Shortcut:
    """Does what a function of torch.distributed does, past all that nobody looks at; else calls it."""

    PARAMETERS: ClassVar[dict[str, tuple[str, ...]]]
    """What there are shortcuts for, and the parameters that these functions must have."""

    def __init__(self, name: str, original: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

def shared_empty(sizes: Sequence[int], dtype: dtype) -> Tensor:
    """An uninitialised CPU tensor that collectives use where it is."""

def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor is in memory that the other ranks of the host map."""

def stream_copy(to: Tensor, source: Tensor) -> None:
    """Copies a CPU tensor as large collectives do, past the caches.

    Raises ValueError unless both are contiguous, apart, and of as many bytes.
    """

def call_site() -> str:
    """The place in the calling program, as messages show it: ``train.py:28``."""

def stop_callbacks() -> None:
    """Run no more callbacks of futures; for the exit of the interpreter."""
