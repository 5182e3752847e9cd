"""Running a plan: operands moved, results typed, targets of writes checked."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import Path
from dtensor.errors import ShardingError
from dtensor.moved_views import linked
from dtensor.planning import Plan
from dtensor.redistribute import Transition, alias
from dtensor.registry import Handler
from dtensor.tensor import DTensor


def moved(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the operands of ``plan.moves`` redistributed."""
    new_args: list[Any] = list(args)
    new_kwargs = dict(kwargs)
    with NoTF():
        for path, move in plan.moves:
            top = path[0]
            holder: Any = new_args if isinstance(top, int) else new_kwargs
            if len(path) == 1:
                holder[top] = move(holder[top])
            else:
                holder[top] = _put(holder[top], path[1:], move)
    return tuple(new_args), new_kwargs


def _put(x: Any, path: Path, move: Transition) -> Any:
    """A copy of a nested argument with the tensor at ``path`` moved."""
    if not path:
        return move(x)
    items = list(x)
    items[path[0]] = _put(items[path[0]], path[1:], move)
    return tuple(items) if isinstance(x, tuple) else items


def retyped(out: Any, plan: Plan) -> Any:
    """Type a result that is not one fresh plain tensor."""
    if isinstance(out, DTensor):
        if plan.inplace or out._spec is plan.out:
            return out
        return retyped(alias(out), plan)
    if isinstance(out, torch.Tensor):
        out.__class__ = DTensor
        out._spec = plan.out  # type: ignore[attr-defined]
        if plan.moved_view:
            out._moved_view = True  # type: ignore[attr-defined]
        return out
    if isinstance(out, (tuple, list)):
        specs = plan.out if isinstance(plan.out, list) else [plan.out] * len(out)
        if all(isinstance(o, torch.Tensor) and type(o) is not DTensor for o in out):
            for o, s in zip(out, specs, strict=True):
                o.__class__ = DTensor
                o._spec = s
                if plan.moved_view:
                    o._moved_view = True
            return out
        items = []
        for o, s in zip(out, specs, strict=True):
            if isinstance(o, DTensor) and o._spec is not s and not plan.inplace:
                o = alias(o)
            if isinstance(o, torch.Tensor) and type(o) is not DTensor:
                o.__class__ = DTensor
                o._spec = s  # type: ignore[attr-defined]
            items.append(o)
        return type(out)(items)
    return out


def view_of_moved(
    out: Any, plan: Plan, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Link the results of a view op whose operand had to be moved to that operand."""
    spec = next((move.dst for path, move in plan.moves if path == (0,)), None)
    indices = None if plan.reads is None else plan.reads(args, kwargs)
    return linked(retyped(out, plan), base, args[0] if args else None, spec, indices)


def into(handler: Handler, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, then copy into the given DTensor."""
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    out = kwargs["out"]
    name = getattr(func, "__name__", str(func))
    if not isinstance(out, DTensor):
        raise ShardingError(
            f"{name}: out= must be a DTensor where the operands are, got "
            f"{type(out).__name__}. Leave out= away, or give a DTensor of the result's "
            "shape."
        )
    result = handler(func, args, rest) if args or rest else None
    if not isinstance(result, DTensor) or result._spec.mesh is not out._spec.mesh:
        raise ShardingError(
            f"{name}: out= needs DTensor operands on the mesh of out. Distribute them "
            "with distribute_tensor(t, mesh, placements)."
        )
    if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
        raise ShardingError(
            f"{name}: out= does not fit the result, got shape {tuple(out.shape)} and "
            f"{out.dtype}, expected {tuple(result.shape)} and {result.dtype}. Leave "
            "out= away."
        )
    with torch.no_grad():
        out.copy_(result)
    return out


def check_target(name: str, target: Any) -> None:
    """Refuse a write into a view that had to be gathered: it would be lost."""
    for t in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(t, DTensor) and t._moved_view:
            raise ShardingError(
                f"{name}: a write in place cannot reach the base, since this view was "
                "made by redistributing its base. Redistribute the base first "
                "(x.redistribute(...)), then take the view, or use the out-of-place op."
            )
