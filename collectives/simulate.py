"""``simulate``: run a program on N ranks as threads of this process."""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from dtensor.collectives.threads import Generators, Hub
from dtensor.mesh.world import World, use_world

T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda")
_GRACE = 1.0  # seconds a stopped rank has to end by itself


def simulate(
    fn: Callable[..., T],
    ranks: int = 4,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = 60,
) -> list[T]:
    """Run ``fn`` once per rank, each in a thread that is one rank of a new world.

    A rank starts with a copy of the caller's context variables (so with its ambient
    mesh), and with its grad mode, inference mode, autocast state and default device.
    ``args`` and ``kwargs`` are the same objects on every rank. What torch keeps per
    process stays shared: the default dtype, the level of forward-mode differentiation.

    Random numbers are per rank, as under MPI: every rank starts with the caller's
    states of the global CPU generators of torch, ``random`` and NumPy and has them to
    itself, so ranks that seed alike draw alike. The caller's are as before afterwards.

    The ranks take turns: one runs until it waits in a collective or ends. A run is
    therefore deterministic, and a deadlock is found at once; but a rank must not wait
    for another one by other means than collectives.

    Args:
        fn: The program; called as ``fn(*args, **kwargs)`` on every rank.
        ranks: Number of ranks.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds until the run is given up, or None for no limit.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: What the first rank to fail raised, with its own traceback and a
            note that names the rank. The other ranks are released.
        TimeoutError: The time is up; the message says what each rank is doing.
        ValueError: ``ranks`` is not a number of ranks.

    Example:
        >>> from dtensor.mesh.world import get_rank
        >>> simulate(lambda base: base + get_rank(), ranks=3, args=(10,))
        [10, 11, 12]
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(
            f"simulate: not a number of ranks, got {ranks!r}, expected a whole number "
            f"of one or more. Call simulate(fn, ranks=4)."
        )
    hub = Hub(ranks)
    generators = Generators()
    before = generators.read()
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks
    state = _ThreadState()

    def program(rank: int) -> None:
        world = World(rank, ranks, "threads", hub)
        with ExitStack() as stack:
            state.enter(stack)
            stack.enter_context(use_world(world))
            results[rank] = fn(*args, **(kwargs or {}))

    def live(rank: int, gate: Any, context: contextvars.Context) -> None:
        gate.lock.acquire()
        error: BaseException | None = None
        try:
            if not hub.over():
                context.run(program, rank)
        except SystemExit as left:
            # As under MPI: leaving with zero is an early end, all else a failure.
            error = None if left.code in (None, 0) else left
        except BaseException as raised:  # noqa: BLE001 - handed to the caller
            error = raised
        errors[rank] = error
        hub.end(rank, error)

    threads = [
        threading.Thread(
            target=live,
            args=(rank, hub.seat(rank), contextvars.copy_context()),
            name=f"rank {rank} of {ranks}",
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        hub.start()
        _wait(hub, threads, timeout)
    except BaseException:
        hub.stop("the run was given up")
        _end(threads)
        raise
    finally:
        generators.read()
        generators.write(before)
    if hub.failed is not None:
        error = errors[hub.failed]
        if error is not None:
            _note(error, f"raised on rank {hub.failed} of {ranks} in simulate")
            try:
                raise error
            finally:
                # The traceback holds this frame: break the cycle through it.
                del error, errors
    return results


def _wait(hub: Hub, threads: list[threading.Thread], timeout: float | None) -> None:
    limit = None if timeout is None else time.monotonic() + timeout
    for thread in threads:
        thread.join(None if limit is None else max(0.0, limit - time.monotonic()))
        if not thread.is_alive():
            continue
        rows = hub.states()
        frames = sys._current_frames()
        for rank, row in enumerate(rows):
            frame = frames.get(threads[rank].ident or 0)
            if row.endswith(" runs") and frame is not None:
                code = frame.f_code
                rows[rank] += f" {code.co_name} ({code.co_filename}:{frame.f_lineno})"
        raise TimeoutError(
            f"simulate: the ranks are not done, got {timeout} seconds and "
            f"{'; '.join(rows)}, expected all ranks to return. "
            f"Call simulate(fn, timeout=...) with more seconds, or None for no limit."
        )


def _end(threads: list[threading.Thread]) -> None:
    """Have no thread left behind: ranks that compute on are interrupted."""
    for interrupt in (False, True):
        limit = time.monotonic() + _GRACE
        for thread in threads:
            if interrupt and thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
        for thread in threads:
            thread.join(max(0.0, limit - time.monotonic()))


def _note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        first = f"{error.args[0]}\n{text}" if error.args else text
        error.args = (first, *error.args[1:])


class _ThreadState:
    """What torch keeps per thread, as the creating thread has it."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.cache = torch.is_autocast_cache_enabled()
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]

    def enter(self, stack: ExitStack) -> None:
        """Set it in the calling thread until the stack unwinds."""
        if self.inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self.grad))
        if self.device.type != "cpu":
            stack.enter_context(self.device)
        for device, dtype in self.autocast:
            stack.enter_context(
                torch.autocast(device, dtype=dtype, cache_enabled=self.cache)
            )
