"""Lists of tensors: foreach ops, fused optimizers and norms for clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.calls import Call, NoRule, Operand, Path, operands_of, tensors_in
from dtensor.notation import Layout
from dtensor.placement import Placements, Replicate
from dtensor.planning import settled
from dtensor.redistribute import plain, transition
from dtensor.registry import Handler
from dtensor.spec import spec_of
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor


def foreach(element: Callable[[Call], Any]) -> Callable[[Call], Layout | None]:
    """The rule of ``_foreach_NAME``: the rule of the op on each element.

    Args:
        element: The pointwise rule of one element.
    """

    def rule(call: Call) -> Layout | None:
        lists = [a for a in call.args if isinstance(a, (list, tuple))]
        count = len(lists[0])
        # One tensor for all elements is whole for each of them.
        shared = {
            id(o): Operand(o.spec.replicated(), o.dtype, o.path, o.distributed)
            for o in call.operands
            if len(o.path) == 1 and o.path[0] != 0
        }
        # alpha= may be a tensor of one number.
        wanted: dict[Path, Placements] = {
            o.path: o.spec.replicated().placements
            for o in call.operands
            if isinstance(o.path[0], str)
        }
        outs: list[Placements] = []
        shapes = []
        for i in range(count):
            args = tuple(
                a[i]
                if isinstance(a, (list, tuple)) and len(a) == count
                else shared.get(id(a), a)
                for a in call.args
            )
            inside = [a for a in args if isinstance(a, Operand)]
            one = Call(call.name, call.func, args, call.kwargs, inside, call.inplace)
            n = element(one)
            if not isinstance(n, Layout):
                n = settled(n, inside, n.shapes, 0 if call.inplace else None)
            if n is None:
                return None
            for o, places in zip(inside, n.ins, strict=True):
                whole = (Replicate(),) * len(places)
                if o in shared.values() and places != whole:
                    return None
                wanted[o.path] = places
            outs.append(n.outs[0])
            shapes.append(n.shapes[0])
        if len(wanted) != len(call.operands):
            raise NoRule("lists of unlike lengths")
        ins = [wanted[o.path] for o in call.operands]
        return Layout(ins, outs, shapes, many=True)

    return rule


def by_mesh(handler: Handler) -> Handler:
    """A handler of lists whose elements lie on several meshes, or are plain.

    Elements are independent of each other: those of one mesh go together.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lead = args[0] if args and isinstance(args[0], (list, tuple)) else ()
        meshes = [t._spec.mesh if isinstance(t, DTensor) else None for t in lead]
        if len(set(meshes)) < 2:
            return handler(func, args, kwargs)
        count = len(meshes)
        out: list[Any] = [None] * count
        for mesh in dict.fromkeys(meshes):
            at = [i for i, m in enumerate(meshes) if m is mesh]

            def pick(x: Any, at: list[int] = at, mesh: Any = mesh) -> Any:
                if isinstance(x, (list, tuple)):
                    return [x[i] for i in at] if len(x) == count else x
                if isinstance(x, DTensor) and x._spec.mesh is not mesh:
                    return plain(redistributed(x, x._spec.replicated())).detach()
                return x

            some = tuple(pick(a) for a in args)
            named = {k: pick(v) for k, v in kwargs.items()}
            if any(isinstance(t, DTensor) for _, t in tensors_in(some, named)):
                found = handler(func, some, named)
            else:
                with NoTF():
                    found = func(*some, **named)
            for i, o in zip(at, found or (), strict=False):
                out[i] = o
        if func.__name__.endswith("_"):
            return None
        return tuple(out) if isinstance(lead, tuple) else out

    return run


def fused_optimizer(call: Call) -> Layout | None:
    """``_fused_adamw_`` and its kind: everything goes where its parameter is."""
    params = call.args[0]
    ins = []
    for o in call.operands:
        index = o.path[1] if len(o.path) > 1 else None
        if index is None or o.shape != params[index].shape:
            ins.append((Replicate(),) * o.spec.mesh.ndim)
            continue
        ins.append(params[index].placements)
        written = o.path[0] not in (1, "grads")
        if written and o.placements != params[index].placements:
            return None
    return Layout(ins, [], [], many=True)


def local_powers(tensors: list[T], order: float) -> T:
    """One entry per tensor: sum of |x|**order of its shard, or max for infinity."""
    if tensors[0].dtype in (torch.float16, torch.bfloat16):
        tensors = [t.float() for t in tensors]  # a square of 256 is not in float16
    if order == float("inf"):
        parts = [t.abs().max() if t.numel() else t.new_zeros(()).abs() for t in tensors]
    elif order == 2.0:
        parts = [torch.linalg.vector_norm(t.reshape(-1), 2).square() for t in tensors]
    else:
        parts = [t.abs().pow(order).sum() for t in tensors]
    return torch.stack(parts)


def foreach_norm(fallback: Handler) -> Handler:
    """``_foreach_norm``: local powers, one small all-reduce per mesh axis, the root."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(args[0])
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        operands_of("_foreach_norm", args, kwargs, False)
        if not all(isinstance(t, DTensor) for t in tensors):
            return fallback(func, args, kwargs)
        if order == 0 or order == float("-inf") or kwargs.get("dtype") is not None:
            return fallback(func, args, kwargs)
        if torch.is_grad_enabled() and any(plain(t).requires_grad for t in tensors):
            return [torch.linalg.vector_norm(t, order) for t in tensors]
        with NoTF(), torch.no_grad():
            reduced = []
            for t in tensors:  # addends must be summed before a norm
                whole = tuple(
                    Replicate() if p.is_partial() else p for p in t._spec.placements
                )
                reduced.append((t, t._spec.replace(whole)))
            locals_ = [transition(t._spec, s)(t) for t, s in reduced]
            spec = tensors[0]._spec
            out: list[Any] = [None] * len(tensors)
            if spec.coordinate is None:
                none = spec_of(spec.mesh, spec.replicated().placements, (), spec.world)
                return [typed(t.new_empty(0), none) for t in locals_]
            for dtype in dict.fromkeys(t.dtype for t in locals_):
                at = [i for i, t in enumerate(locals_) if t.dtype == dtype]
                powers = local_powers([locals_[i] for i in at], float(order))
                for axis in range(spec.mesh.ndim):
                    cut = [reduced[i][1].placements[axis].is_cut() for i in at]
                    if spec.mesh.shape[axis] == 1 or not any(cut):
                        continue
                    op = "max" if order == float("inf") else "sum"
                    if op == "sum" and spec.coordinate[axis] != 0:
                        copies = [k for k, c in enumerate(cut) if not c]
                        powers[copies] = 0
                    powers = spec.comm(axis).all_reduce(powers, op)
                if order != float("inf"):
                    powers = powers.pow(1.0 / order)
                norms = spec_of(spec.mesh, spec.replicated().placements, (), spec.world)
                for k, i in enumerate(at):
                    out[i] = typed(powers[k].to(dtype.to_real()).clone(), norms)
        return out

    return handler
