"""Program transforms do not see DTensors: ``torch.func``, ``vmap``, ``torch.compile``.

They replace tensors by wrappers of their own, around the local shard. DTensors that go
in as arguments are refused at once, those that a function closes over when it meets
them. The wrappers here are listed in ``interop.WRAPPED``.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dtensor.errors import ShardingError
from dtensor.tensor import DTensor


def holds_dtensor(x: Any) -> bool:
    """Whether ``x`` is a DTensor, or a container or module that holds one."""
    if isinstance(x, DTensor):
        return True
    if isinstance(x, (list, tuple, set, frozenset)):
        return any(holds_dtensor(v) for v in x)
    if isinstance(x, dict):
        return any(holds_dtensor(v) for v in x.values())
    x = getattr(x, "__self__", x) if isinstance(x, types.MethodType) else x
    if isinstance(x, torch.nn.Module):
        return any(isinstance(v, DTensor) for v in (*x.parameters(), *x.buffers()))
    return False


class _Guarded:
    """How many transforms run; while any does, DTensor calls look for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.usual: Any = None


_GUARDED = _Guarded()
_NO_TRANSFORM = (
    "{}: a DTensor cannot be used inside torch.func or vmap, got {}, expected plain "
    "tensors. Use torch.autograd.grad (create_graph=True for higher derivatives) on "
    "DTensors, a batch dim in place of vmap, or plain tensors: x.full_tensor()."
)


def _checked(
    cls: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
) -> Any:
    """``__torch_function__`` while some thread runs a transform."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if inside or torch._C._len_torch_dispatch_stack() > 0:
        name = getattr(func, "__name__", str(func))
        raise ShardingError(_NO_TRANSFORM.format(name, "a DTensor from outside"))
    return _GUARDED.usual(cls, func, kinds, args, kwargs)


@contextmanager
def _watching() -> Iterator[None]:
    with _GUARDED.lock:
        if _GUARDED.running == 0:
            _GUARDED.usual = DTensor.__dict__["__torch_function__"].__func__
            DTensor.__torch_function__ = classmethod(_checked)  # type: ignore[assignment,method-assign]
        _GUARDED.running += 1
    try:
        yield
    finally:
        with _GUARDED.lock:
            _GUARDED.running -= 1
            if _GUARDED.running == 0:
                DTensor.__torch_function__ = classmethod(_GUARDED.usual)  # type: ignore[assignment,method-assign]


def transforms(original: Any) -> Any:
    """A functorch transform: refuse DTensors that go in, and those it closes over."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for a in (*args[1:], *kwargs.values()):
            if holds_dtensor(a):
                name = original.__name__.strip("_").removesuffix("_impl")
                raise ShardingError(_NO_TRANSFORM.format(name, "one as an argument"))
        with _watching():
            return original(*args, **kwargs)

    return wrapper


# ---- compilers -------------------------------------------------------------------------------
def compiles(original: Any) -> Any:
    """``torch.compile``: refuse modules of DTensors now, other DTensors when met."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = args[0] if args else kwargs.get("model")
        if holds_dtensor(model):
            model = getattr(model, "__self__", model)
            raise ShardingError(
                f"torch.compile: a {type(model).__name__} holds DTensors, expected "
                "plain parameters. Run it without torch.compile, or compile the parts "
                "that compute on x.to_local()."
            )
        _watch_dynamo()
        return original(*args, **kwargs)

    return wrapper


def _watch_dynamo() -> None:
    """Make the tracer behind ``torch.compile`` refuse a DTensor in a frame."""
    from torch._dynamo import exc
    from torch._dynamo.variables.builder import VariableBuilder

    usual = VariableBuilder.wrap_tensor
    if getattr(usual, "_by_dtensor", False):
        return

    class CompileError(ShardingError, exc.TorchRuntimeError):
        """A ``ShardingError`` that the tracer passes on as it is."""

    @functools.wraps(usual)
    def wrap_tensor(self: Any, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise CompileError(
                f"torch.compile: does not see DTensors, got {value!r} in a compiled "
                "function, expected plain tensors. Run the function without "
                "torch.compile, or compile the parts that compute on x.to_local()."
            )
        return usual(self, value)

    wrap_tensor._by_dtensor = True  # type: ignore[attr-defined]
    VariableBuilder.wrap_tensor = wrap_tensor  # type: ignore[method-assign]
