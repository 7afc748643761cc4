"""Streams and events of the pretend device: they order nothing, but detect uses of a tensor that a device would not.

A stream is a queue of operators. Operators of two streams run in any order, unless one stream waits for an event of
the other. The device computes at once, so every use of a tensor would find its values. Therefore each stream has a
clock and stores how far it has waited for the others (a vector clock): the use of a tensor that another stream has
written, without waiting for it, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1


class PretendStream(torch.Stream):
    """A stream with a number, a clock, and the clocks of the other streams up to which it has waited."""

    number: int
    clock: int
    seen: dict[int, int]
    before: list[PretendStream]

    def __new__(cls, *args: Any, **options: Any) -> PretendStream:
        number = next(_NUMBERS)
        made: Any = super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)
        made.number, made.clock, made.seen, made.before = number, 0, {}, []
        return made  # type: ignore[no-any-return]  # torch has no types for streams of a kind

    def record_event(self, event: Any = None) -> Any:
        event = PretendEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        for number, clock in event.clocks.items():
            self.seen[number] = max(self.seen.get(number, 0), clock)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")

    def __enter__(self) -> PretendStream:
        self.before.append(_STREAMS[-1])
        _STREAMS.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _STREAMS.pop()
        self.before.pop()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self.number


class PretendEvent:
    """The clocks of a stream at one moment, including those that it has waited for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.clocks: dict[int, int] = {}

    def record(self, stream: Any = None) -> None:
        stream = _STREAMS[-1] if stream is None else stream
        self.clocks = {**stream.seen, stream.number: stream.clock}

    def wait(self, stream: Any = None) -> None:
        (_STREAMS[-1] if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        note_wait("Event.synchronize")


# Called with the name of a function in which the host waits for the device.
_LISTENERS: list[Callable[[str], None]] = []


def note_wait(cause: str) -> None:
    for listener in _LISTENERS:
        listener(cause)


_NUMBERS = count()
# The current stream is the last one; the first one is the default stream of the device.
_STREAMS = [PretendStream()]


def current_stream(device: Any = None) -> PretendStream:
    return _STREAMS[-1]


@contextmanager
def use_stream(stream: PretendStream | None) -> Iterator[None]:
    """Make a stream the current one, as `torch.cuda.stream` does."""
    if stream is None:
        yield
        return
    with stream:
        yield


class Origin:
    """The operator that has written a tensor last: its stream and the clock of the stream.

    Attributes:
        is_copy: True if the tensor is a copy of a tensor of the host.
        users: The numbers of other streams that were recorded as users of its memory.
    """

    def __init__(self, *, is_copy: bool = False) -> None:
        stream = _STREAMS[-1]
        self.number, self.clock = stream.number, stream.clock
        self.is_copy = is_copy
        self.users: set[int] = set()

    def check_use(self, operator: Any) -> None:
        """Raise if the current stream may run the operator too early, or if the memory may be reused before it."""
        stream = _STREAMS[-1]
        if stream.number == self.number:
            return
        if stream.seen.get(self.number, -1) < self.clock:
            raise RuntimeError(
                f"{operator}: stream {stream.number} uses a tensor that stream {self.number} writes, without waiting"
            )
        if self.is_copy and stream.number not in self.users:
            raise RuntimeError(
                f"{operator}: stream {stream.number} uses memory of stream {self.number} without `record_stream`"
            )


def count_operator() -> None:
    """Advance the clock of the current stream."""
    _STREAMS[-1].clock += 1


@contextmanager
def installed(listener: Callable[[str], None]) -> Iterator[None]:
    """Use these streams for torch's functions of the current accelerator, and report when the host waits for one."""
    _LISTENERS.append(listener)
    with (
        patch.object(torch.accelerator, "synchronize", lambda device=None: note_wait("synchronize")),
        patch.object(torch, "Stream", PretendStream),
        patch.object(torch, "Event", PretendEvent),
        patch.object(torch.accelerator, "current_stream", current_stream),
    ):
        try:
            yield
        finally:
            _LISTENERS.remove(listener)
