"""Streams: the one place where the runtime orders work on a device.

Work given to one stream runs in order; two streams know nothing of each other. So
what runs beside the computation, on a *side* stream, needs two waits: it must not
begin before its inputs are there, and what uses its results must not begin before it
is done. ``start`` makes both; nothing else in the runtime needs to know of streams.

``Streams`` is the interface, ``CudaStreams`` is made of torch's streams. The tests have
one of their own, on host memory, whose streams are threads.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

R = TypeVar("R")


class Streams(Protocol):
    """The streams of one device. A stream and an event are the backend's own objects.

    Attributes:
        device: The device.
    """

    @property
    def device(self) -> torch.device: ...

    def current(self) -> Any:
        """The stream that the calling thread's torch operations go to."""

    def side(self) -> Any:
        """The stream for communication beside the computation; always the same."""

    def handle(self, stream: Any) -> int:
        """The stream as a number, as NCCL takes it."""

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Make it the current one inside of a ``with`` block."""

    def record(self, stream: Any) -> Any:
        """An event that passes when all work given to ``stream`` so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Later work on ``stream`` begins when the event has passed."""

    def passed(self, event: Any) -> bool:
        """Whether an event has passed; never waits."""

    def keep(self, x: torch.Tensor, stream: Any) -> None:
        """``stream`` uses ``x``: its memory is not given out again before."""

    def synchronize(self, stream: Any) -> None:
        """Wait on the host until all work given to ``stream`` is done."""

    def activate(self) -> AbstractContextManager[None]:
        """Make the device the current one inside of a ``with`` block."""

    def name(self) -> str:
        """What tells the device from all others of the job."""


class CudaStreams:
    """The streams of a CUDA device, from torch.

    Args:
        device: A CUDA device with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """See ``Streams``."""
        return torch.cuda.current_stream(self.device)

    def side(self) -> torch.cuda.Stream:
        """See ``Streams``; of high priority, since others wait for it."""
        if self._side is None:
            self._side = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                self.device, priority=-1
            )
        return self._side

    def handle(self, stream: torch.cuda.Stream) -> int:
        """See ``Streams``."""
        return int(stream.cuda_stream)

    @contextmanager
    def use(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``Streams``."""
        with torch.cuda.stream(stream):
            yield

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See ``Streams``."""
        event: torch.cuda.Event = stream.record_event()
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See ``Streams``."""
        stream.wait_event(event)

    def passed(self, event: torch.cuda.Event) -> bool:
        """See ``Streams``."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def keep(self, x: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """See ``Streams``."""
        x.record_stream(stream)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """See ``Streams``."""
        stream.synchronize()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """See ``Streams``."""
        with torch.cuda.device(self.device):
            yield

    def name(self) -> str:
        """See ``Streams``."""
        found = torch.cuda.get_device_properties(self.device)
        return f"{getattr(found, 'uuid', self.device)} of host {socket.gethostname()}"


class Pending(Generic[R]):
    """What ``start`` has begun. ``wait`` gives the result.

    Args:
        streams: The device's streams.
        result: The tensor, or the list or tuple of tensors.
        done: The event of its end.
    """

    __slots__ = ("_done", "_result", "_streams")

    def __init__(self, streams: Streams, result: R, done: Any) -> None:
        self._streams = streams
        self._result = result
        self._done = done

    def ready(self) -> bool:
        """Whether ``wait`` would not delay the current stream."""
        return self._streams.passed(self._done)

    def wait(self) -> R:
        """The result, for use by the current stream; the host does not wait.

        May be called several times, and on several streams.
        """
        streams = self._streams
        stream = streams.current()
        streams.wait(stream, self._done)
        for x in _tensors(self._result):
            streams.keep(x, stream)
        return self._result


def start(streams: Streams, function: Callable[..., R], *args: Any) -> Pending[R]:
    """Run a function on the side stream, beside what the current stream does.

    It begins when all is done that the current stream has been given so far, so its
    arguments may be results of that. They must not be written in place before the
    result has been waited for. All ranks of an axis start, and call, in one order.

    Args:
        streams: The device's streams.
        function: Calls torch operations and collectives; gives a tensor, or a list or
            tuple of tensors.
        *args: Its arguments; the tensors among them, also in lists and tuples, are
            kept until it is done.

    Example:
        pending = start(streams, comm.all_reduce, gradient)
        ...  # computes
        total = pending.wait()
    """
    side = streams.side()
    streams.wait(side, streams.record(streams.current()))
    with streams.use(side):
        result = function(*args)
    for x in _tensors(args):
        streams.keep(x, side)
    return Pending(streams, result, streams.record(side))


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _tensors(item)
