"""Streams and events of the device."""

from __future__ import annotations

from typing import Any

import torch

from tpurun import _chip_rules


def _device(given: Any) -> torch.device:
    if given is None:
        return torch.device("tpu", torch._C._accelerator_getDeviceIndex())
    return torch.device("tpu", given) if isinstance(given, int) else torch.device(given)


class Stream(torch.Stream):
    """A sequence of operations and collectives in the order in which they were issued."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, _device(device), priority=priority, **kwargs)

    def query(self) -> bool:
        """Whether all that was issued to it is done."""
        _chip_rules.check_stream_query()
        return super().query()


class _EventType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "tpu"


class Event(metaclass=_EventType):
    """A mark in a stream, to wait for or to measure by: a ``torch.Event``, which can not be derived from."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        device: Any = None,
    ) -> torch.Event:
        if interprocess:
            raise NotImplementedError("tpurun: expected interprocess=False; events are of one process")
        return torch.Event(_device(device), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> torch.Stream:
    """The stream that operations of this thread go to."""
    return _as_ours(torch._C._accelerator_getStream(_device(device).index or 0))


def default_stream(device: Any = None) -> torch.Stream:
    """The stream that operations go to when none was chosen."""
    index = _device(device).index or 0
    kind = torch._C._accelerator_getStream(index).device_type
    return Stream(stream_id=0, device_index=index, device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    """Choose the stream for what this thread issues next."""
    torch._C._accelerator_setStream(stream)


def _as_ours(stream: torch.Stream) -> Stream:
    return Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


class StreamContext:
    """Chooses a stream for a block; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append(current_stream(self.stream.device_index))
            set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            set_stream(self._before.pop())


def stream(stream: torch.Stream | None) -> StreamContext:
    """Choose a stream for a block: ``with torch.tpu.stream(s): ...``."""
    return StreamContext(stream)
