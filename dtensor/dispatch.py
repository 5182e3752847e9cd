"""From a torch call on DTensors to a call on local shards.

``__torch_function__`` lands here through ``registry.HANDLERS``. For an op of the
rule table: look the plan up in the cache, keyed by function, input specs and
non-tensor arguments; move the operands that the plan wants elsewhere; run the same
torch function on the local shards with torch-function handling off; give the result
its type. The plan is made once, from the specs alone, hence alike on all ranks, and
illegal calls are found there, before anything is moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass as NoTF
from torch._C import _disabled_torch_function_impl as on_shards

from dtensor.calls import NoRule, PlainOperand, first_spec, promoted, tensors_in
from dtensor.fallback import fallback
from dtensor.keywords import by_signature
from dtensor.planning import Op, make_plan
from dtensor.policy import judge, promotes
from dtensor.registry import Handler
from dtensor.running import check_target, into, moved, retyped, view_of_moved
from dtensor.tensor import DTensor


class Unhashable(Exception):
    """An argument that cannot be part of a cache key: the call is planned anew."""


def frozen(x: Any, numbers: bool, floats: bool = False) -> Any:
    """An argument as part of a cache key; values carry their type (1, True, 1.0)."""
    t = type(x)
    if t is DTensor:
        return x._spec
    if t is int or t is bool:
        return (t, x) if numbers or t is bool else t
    if t is float or t is complex:
        return (t, x) if floats else t
    if x is None or t is str or x is Ellipsis:
        return x
    if t is list or t is tuple or t is torch.Size:
        return (t, *[frozen(v, numbers, floats) for v in x])
    if t is slice:
        return (t, frozen((x.start, x.stop, x.step), numbers))
    if isinstance(x, torch.Tensor):
        return (
            torch.Tensor,
            x.shape,
            x.dtype,
            x.requires_grad,
            type(x) in (torch.Tensor, torch.nn.Parameter),
        )
    if t in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        return x
    if t is torch.Generator:
        return t
    if isinstance(x, float):  # numpy's double
        return (float, float(x)) if floats else float
    if isinstance(x, np.integer):
        return (int, int(x)) if numbers else int
    if isinstance(x, dict):
        return (t, *[(k, frozen(v, numbers, floats)) for k, v in x.items()])
    if isinstance(x, tuple):
        return (t, *[frozen(v, numbers, floats) for v in x])
    raise Unhashable


NUMBERS = frozenset((int, float, bool, type(None)))
_dtype: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


def dtypes_into(key: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put the dtypes of all tensor arguments into a cache key."""
    with NoTF():
        for x in args:
            t = type(x)
            if t is DTensor:
                key.append(_dtype(x))
            elif t in NUMBERS:  # asking torch whether one is a tensor takes longer
                continue
            elif isinstance(x, torch.Tensor):
                key.append(_dtype(x))
            elif t is tuple or t is list:
                for v in x:
                    if isinstance(v, torch.Tensor):
                        key.append(_dtype(v))
                    elif type(v) is tuple or type(v) is list:
                        key.extend(_dtype(t) for _, t in tensors_in(v, {}))
        if kwargs:
            key.extend(_dtype(t) for _, t in tensors_in((), kwargs))


def planned(op: Op) -> Handler:
    """The handler of an op that has a rule."""
    numbers, dtypes, floats = op.numbers, op.dtypes, op.floats

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            args, kwargs = by_signature(func, args, kwargs)
        key: list[Any] = [func]
        spec = None
        try:
            for x in args:
                t = type(x)
                if t is DTensor:
                    spec = x._spec
                    key.append(spec)
                elif t is float and not floats:
                    key.append(t)
                else:
                    key.append(frozen(x, numbers, floats))
                    if spec is None and (t is tuple or t is list) and x:
                        if type(x[0]) is DTensor:
                            spec = x[0]._spec
            if kwargs:
                if kwargs.get("out") is not None:
                    return into(handler, func, args, kwargs)
                for k, x in kwargs.items():
                    key.append(k)
                    key.append(frozen(x, numbers, floats))
            if dtypes:
                dtypes_into(key, args, kwargs)
            if spec is None:
                spec = first_spec(args, kwargs)
            plans, whole = spec.plans, tuple(key)
            plan = plans.get(whole)
        except Unhashable:
            plan, plans, whole = None, {}, ()
        if plan is None:
            try:
                plan = plans[whole] = make_plan(op, func, args, kwargs)
            except NoRule:
                return fallback(op.name, op.inplace)(func, args, kwargs)
            except PlainOperand:
                if not promotes():
                    raise
                return handler(func, *promoted(args, kwargs))
        if plan.bare:
            # One call into C: torch functions off, then on again.
            done: Any = on_shards(func, (), args, kwargs)
            if type(done) is torch.Tensor:
                done.__class__ = DTensor
                done._spec = plan.out  # type: ignore[attr-defined]
                return done
            return retyped(done, plan)
        if plan.communicates:
            judge(op.name, plan.text, plan.nbytes, plan.mend, False)
        given = args
        if plan.moves:
            args, kwargs = moved(plan, args, kwargs)
        if plan.rewrite is not None:
            args, kwargs = plan.rewrite(args, kwargs)
        if plan.inplace:
            check_target(op.name, args[0])
        with NoTF():
            out = (
                func(*args, **kwargs)
                if plan.run is None
                else plan.run(func, args, kwargs)
            )
        if plan.moved_view:
            return view_of_moved(out, plan, given[0] if given else None, args, kwargs)
        if type(out) is torch.Tensor:
            out.__class__ = DTensor
            out._spec = plan.out  # type: ignore[attr-defined]
            return out
        return retyped(out, plan)

    return handler
