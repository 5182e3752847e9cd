"""Python-level torch functions: their bodies run on the DTensors themselves."""

from __future__ import annotations

import types
from contextvars import ContextVar
from typing import Any

import torch

from dtensor.registry import Handler

_OPEN: ContextVar[tuple[Any, ...]] = ContextVar("dtensor_open", default=())


_NEVER: dict[str, Any] = {
    "has_torch_function": lambda *_: False,
    "has_torch_function_unary": lambda *_: False,
    "has_torch_function_variadic": lambda *_: False,
}


def opened(func: Any, again: Handler) -> Handler:
    """Run the body of a Python-level torch function on the DTensors themselves.

    Such a function only calls other torch functions; its first lines ask whether to
    hand over to ``__torch_function__``. A copy whose globals answer no runs the body
    with global shapes, and every torch function inside comes back here.

    Args:
        func: The function.
        again: Answers where the body hands the same function over once more, from a
            helper of its own.
    """
    inner = _asking_nobody(func)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = _OPEN.get()
        if func in running:
            return again(func, args, kwargs)
        token = _OPEN.set((*running, func))
        try:
            return inner(*args, **kwargs)
        finally:
            _OPEN.reset(token)

    return handler


class _Instead:
    """A module with some of its attributes replaced."""

    def __init__(self, module: types.ModuleType, **own: Any) -> None:
        self.__dict__.update(own)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _never_by_module(func: types.FunctionType) -> dict[str, Any]:
    """``torch.nn.init`` asks through ``torch.overrides``, not by a global of its own."""
    if func.__module__ != "torch.nn.init":
        return {}
    return {"torch": _Instead(torch, overrides=_Instead(torch.overrides, **_NEVER))}


def _asking_nobody(
    func: types.FunctionType, outer: tuple[Any, ...] = ()
) -> types.FunctionType:
    """A copy of a function, and of those in its closure, that hands nothing over."""
    outer = (*outer, func)  # a function may refer to itself
    cells = tuple(
        types.CellType(_asking_nobody(c.cell_contents, outer))
        if isinstance(c.cell_contents, types.FunctionType)
        and c.cell_contents not in outer
        else c
        for c in func.__closure__ or ()
    )
    own = {  # helpers that ask on the function's behalf
        n: _asking_nobody(helper, outer)
        for n in func.__code__.co_names
        if n.startswith("_")
        and isinstance(helper := func.__globals__.get(n), types.FunctionType)
        and helper.__module__ == func.__module__
        and helper not in outer
    }
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **own, **_NEVER, **_never_by_module(func)},
        func.__name__,
        func.__defaults__,
        cells or None,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
