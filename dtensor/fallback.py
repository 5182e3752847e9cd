"""Ops without a rule: gather every operand, run on whole values; right, not fast."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.absent import absent, written
from dtensor.calls import (
    PlainOperand,
    first_spec,
    meta_run,
    operands_of,
    promoted,
    tensors_in,
)
from dtensor.errors import ShardingError
from dtensor.placement import Replicate, show
from dtensor.planning import Plan, mend, plain_arguments
from dtensor.policy import judge, promotes
from dtensor.redistribute import alias, transition
from dtensor.registry import Handler
from dtensor.running import check_target, into, moved
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor


def fallback(name: str, inplace: bool) -> Handler:
    """Gather every operand, run the function on the whole values: right, not fast."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("out") is not None:
            return into(handler, func, args, kwargs)
        try:
            operands = operands_of(name, args, kwargs, inplace)
        except PlainOperand:
            if not promotes():
                raise
            return handler(func, *promoted(args, kwargs))
        spec = first_spec(args, kwargs)
        if spec.coordinate is None:
            if inplace:
                written(args[0], [t for _, t in tensors_in(args, kwargs)][1:])
                return args[0]
            metas = meta_run(func, args, kwargs)
            likes = [((0,) * max(1, m.ndim), m.dtype) for m in metas]
            made = [
                _retype_whole(t, spec, m.shape)
                for t, m in zip(
                    absent(likes, [t for _, t in tensors_in(args, kwargs)]),
                    metas,
                    strict=True,
                )
            ]
            return made[0] if len(made) == 1 else tuple(made)
        moves = []
        stuck = any(isinstance(a, DTensor) and a._moved_view for a in args)
        for o in operands:
            if o.spec is not o.spec.replicated():
                moves.append((o.path, transition(o.spec, o.spec.replicated())))
        text = ", ".join(f"{tuple(o.shape)}{show(o.placements)}" for o in operands)
        if moves:
            if inplace and any(p[0] == 0 for p, _ in moves):
                raise ShardingError(
                    f"{name}: has no rule for writing in place into a sharded tensor, "
                    f"got operands {text} on {spec.mesh!r}. Call "
                    "x = x.redistribute(Replicate()) first, or use the out-of-place op."
                )
            size = sum(
                t.elements * o.dtype.itemsize
                for o in operands
                for p, t in moves
                if p == o.path
            )
            goals = [
                (i, o.spec.replicated().placements)
                for i, o in enumerate(operands)
                if o.spec is not o.spec.replicated()
            ]
            judge(name, text, size, mend(goals), True)
            plan = Plan(tuple(moves), None, None, None, True, False, inplace, text)
            args, kwargs = moved(plan, args, kwargs)
        elif inplace:
            check_target(name, args[0])
        # Python code would see global shapes, or save DTensors for its backward.
        if isinstance(func, types.FunctionType) or ("::" in name and not inplace):
            args, kwargs = plain_arguments(args), plain_arguments(kwargs)
        with NoTF():
            out = func(*args, **kwargs)
            if inplace and isinstance(args[0], DTensor):
                check_shape_kept(name, args[0])
        given = {id(t) for _, t in tensors_in(args, kwargs)}

        def whole(o: Any) -> Any:
            if isinstance(o, torch.Tensor):
                if isinstance(o, DTensor):
                    return o
                if id(o) in given and not moves:
                    o = alias(o)
                if (moves or stuck) and o._is_view():
                    o._moved_view = True
                return _retype_whole(o, spec, o.shape)
            if (
                isinstance(o, tuple)
                and hasattr(o, "_fields")
                or isinstance(o, torch.Size)
            ):
                return o
            if type(o) in (list, tuple):
                return type(o)(whole(v) for v in o)
            if isinstance(o, tuple):  # torch.return_types: type the elements in place
                for v in o:
                    whole(v)
            return o

        return whole(out)

    return handler


def _retype_whole(t: torch.Tensor, spec: Spec, shape: Sequence[int]) -> DTensor:
    t.__class__ = DTensor
    t._spec = spec_of(  # type: ignore[attr-defined]
        spec.mesh, (Replicate(),) * spec.mesh.ndim, shape, spec.world
    )
    return t  # type: ignore[return-value]


def check_shape_kept(name: str, target: DTensor) -> None:
    """An op without a rule that resized its target is found out on every rank."""
    local = torch.Tensor.shape.__get__(target)  # type: ignore[attr-defined]
    if local != target._spec.local_shape:
        raise ShardingError(
            f"{name}: a DTensor keeps its shape, got a shard of {tuple(local)}, expected "
            f"{tuple(target._spec.local_shape)}. Its values are lost; make a new tensor."
        )
