"""Hooks on tensors get typed cotangents, and may give typed ones back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.errors import ShardingError
from dtensor.gradients import average, divided
from dtensor.placement import show
from dtensor.redistribute import plain
from dtensor.registry import handles
from dtensor.spec import Spec
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor


RAW: Any = torch.Tensor


def cotangent(g: T, spec: Spec) -> DTensor:
    """A local cotangent of a tensor of this spec, typed with the dual placements."""
    n = average(spec)
    with NoTF():
        return typed(g.view_as(g) if n == 1 else g * n, spec.dual())


def uncotangent(g: Any, spec: Spec, what: str) -> T | None:
    """What a hook gave back, as the local cotangent the engine goes on with."""
    if g is None:
        return None
    if isinstance(g, DTensor):
        if g._spec.mesh is not spec.mesh or g._spec.shape != spec.shape:
            raise ShardingError(
                f"{what}: the returned gradient does not fit, got {g!r}, expected "
                f"shape {tuple(spec.shape)} placed {show(spec.dual().placements)}. "
                "Return a gradient of the tensor's own shape and mesh."
            )
        return divided(plain(redistributed(g, spec.dual())), spec)
    if isinstance(g, T):
        return g
    raise TypeError(f"{what}: a hook returns a tensor or None, got {type(g)}.")


@handles(T.register_hook)
def _register_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, hook = tuple(args) + tuple(kwargs.values())
    if not isinstance(x, DTensor):
        raise TypeError("register_hook: expected a DTensor")
    spec = x._spec
    spec.dual()  # refuses what has no gradient of its own

    def typed_hook(g: T) -> T | None:
        return uncotangent(hook(cotangent(g, spec)), spec, "register_hook")

    with NoTF():
        return RAW.register_hook(x, typed_hook)


class HookHandle:
    """Takes a post-accumulate hook off again."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], number: int) -> None:
        self._hooks, self._number = hooks, number

    def remove(self) -> None:
        """Forget the hook; a second call does nothing."""
        self._hooks.pop(self._number, None)


@handles(T.register_post_accumulate_grad_hook)
def _post_hook(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, hook = tuple(args) + tuple(kwargs.values())
    if not plain(x).requires_grad or not x.is_leaf:
        raise RuntimeError(
            "register_post_accumulate_grad_hook: only a leaf that requires grad has "
            "a gradient to accumulate. Call x.requires_grad_() first."
        )
    hooks = x.__dict__.setdefault("_user_post_hooks", {})
    number = max(hooks, default=-1) + 1
    hooks[number] = hook

    if "_post_runner" not in x.__dict__:
        x.__dict__["_post_runner"] = True
        ref = weakref.ref(x)

        def settled(_: Any) -> None:
            leaf = ref()
            bucket = leaf.__dict__.get("_in_bucket") if leaf is not None else None
            if leaf is None or bucket is not None and bucket() is not None:
                return  # the bucket runs them after the reduction
            for h in list(hooks.values()):
                h(leaf)

        with NoTF():
            RAW.register_post_accumulate_grad_hook(x, settled)
    return HookHandle(hooks, number)


@handles(T.retain_grad)
def _retain_grad(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    args[0]._spec.dual()  # refuses what has no gradient of its own
    if average(args[0]._spec) != 1:
        raise ShardingError(
            f"retain_grad: the gradient of an average cannot be kept, got {args[0]!r}. "
            "Call x.redistribute(Replicate()) and retain the gradient of the result."
        )
    with NoTF():
        func(*args, **kwargs)
