"""The double of NCCL and of a GPU's streams, on host memory, for the tests.

``library()`` compiles the C++ beside this file; ``load`` puts it where CuPy's own
binding finds it. ``HostStreams`` stands in for torch's CUDA streams: its stream 0, the
usual one, runs at once, as torch's operations on the host do; others are threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("double.cpp")
FLAGS = "-O1 -std=c++17 -shared -fPIC -Wl,-soname,libnccl.so.2".split()
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def why_not() -> str | None:
    """What is missing for the double, or None."""
    if shutil.which("g++") is None:
        return "needs g++ to build the double of NCCL"
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy, whose NCCL binding runs on the double"
    return None


def library() -> Path:
    """The compiled double; built once per user and version of its source."""
    text = SOURCE.read_bytes() + " ".join(FLAGS).encode()
    name = f"nccl-double-{os.getuid()}-{hashlib.sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    built = folder / "libnccl.so.2"
    if not built.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / f"part.{os.getpid()}"
        command = ["g++", *FLAGS, "-o", str(part), str(SOURCE), "-lrt", "-lpthread"]
        subprocess.run(command, check=True, timeout=120)
        part.replace(built)  # whole, or not at all
    return built


def load(path: str | Path) -> ctypes.CDLL:
    """Load the double before CuPy looks for NCCL."""
    double = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name in ("double_stream_create", "double_event_record"):
        double[name].restype = ctypes.c_ssize_t
    double.double_stream_call.argtypes = [ctypes.c_ssize_t, FUNCTION, ctypes.c_void_p]
    double.double_stream_wait_event.argtypes = [ctypes.c_ssize_t, ctypes.c_ssize_t]
    for name in ("stream_synchronize", "event_record", "event_query", "event_destroy"):
        double[f"double_{name}"].argtypes = [ctypes.c_ssize_t]
    return double


class Event:
    """An event, destroyed with its object."""

    def __init__(self, double: ctypes.CDLL, stream: int) -> None:
        self.number: int = double.double_event_record(stream)
        self._destroy = double.double_event_destroy

    def __del__(self) -> None:
        self._destroy(self.number)


class HostStreams:
    """Streams of a pretended device whose memory is the host's; see ``Streams``.

    Args:
        double: The loaded library.
        current: The stream that is current at first: 0, or a new one where None.
    """

    def __init__(self, double: ctypes.CDLL, current: int | None = 0) -> None:
        self.device = torch.device("cpu")
        self.kept: list[tuple[int, int]] = []  # (address, stream) of ``keep``
        self._double = double
        self._side: int = double.double_stream_create()
        self._current = double.double_stream_create() if current is None else current
        self._functions: list[Any] = []

    def current(self) -> int:
        return self._current

    def side(self) -> int:
        return self._side

    def handle(self, stream: int) -> int:
        return stream

    @contextmanager
    def use(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def record(self, stream: int) -> Event:
        return Event(self._double, stream)

    def wait(self, stream: int, event: Event) -> None:
        self._double.double_stream_wait_event(stream, event.number)

    def passed(self, event: Event) -> bool:
        return bool(self._double.double_event_query(event.number))

    def keep(self, x: torch.Tensor, stream: int) -> None:
        self.kept.append((x.data_ptr(), stream))

    def synchronize(self, stream: int) -> None:
        self._double.double_stream_synchronize(stream)

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    def name(self) -> str:
        return f"pretended device of process {os.getpid()}"

    def call(self, function: Callable[[], Any]) -> None:
        """Run a function on the current stream, after what it was given before."""
        wrapped = FUNCTION(lambda _: function())
        self._functions.append(wrapped)  # until the stream has run it
        self._double.double_stream_call(self._current, wrapped, None)
