"""Clipping gradients that lie on several meshes, in any placements, plain ones beside.

Each element counts once. A rank sums the powers of what it has, kept apart by the rows
of ranks that have the other parts: the first all-reduce finds the sums over one row for
all that is cut there, the next one those over another row, and so on: one all-reduce per
axis, of a few numbers. Axes of two meshes over the same ranks (a mesh and a slice of it)
are one row. Addends are reduced and cut at once: one reduce-scatter per axis for all of
them. A plain gradient is taken for the same on every rank, as a replicated one is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as NoTF

from dtensor.collectives.communicator import Communicator
from dtensor.errors import ShardingError
from dtensor.leaves import settle
from dtensor.mesh.chunks import chunk_sizes
from dtensor.placement import Partial, Replicate
from dtensor.redistribute import plain, transition
from dtensor.spec import Spec, spec_of
from dtensor.tensor import DTensor, redistributed, typed

T = torch.Tensor
INF = float("inf")


@dataclass(slots=True)
class Share:
    """What this rank has of some gradients.

    Attributes:
        local: The numbers.
        rows: Keys of the rows of ranks that have the other parts.
    """

    local: T
    rows: frozenset[Any]


class Rows:
    """The rows of ranks along the axes of several meshes, in order of appearance."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self.comms: dict[Any, Communicator] = {}
        for spec in specs:
            if spec.coordinate is None:
                continue
            for axis, n in enumerate(spec.mesh.shape):
                if n > 1:
                    key = row_of(spec, axis)
                    if key not in self.comms:
                        self.comms[key] = spec.comm(axis)

    def all_reduce(self, x: T, op: str) -> T:
        """Fold over all rows, one after the other."""
        for comm in self.comms.values():
            x = comm.all_reduce(x, op)
        return x


def row_of(spec: Spec, axis: int) -> tuple[int, ...]:
    """What tells this rank's row along an axis from others."""
    return spec.mesh.axis_ranks(axis)


def check_members(what: str, tensors: Sequence[T]) -> None:
    """Refuse meshes of which this rank is not on all: it could not tell the norm."""
    specs = [t._spec for t in tensors if isinstance(t, DTensor)]
    inside = [s for s in specs if s.coordinate is not None]
    outside = [s for s in specs if s.coordinate is None]
    if inside and outside:
        raise ShardingError(
            f"{what}: this rank has a part of some gradients and none of others, got "
            f"gradients on {inside[0].mesh!r} and on {outside[0].mesh!r}, expected "
            "meshes that have this rank. Clip them in two calls."
        )


def shares_of(tensors: Sequence[T]) -> list[Share]:
    """What this rank has of each tensor; addends are reduced and cut."""
    found: list[Share] = []
    addends: dict[Any, list[DTensor]] = {}
    for t in tensors:
        if not isinstance(t, DTensor):
            found.append(Share(t, frozenset()))
            continue
        spec = t._spec
        if any(p.is_partial() and p != Partial() for p in spec.placements):
            whole = [Replicate() if p.is_partial() else p for p in spec.placements]
            t = redistributed(t, spec.replace(tuple(whole)))
            spec = t._spec
        summed = [
            a
            for a, p in enumerate(spec.placements)
            if p.is_partial() and spec.mesh.shape[a] > 1
        ]
        if summed:
            rows = tuple(row_of(spec, a) for a in summed)
            addends.setdefault((rows, cut_rows(spec), t.dtype, t.device), []).append(t)
        else:
            found.append(Share(plain(t), cut_rows(spec)))
    for (rows, cut, *_), members in addends.items():
        local = torch.cat([plain(t).reshape(-1) for t in members])
        comms = Rows(t._spec for t in members).comms
        for row in rows:
            comm = comms[row]
            local = comm.reduce_scatter(local, chunk_sizes(local.numel(), comm.size))
        found.append(Share(local, cut | frozenset(rows)))
    return found


def cut_rows(spec: Spec) -> frozenset[Any]:
    """The rows along which the ranks have parts of their own."""
    return frozenset(
        row_of(spec, a)
        for a, p in enumerate(spec.placements)
        if p.is_cut() and spec.mesh.shape[a] > 1
    )


def power(tensors: Sequence[T], order: float) -> T:
    """Sum of ``|x|**order`` over tensors of one dtype, or the largest for infinity.

    Halves are taken in float32, powers added in float64: a square of 256 is not in
    float16.
    """
    exact = [
        t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors
    ]
    if order == INF:
        full = [t.abs().max() if t.numel() else t.new_zeros(()).abs() for t in exact]
        return torch.stack(full).max().double()
    norms = torch.stack(torch._foreach_norm(exact, order)).double()
    return norms.square().sum() if order == 2.0 else norms.pow(order).sum()


def total_norm(tensors: Sequence[T], order: float = 2.0) -> T:
    """The norm of all tensors together, as one vector.

    Args:
        tensors: DTensors, and plain tensors that are the same on every rank.
        order: Above zero, or infinite.

    Returns:
        A DTensor of no dims, the same on every rank, on the mesh of the first DTensor.
        Sends 2(n-1)/n numbers of 8 bytes per axis of n ranks for each way to cut, and
        (n-1)/n of the bytes of addends.
    """
    first = next(t._spec for t in tensors if isinstance(t, DTensor))
    specs = [t._spec for t in tensors if isinstance(t, DTensor)]
    dtype = tensors[0].dtype
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    dtype = dtype.to_real()
    spec = spec_of(first.mesh, first.replicated().placements, (), first.world)
    with NoTF(), torch.no_grad():
        if first.coordinate is None:
            return typed(torch.empty(0, dtype=dtype), spec)
        shares = shares_of(tensors)
        device = shares[0].local.device
        groups: dict[Any, list[T]] = {}
        for s in shares:
            key = (s.rows, s.local.dtype, s.local.device)
            groups.setdefault(key, []).append(s.local)
        ways = list(dict.fromkeys(rows for rows, *_ in groups))
        sums = torch.zeros(len(ways), dtype=torch.float64, device=device)
        for (rows, *_), members in groups.items():
            i = ways.index(rows)
            mine = power(members, order).to(device)
            sums[i] = torch.maximum(sums[i], mine) if order == INF else sums[i] + mine
        for row, comm in Rows(specs).comms.items():
            at = [i for i, rows in enumerate(ways) if row in rows]
            if at:
                sums[at] = comm.all_reduce(sums[at], "max" if order == INF else "sum")
        norm = sums.max() if order == INF else sums.sum().pow(1.0 / order)
        return typed(norm.to(dtype), spec)


def norms_together(original: Any) -> Any:
    """``get_total_norm``: of DTensors, over all their meshes."""

    @functools.wraps(original)
    def wrapper(
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        tensors = [tensors] if isinstance(tensors, T) else list(tensors)
        order = float(norm_type)
        if not any(isinstance(t, DTensor) for t in tensors) or not order > 0:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        check_members("get_total_norm", tensors)
        norm = total_norm(tensors, order)
        if error_if_nonfinite and not plain(norm).isfinite().all():
            raise RuntimeError(
                f"get_total_norm: the norm of order {order} of the gradients is not "
                f"finite, got {norm.item()}, expected a finite one to clip by. Look for "
                "the parameter at fault, or give error_if_nonfinite=False."
            )
        return norm

    return wrapper


def whole_number(x: Any) -> Any:
    """A norm as a plain number on this rank."""
    if isinstance(x, DTensor):
        return plain(redistributed(x, x._spec.replicated())).detach()
    return x


def scales_together(original: Any) -> Any:
    """``clip_grads_with_norm_``: scales shards where they lie, addends as well."""

    @functools.wraps(original)
    def wrapper(
        parameters: Any,
        max_norm: float,
        total_norm: Any,
        foreach: bool | None = None,
    ) -> None:
        parameters = [parameters] if isinstance(parameters, T) else list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        if not any(isinstance(t, DTensor) for t in (*grads, total_norm)):
            return original(parameters, max_norm, total_norm, foreach)  # type: ignore[no-any-return]
        with torch.no_grad():
            norm = whole_number(total_norm)
            if isinstance(norm, T) and norm.numel() == 0:
                return None  # a rank outside of the mesh
            for_each_local(
                grads,
                torch._foreach_mul_,
                torch.clamp(float(max_norm) / (torch.as_tensor(norm) + 1e-6), max=1.0),
            )
        return None

    return wrapper


def for_each_local(grads: Sequence[T], func: Any, number: Any) -> None:
    """Write into the shards of tensors of all meshes, by a foreach function."""
    with NoTF():
        groups: dict[Any, list[T]] = {}
        for g in grads:
            local = plain(g)
            groups.setdefault((local.dtype, local.device), []).append(local)
        for (_, device), members in groups.items():
            func(members, number.to(device) if isinstance(number, T) else number)


def values_together(original: Any) -> Any:
    """``clip_grad_value_``: addends are reduced first, which clipping needs."""

    @functools.wraps(original)
    def wrapper(
        parameters: Any, clip_value: float, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, T) else list(parameters)
        held = [p for p in parameters if isinstance(p.grad, DTensor)]
        rest = [p for p in parameters if not isinstance(p.grad, DTensor)]
        if not held:
            return original(parameters, clip_value, foreach)  # type: ignore[no-any-return]
        if any(p.grad is not None for p in rest):
            original(rest, clip_value, foreach)
        with torch.no_grad():
            reduce_addends(held)
            grads = [p.grad for p in held]
            for_each_local(grads, torch._foreach_clamp_min_, -float(clip_value))
            for_each_local(grads, torch._foreach_clamp_max_, float(clip_value))
        return None

    return wrapper


def reduce_addends(parameters: Sequence[Any]) -> None:
    """Bring gradients that are addends to the placements of their parameters."""
    held = [p for p in parameters if any(q.is_partial() for q in p.grad.placements)]
    dual = [p for p in held if p.grad._spec is p._spec.dual()]
    settled = settle([p.grad for p in dual], [p._spec for p in dual])
    for p, g in zip(dual, settled, strict=True):
        p.grad = typed(g, p._spec)
    for p in held:
        if p.grad._spec is not p._spec:
            with NoTF():
                local = transition(p.grad._spec, p._spec)(p.grad)
            p.grad = typed(local.clone(), p._spec)


def clip_grad_norm_(
    parameters: T | Iterable[T],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> T:
    """``torch.nn.utils.clip_grad_norm_``; torch's own does the same on DTensors.

    Args:
        parameters: Parameters on any meshes that have this rank, in any placements;
            their gradients too. A plain one is taken for the same on every rank.
        max_norm: Norm to clip to.
        norm_type: Order of the norm.
        error_if_nonfinite: Raise rather than scale by a norm that is not finite.
        foreach: Accepted for torch's sake; shards are always taken together.

    Returns:
        The norm before, a DTensor that is the same on every rank. Sends 2(n-1)/n
        numbers of 8 bytes per axis of n ranks for each way to cut.
    """
    clip: Any = torch.nn.utils.clip_grad_norm_
    return clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]


# What interop replaces in torch.
WRAPPED = [
    (owner, name, maker)
    for owner, names in (
        (
            torch.nn.utils.clip_grad,
            ("_get_total_norm", "_clip_grads_with_norm_", "clip_grad_value_"),
        ),
        (
            torch.nn.utils,
            ("get_total_norm", "clip_grads_with_norm_", "clip_grad_value_"),
        ),
    )
    for name, maker in zip(
        names, (norms_together, scales_together, values_together), strict=True
    )
]
