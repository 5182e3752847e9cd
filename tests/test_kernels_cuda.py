"""The loader of CUDA kernels: what CuPy is given, and what is refused."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dtensor.kernels import cuda

GPU = torch.device("cuda", 1)


class Calls:
    """A CuPy that writes down what it is told; ``devices`` are those made current."""

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.modules: list[dict[str, Any]] = []
        self.streams: list[tuple[int, int]] = []
        stream = types.SimpleNamespace(from_external=self.stream)
        self.cuda = types.SimpleNamespace(
            Device=lambda i: self.current("cupy", i), Stream=stream
        )

    def RawModule(self, **given: Any) -> object:
        self.modules.append(given)
        return object()

    @contextlib.contextmanager
    def current(self, whose: str, index: int) -> Iterator[None]:
        self.devices.append((whose, index))
        try:
            yield
        finally:
            self.devices.remove((whose, index))

    def stream(self, given: Any) -> Any:
        assert sorted(self.devices) == [("cupy", 1), ("torch", 1)]
        self.streams.append(given.__cuda_stream__())
        return "the stream"


class Kernel:
    """A kernel that keeps what it was launched with."""

    name = "spy"
    max_dynamic_shared_size_bytes = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[Any] = []
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(torch.cuda, "device", lambda i: made.current("torch", i))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    handle = types.SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: handle)
    cuda.module.cache_clear()
    yield made
    cuda.module.cache_clear()


def test_a_module_is_made_once_with_the_options_of_its_file(calls: Calls) -> None:
    assert cuda.module("philox") is cuda.module("philox")
    (given,) = calls.modules
    assert given["options"] == ("--std=c++17", "--fmad=false")
    assert given["code"] == (cuda.FOLDER / "philox.cu").read_text()


def test_there_is_no_module_without_cupy(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cuda.module("philox") is None


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 'sorting', expected one of .*'philox'"):
        cuda.module("sorting")


def test_a_launch_is_on_torchs_stream_of_the_device(calls: Calls) -> None:
    kernel, x = Kernel(), torch.zeros(3)
    cuda.launch(kernel, 5, 256, (x, None, np.int32(3)), GPU)
    cuda.launch(kernel, (2, 3), (32, 4), (), torch.device("cuda"), shared=100)
    assert calls.streams == [(0, 77)] * 2 and calls.devices == []
    (first, given), (second, more) = kernel.calls
    assert first == ((5,), (256,), (np.uintp(x.data_ptr()), np.uintp(0), np.int32(3)))
    assert [type(a) for a in first[2]] == [np.uintp, np.uintp, np.int32]
    assert given == {"shared_mem": 0, "stream": "the stream"}
    assert second == ((2, 3), (32, 4), ()) and more["shared_mem"] == 100
    assert kernel.max_dynamic_shared_size_bytes == 0


def test_much_shared_memory_is_asked_for(calls: Calls) -> None:
    kernel = Kernel()
    cuda.launch(kernel, 1, 1, (), GPU, shared=100_000)
    assert kernel.max_dynamic_shared_size_bytes == 100_000


@pytest.mark.parametrize("x", [1, 2.5, True, [1]])
def test_a_number_of_python_is_refused(calls: Calls, x: Any) -> None:
    kernel = Kernel()
    with pytest.raises(TypeError, match=r"no type of C, got .*as in np\.int32\(x\)"):
        cuda.launch(kernel, 1, 1, (x,), GPU)
    assert not kernel.calls


def test_a_launch_that_fails_says_which_and_why(calls: Calls) -> None:
    kernel = Kernel(ValueError("no image"))
    with pytest.raises(RuntimeError) as caught:
        cuda.launch(kernel, 7, 64, (), GPU)
    assert "spy did not start on cuda:1, got ValueError('no image')" in str(
        caught.value
    )
    assert "blocks (7,), threads (64,)" in str(caught.value)
    assert "Install cupy-cuda12x or cupy-cuda13x" in str(caught.value)
    assert calls.devices == []


def test_cupy_takes_a_stream_of_ours() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    stream = cupy.cuda.Stream.from_external(cuda._Stream(1234))
    assert stream.ptr == 1234
