"""Every pair of placements: values, inputs, gradients, second derivatives.

The truth is put together by plain torch from what all ranks hold. A slice runs here;
``make sweep-placements`` runs all pairs.
"""

from __future__ import annotations

import itertools
import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
    simulate,
)
from dtensor.placement import Placements, show
from dtensor.spec import local_shape_at
from dtensor.tensor import local_of

F64 = torch.float64
R = Replicate()
SWEEP = bool(os.environ.get("DTENSOR_SWEEP"))
OPS = ("sum", "avg", "max", "min", "product")


def kinds(dims: int) -> list[Placement]:
    """All placements of one axis for a tensor of so many dims."""
    return [R, *(Shard(d) for d in range(dims)), *(Partial(op) for op in OPS)]


def held(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], places: Placements
) -> dict[tuple[int, ...], torch.Tensor]:
    """What each coordinate holds: small numbers with ties and zeros, copies alike.

    No ties on several axes: the shares that the ranks get depend on whether one
    reduction runs over all axes or one after the other.
    """
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for at in itertools.product(*(range(n) for n in mesh_shape)):
        own = tuple(
            0 if p.is_replicate() else c for c, p in zip(at, places, strict=True)
        )
        if own not in found:
            g = torch.Generator().manual_seed(sum(c * 7**i for i, c in enumerate(own)))
            size = local_shape_at(shape, places, mesh_shape, own)
            found[own] = torch.randint(-2, 3, size, generator=g).to(F64)
            if len(mesh_shape) > 1:
                found[own] += torch.randn(size, generator=g, dtype=F64)
    return found


def value(
    mesh_shape: tuple[int, ...],
    places: Placements,
    parts: dict[tuple[int, ...], torch.Tensor],
    at: tuple[int, ...] = (),
) -> torch.Tensor:
    """The global value, axis by axis, the last one first."""
    axis = len(at)
    if axis == len(mesh_shape):
        return parts[at]
    p = places[axis]
    if isinstance(p, Replicate):
        return value(mesh_shape, places, parts, (*at, 0))
    pieces = [
        value(mesh_shape, places, parts, (*at, i)) for i in range(mesh_shape[axis])
    ]
    if isinstance(p, Shard):
        return torch.cat(pieces, p.dim)
    assert isinstance(p, Partial)
    stacked = torch.stack(pieces)
    if p.reduce_op in ("max", "min"):
        return stacked.amax(0) if p.reduce_op == "max" else stacked.amin(0)
    if p.reduce_op == "product":
        return stacked.prod(0)
    return stacked.sum(0) if p.reduce_op == "sum" else stacked.mean(0)


Pairs = list[tuple[Placements, Placements]]


def check(mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: Pairs) -> int:
    """All checks of some pairs on this rank; returns how many pairs."""
    mesh = init_device_mesh("cpu", mesh_shape)
    at = mesh.coordinate
    assert at is not None
    weight = torch.arange(1.0, 1 + math.prod(shape), dtype=F64).view(shape).sqrt()
    for src, dst in pairs:
        what = f"{shape}: {show(src)} -> {show(dst)} on {mesh_shape}"
        parts = {c: t.requires_grad_() for c, t in held(mesh_shape, shape, src).items()}
        own = tuple(0 if p.is_replicate() else c for c, p in zip(at, src, strict=True))
        want = value(mesh_shape, src, parts)
        leaves = list(parts.values())
        loss = (want.pow(2) * weight).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves)
        mine = list(parts).index(own)

        leaf = parts[own].detach().clone().requires_grad_()
        x = DTensor.from_local(leaf, mesh, src, shape=shape, run_check=False)
        y = x.redistribute(dst)
        assert y.placements == dst, what
        assert local_of(y).shape == y._spec.local_shape, what
        torch.testing.assert_close(y.full_tensor().detach(), want.detach(), msg=what)
        w = DTensor.from_local(weight, mesh, [R] * mesh.ndim, run_check=False)
        (g,) = torch.autograd.grad((y.pow(2) * w).sum(), leaf, create_graph=True)
        torch.testing.assert_close(g, first[mine], msg=f"gradient, {what}")
        (gg,) = torch.autograd.grad(g.pow(2).sum(), leaf)
        torch.testing.assert_close(gg, second[mine], msg=f"second derivative, {what}")
        assert torch.equal(leaf, parts[own]), f"{what}: the input changed"
    return len(pairs)


def every_pair(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> Pairs:
    """All pairs of layouts in the usual nesting order."""
    states = list(itertools.product(kinds(len(shape)), repeat=len(mesh_shape)))
    return list(itertools.product(states, states))


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "stride"),
    [
        ((1,), (3, 2), 3),
        ((2,), (4, 6), 3),
        ((2,), (), 1),
        ((2,), (0, 3), 3),
        ((3,), (7, 2), 5),
        ((4,), (5, 3), 7),
        ((6,), (8, 1), 9),
        ((2, 2), (5, 4), 71),
        ((2, 3), (7, 1), 131),
    ],
)
def test_pairs(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], stride: int
) -> None:
    pairs = every_pair(mesh_shape, shape)[:: 1 if SWEEP else stride]
    counts = simulate(
        check, math.prod(mesh_shape), args=(mesh_shape, shape, pairs), timeout=3000
    )
    print(f"{counts[0]} pairs on {mesh_shape}, shape {shape}")
    assert set(counts) == {len(pairs)}


places = st.tuples(*[st.sampled_from(kinds(2))] * 3)


@settings(
    max_examples=200 if SWEEP else 8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(src=places, dst=places, shape=st.tuples(st.integers(0, 9), st.integers(1, 5)))
def test_three_axes(src: Placements, dst: Placements, shape: tuple[int, int]) -> None:
    pairs = [(src, dst)]
    assert simulate(check, 8, args=((2, 2, 2), shape, pairs), timeout=100) == [1] * 8
